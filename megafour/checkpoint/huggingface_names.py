"""Where each logical tensor lies in a Hugging Face file: its name there, fused with others or transposed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

Shape = tuple[int, ...]

_LLAMA = {
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm", "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
}
_GPT2 = {"attention_norm": "ln_1", "mlp_norm": "ln_2", "attention.wo": "attn.c_proj", "mlp.up": "mlp.c_fc",
         "mlp.down": "mlp.c_proj"}
_OUTSIDE = {
    "llama": {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"},
    "gpt2": {"embedding": "transformer.wte", "position_embedding": "transformer.wpe", "norm": "transformer.ln_f",
             "head": "lm_head"},
}
_PREFIX = {"llama": "model.", "gpt2": "transformer."}
_BUFFERS = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|h\.\d+\.attn\.(bias|masked_bias))")
"""Constants that old files carry: rotary frequencies, GPT-2's causal mask."""


@dataclass(frozen=True)
class Slot:
    """The place of one logical tensor `[out, in]` (or `[n]`) in a Hugging Face tensor."""

    name: str
    shape: Shape
    """Of the whole Hugging Face tensor."""
    start: int = 0
    """First index along the output features, where several logical tensors are fused."""
    transposed: bool = False
    """Stored `[in, out]`, as GPT-2's Conv1D does."""

    def index(self, offset: Shape, size: Shape) -> tuple[slice, ...]:
        """The rectangle of the Hugging Face tensor that a rectangle of the logical tensor is; maybe transposed."""
        cuts = [slice(o, o + n) for o, n in zip(offset, size, strict=True)]
        cuts[0] = slice(cuts[0].start + self.start, cuts[0].stop + self.start)
        return tuple(reversed(cuts)) if self.transposed else tuple(cuts)


def slots(family: str, shapes: dict[str, Shape]) -> dict[str, Slot]:
    """The slot of every logical tensor.

    Args:
        family: a `model_type`; llama, mistral, qwen2 and qwen3 share their names.
        shapes: of the logical tensors, by name.
    """
    place = _gpt2_slot if family == "gpt2" else _llama_slot
    return {name: place(name, shape) for name, shape in shapes.items()}


def known_name(family: str, name: str, names: Iterable[str]) -> str:
    """The name as `slots` gives it: files of a bare model leave the prefix `model.` or `transformer.` out."""
    prefix = _PREFIX["gpt2" if family == "gpt2" else "llama"]
    bare = not any(other.startswith(prefix) for other in names)
    return prefix + name if bare and not name.startswith("lm_head.") else name


def is_buffer(name: str) -> bool:
    """Whether a file's tensor is a constant that follows from the config."""
    return _BUFFERS.fullmatch(name) is not None


def _parts(name: str) -> tuple[str | None, str, str]:
    """`layers.3.attention.wq.weight` -> (`3`, `attention.wq`, `weight`); None for what is outside the layers."""
    words = name.split(".")
    if words[0] == "layers":
        return words[1], ".".join(words[2:-1]), words[-1]
    return None, ".".join(words[:-1]), words[-1]


def _llama_slot(name: str, shape: Shape) -> Slot:
    layer, middle, kind = _parts(name)
    if layer is None:
        return Slot(f"{_OUTSIDE['llama'][middle]}.{kind}", shape)
    return Slot(f"model.layers.{layer}.{_LLAMA[middle]}.{kind}", shape)


def _gpt2_slot(name: str, shape: Shape) -> Slot:
    layer, middle, kind = _parts(name)
    if layer is None:
        return Slot(f"{_OUTSIDE['gpt2'][middle]}.{kind}", shape)
    if middle in ("attention.wq", "attention.wk", "attention.wv"):
        place = ("attention.wq", "attention.wk", "attention.wv").index(middle)
        whole = (*shape[1:], 3 * shape[0])
        return Slot(f"transformer.h.{layer}.attn.c_attn.{kind}", whole, place * shape[0], len(shape) == 2)
    return Slot(f"transformer.h.{layer}.{_GPT2[middle]}.{kind}", tuple(reversed(shape)), 0, len(shape) == 2)
