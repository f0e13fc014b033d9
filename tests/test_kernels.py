"""The kernels against plain float64 autograd: attention backends, dropout by address, norms, activations."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from megafour.kernels.activation import activation
from megafour.kernels.attention import Dropped, select_attention
from megafour.kernels.attention_cpu import TorchCPUAttention
from megafour.kernels.attention_plain import PlainAttention
from megafour.kernels.norm import layer_norm, rms_norm
from megafour.parallel.random import AttentionDropout
from megafour.sizes import PRODUCTION

QUERY_BLOCK = PRODUCTION.query_block
BACKENDS = {"torch": TorchCPUAttention(), "plain": PlainAttention()}


def inputs(n, m, heads, kv_heads, d=8, b=2, dtype=torch.float64):
    """q, k, v and the output's gradient, as the model makes them: sequence first underneath, cut from wider rows."""
    gen = torch.Generator().manual_seed(heads * 1000 + n)
    rows = torch.randn(max(n, m), b, heads + 2 * kv_heads, d, generator=gen, dtype=torch.float64).to(dtype)
    q, k, v = rows.split([heads, kv_heads, kv_heads], 2)
    grad = torch.randn(n, b, heads, d, generator=gen, dtype=torch.float64).to(dtype)
    return q[:n].transpose(0, 1), k[:m].transpose(0, 1), v[:m].transpose(0, 1), grad.transpose(0, 1)


def reference(q, k, v, grad, causal, scale, keep=None):
    """(out, lse, dq, dk, dv) by matmul, softmax and autograd, K/V heads repeated."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k.repeat_interleave(group, 2)) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    weights = scores.softmax(-1) if keep is None else scores.softmax(-1) * keep
    out = torch.einsum("bhnm,bmhd->bnhd", weights, v.repeat_interleave(group, 2))
    out.backward(grad.double())
    return out.detach(), scores.logsumexp(-1).detach(), q.grad, k.grad, v.grad


def worst(got, expected):
    return max(((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(got, expected, strict=True))


def run(backend, q, k, v, grad, causal, scale, dropped=None):
    out, lse = backend.forward(q, k, v, causal=causal, scale=scale, dropped=dropped)
    return out, lse, *backend.backward(grad, q, k, v, out, lse, causal=causal, scale=scale, dropped=dropped)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads,kv_heads", [(4, 4), (4, 2), (6, 2), (4, 1), (1, 1)])
@pytest.mark.parametrize("n,m,causal", [(16, 16, True), (12, 5, False), (5, 12, False),
                                        (QUERY_BLOCK + 44, QUERY_BLOCK + 44, True)])
def test_attention_equals_plain_autograd(backend, heads, kv_heads, n, m, causal):
    case = inputs(n, m, heads, kv_heads)
    got = run(BACKENDS[backend], *case, causal, 0.3)
    assert got[0].shape == case[0].shape and got[1].shape == (2, heads, n) and got[1].is_contiguous()
    assert worst(got, reference(*case, causal, 0.3)) < 1e-10


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_single_key_takes_all_weight_and_its_score_no_gradient(backend):
    case = inputs(1, 1, 4, 2)
    out, lse, dq, dk, dv = run(BACKENDS[backend], *case, True, 0.3)
    expected = reference(*case, True, 0.3)
    assert worst((out, lse, dv), (*expected[:2], expected[4])) < 1e-10
    assert max(dq.abs().max(), dk.abs().max()) < 1e-14    # zero but for rounding: no ratio to take


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_attention_in_low_precision_has_a_wide_lse_and_is_deterministic(backend, dtype, tolerance):
    case = inputs(300, 300, 4, 2, dtype=dtype)
    got, again = (run(BACKENDS[backend], *case, True, 0.3) for _ in range(2))
    assert got[1].dtype == torch.float32 and all(x.dtype in (dtype, torch.float32) for x in (got[0], *got[2:]))
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    assert worst(got, reference(*case, True, 0.3)) < tolerance


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_far_apart_do_not_overflow(backend):
    q, k, v, grad = inputs(32, 32, 2, 1)
    case = (q * 100, k * 100, v, grad)
    assert worst(run(BACKENDS[backend], *case, True, 0.3), reference(*case, True, 0.3)) < 1e-10


@pytest.mark.parametrize("n,m,causal", [(QUERY_BLOCK + 20, QUERY_BLOCK + 20, True), (6, 9, False)])
def test_dropout_bits_are_taken_by_global_position(n, m, causal):
    case = inputs(n, m, 4, 2)
    bits = AttentionDropout(0.25, key=7, seq_length=2048, sample_ids=torch.tensor([3, 5]), first_head=4, num_heads=8)
    q_pos, k_pos = torch.arange(n) + (0 if causal else 1000), torch.arange(m)
    keep = bits.keep(slice(0, 4), q_pos, k_pos).double() / 0.75
    assert 0.5 < keep.bool().double().mean() < 0.95 and not torch.equal(keep[0], keep[1])
    got = run(PlainAttention(), *case, causal, 0.3, Dropped(bits, q_pos, k_pos))
    assert worst(got, reference(*case, causal, 0.3, keep)) < 1e-10


def test_an_empty_block_is_refused_and_never_reaches_the_op():
    q, k, v, grad = inputs(4, 4, 2, 1)
    with pytest.raises(ValueError, match="empty block"):
        TorchCPUAttention().forward(q[:, :0], k, v, causal=False, scale=1.0)
    with pytest.raises(ValueError, match="empty block"):
        TorchCPUAttention().backward(grad, q, k[:, :0], v[:, :0], q, k, causal=False, scale=1.0)


def test_the_choice_of_a_backend():
    def chosen(*args):
        return type(select_attention(*args))

    assert chosen("auto", "cpu", torch.float64, False) is chosen("torch", "cpu", torch.bfloat16, False)
    assert chosen("auto", "cpu", torch.float32, True) is chosen("plain", "cpu", torch.float32, False) is PlainAttention
    native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert chosen("auto", "cpu", torch.bfloat16, False) is (PlainAttention if native else TorchCPUAttention)
    with pytest.raises(ValueError, match="kernels.attention=flash needs CUDA"):
        select_attention("flash", "cpu", torch.float32, False)


def test_a_cpu_run_imports_no_gpu_package():
    code = ("import sys, torch\n"
            "from megafour.kernels.attention import select_attention\n"
            "import megafour.kernels.norm, megafour.kernels.activation, megafour.parallel.context\n"
            "for t in (torch.float32, torch.bfloat16): select_attention('auto', 'cpu', t, False)\n"
            "gpu = {'flash_attn', 'transformer_engine', 'triton', 'megafour.kernels.attention_cuda'}\n"
            "bad = gpu & set(sys.modules)\n"
            "assert not bad, bad")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_norms_equal_their_formulas():
    x = torch.randn(3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 2
    w, b = torch.linspace(0.5, 2, 8, dtype=torch.float64), torch.linspace(-1, 1, 8, dtype=torch.float64)
    rms = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w
    ln = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt() * w + b
    torch.testing.assert_close(rms_norm(x, w, 1e-5), rms, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer_norm(x, w, b, 1e-5), ln, rtol=1e-12, atol=1e-12)


FORMULAS = {"swiglu": lambda x: F.silu(x[..., :6]) * x[..., 6:], "geglu": lambda x: F.gelu(x[..., :6]) * x[..., 6:],
            "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


@pytest.mark.parametrize("name", FORMULAS)
def test_activations_and_their_gradients(name):
    x = torch.randn(4, 3, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y, expected = activation(name)(x), FORMULAS[name](x)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    grad = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y)
    torch.testing.assert_close(*(torch.autograd.grad(z, x, grad)[0] for z in (y, expected)), rtol=1e-12, atol=1e-12)
