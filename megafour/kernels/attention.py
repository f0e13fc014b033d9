"""The attention kernel's interface, the choice of its backend, and what every backend must give."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megafour.kernels.matmul import native_matmul
from megafour.sizes import PRODUCTION


class DropoutBits(Protocol):
    """Attention-dropout bits, addressed by global positions."""

    @property
    def p(self) -> float:
        """Probability that a weight is dropped."""
        ...

    def keep(self, heads: slice, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """Boolean `[b, heads, n, m]` of the local query heads `heads`."""
        ...


@dataclass(frozen=True)
class Dropped:
    """Dropout of one block of attention: the bits, and where the block's queries and keys lie in the sequence."""

    bits: DropoutBits
    q_pos: Tensor
    k_pos: Tensor


class AttentionBackend(Protocol):
    """softmax(scale · q k^T) v on one block, and its gradient given the *merged* output and log-sum-exp.

    q `[b, n, heads, d]`; k, v `[b, m, kv_heads, d]`; heads a multiple of kv_heads. `causal` needs n = m. What was
    computed wider than the tensors' type is given as it is: whoever joins blocks rounds once, at the end.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float,
                dropped: Dropped | None = None) -> tuple[Tensor, Tensor]:
        """(out `[b, n, heads, d]`, log-sum-exp `[b, heads, n]` contiguous, fp32 or fp64)."""
        ...

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool,
                 scale: float, dropped: Dropped | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv). `out` and `lse` may cover more keys than this block: the softmax is over all of them."""
        ...


def refuse_empty(q: Tensor, k: Tensor) -> None:
    """Raise ValueError for a block without queries or keys: callers leave such blocks out."""
    if q.numel() == 0 or k.numel() == 0:
        raise ValueError(f"attention on an empty block: queries {tuple(q.shape)}, keys {tuple(k.shape)}")


def select_attention(name: str, device_type: str, dtype: torch.dtype, dropout: bool,
                     query_block: int = PRODUCTION.query_block) -> AttentionBackend:
    """The backend of `kernels.attention` on this device.

    `auto` on CPU: torch's flash op, except in 16-bit types on a CPU that multiplies them natively: there the blockwise
    matmul one is about 1.6 times as fast (bf16, sequence 1024). `auto` on CUDA: flash-attn where installed, else
    torch's own, for 16-bit types. Dropout bits are addressed, so only the blockwise backend can draw them.

    Raises:
        ValueError: for a backend that this device or dtype does not have.
    """
    from megafour.kernels.attention_plain import PlainAttention

    half = dtype in (torch.bfloat16, torch.float16)
    if name == "plain" or dropout:
        return PlainAttention(query_block)
    if device_type == "cpu":
        if name == "flash":
            raise ValueError("kernels.attention=flash needs CUDA; set kernels.attention=auto")
        if name == "auto" and half and native_matmul(dtype):
            return PlainAttention(query_block)
        from megafour.kernels.attention_cpu import TorchCPUAttention

        return TorchCPUAttention()
    if not half:
        return PlainAttention(query_block)
    from megafour.kernels.attention_cuda import FlashAttention, TorchCUDAAttention

    installed = importlib.util.find_spec("flash_attn") is not None
    if name == "flash" and not installed:
        raise ValueError("kernels.attention=flash: the package flash-attn is not installed; pip install megafour[gpu]")
    return FlashAttention() if installed and name != "torch" else TorchCUDAAttention()
