"""Rotary positions: frequencies with the bits of `transformers`, rotations that are rounded once."""

from __future__ import annotations

import pytest
import torch

from megafour.config.model_schema import RopeScaling
from megafour.model.rope import inverse_frequencies, rope_tables, rotate

transformers = pytest.importorskip("transformers")
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SCALINGS = {
    "default": {},
    "linear": {"factor": 2.5},
    "linear, no power of two": {"type": "linear", "factor": 3.0},
    "llama3": {"factor": 8.0, **LLAMA3},
    "llama3, 32": {"type": "llama3", "factor": 32.0, **LLAMA3},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn, no power of two": {"type": "yarn", "factor": 3.3, "original_max_position_embeddings": 4096},
    "yarn, betas": {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096, "beta_fast": 24.0,
                    "beta_slow": 2.0, "attention_factor": 1.5},
    "yarn, factor 1": {"type": "yarn", "factor": 1.0, "original_max_position_embeddings": 4096},
    "yarn, short": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
}


@pytest.mark.parametrize(("theta", "head_dim"), [(10.0, 64), (1e4, 16), (5e5, 128), (1234567.0, 96)])
@pytest.mark.parametrize("name", SCALINGS)
def test_inverse_frequencies_have_the_bits_of_transformers(name, theta, head_dim):
    """Also with a theta so small that yarn's ramp lies beyond the last dimension."""
    values = dict(SCALINGS[name])
    kind = values.pop("type", name)
    config = transformers.LlamaConfig(
        hidden_size=2 * head_dim, num_attention_heads=2, head_dim=head_dim, max_position_embeddings=1 << 20,
        rope_parameters={"rope_type": kind, "rope_theta": theta, **values})
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    scaling = None if kind == "default" else RopeScaling(type=kind, **values)
    ours, factor = inverse_frequencies(head_dim, theta, scaling)
    assert ours.dtype == torch.float32 and torch.equal(ours, theirs.inv_freq)
    assert factor == theirs.attention_scaling


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_rotation_is_rounded_once(dtype):
    """Forward and backward, at far positions, equal fp64 ones of the same tables but for one rounding."""
    cos, sin = rope_tables(torch.arange(99_000, 99_032)[:, None], 64, 1e4, None)
    assert cos.dtype == sin.dtype == torch.float32
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(32, 1, 2, 64, generator=generator).to(dtype) for _ in range(2))
    low, high = x.clone().requires_grad_(), x.double().requires_grad_()
    rotate(low, cos, sin).backward(grad)
    rotate(high, cos, sin).backward(grad.double())
    for ours, exact in ((rotate(x, cos, sin), rotate(x.double(), cos, sin)), (low.grad, high.grad)):
        assert ours.dtype == dtype
        # half a unit in the last place, and the rounding of fp32 before it
        assert ((ours.double() - exact).abs() <= torch.finfo(dtype).eps / 2 * exact.abs() + 1e-6).all()
