"""Attention on CUDA: the flash-attn package where installed, torch's own flash op otherwise. 16-bit types only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from megafour.kernels.attention import Dropped, refuse_empty


class FlashAttention:
    """The flash-attn package (Dao 2023), version 2.7 or newer; grouped K/V heads as they are."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float,
                dropped: Dropped | None = None) -> tuple[Tensor, Tensor]:
        """As `AttentionBackend.forward`."""
        from flash_attn.flash_attn_interface import _flash_attn_forward

        refuse_empty(q, k)
        d = q.shape[-1]
        q, k, v = _padded(q, k, v)
        out, lse, *_ = _flash_attn_forward(q, k, v, 0.0, scale, causal=causal, window_size_left=-1,
                                           window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False)
        return out[..., :d], lse.contiguous()

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool,
                 scale: float, dropped: Dropped | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """As `AttentionBackend.backward`; deterministic."""
        from flash_attn.flash_attn_interface import _flash_attn_backward

        refuse_empty(q, k)
        d = q.shape[-1]
        grad, q, k, v, out = _padded(grad, q, k, v, out)
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        _flash_attn_backward(grad, q, k, v, out, lse.contiguous(), dq, dk, dv, 0.0, scale, causal, -1, -1, 0.0, None,
                             True)
        return dq[..., :d], dk[..., :d], dv[..., :d]


class TorchCUDAAttention:
    """torch's own flash op. K and V are repeated to the query heads, and their gradients summed."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float,
                dropped: Dropped | None = None) -> tuple[Tensor, Tensor]:
        """As `AttentionBackend.forward`."""
        refuse_empty(q, k)
        d = q.shape[-1]
        q, k, v = _padded(*_equal_heads(q, k, v))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out.transpose(1, 2)[..., :d], lse.contiguous()

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool,
                 scale: float, dropped: Dropped | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """As `AttentionBackend.backward`; deterministic."""
        refuse_empty(q, k)
        kv_heads, d = k.shape[2], q.shape[-1]
        q, k, v, grad, out = _padded(*_equal_heads(q, k, v), grad.transpose(1, 2), out.transpose(1, 2))
        seed = torch.zeros(2, dtype=torch.int64, device=q.device)    # the dropout's generator state: unused at p = 0
        with _deterministic():
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
                grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, seed,
                seed.new_zeros(()), scale=scale)
        dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(2).transpose(1, 2)[..., :d] for x in (dk, dv))
        return dq.transpose(1, 2)[..., :d], dk, dv


@contextmanager
def _deterministic() -> Iterator[None]:
    """torch's flash backward adds dQ atomically, in any order, unless this process-wide switch is on."""
    before, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)


def _equal_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`[b, heads, s, d]` each, K/V heads repeated for their query heads."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)


def _padded(*tensors: Tensor) -> list[Tensor]:
    """The kernels want head_dim in eights, the last dim dense: zeros change neither scores nor outputs."""
    extra = -tensors[0].shape[-1] % 8
    return [F.pad(x, (0, extra)) if extra else x if x.stride(-1) == 1 else x.contiguous() for x in tensors]
