"""Attention on CUDA: the flash-attn package where installed, torch's own flash op otherwise. 16-bit types only."""

from __future__ import annotations

import torch
from torch import Tensor

from megafour.kernels.attention import Dropped


class FlashAttention:
    """The flash-attn package (Dao 2023), version 2.7 or newer; grouped K/V heads as they are."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float,
                dropped: Dropped | None = None) -> tuple[Tensor, Tensor]:
        """As `AttentionBackend.forward`."""
        from flash_attn.flash_attn_interface import _flash_attn_forward

        out, lse, *_ = _flash_attn_forward(q, k, v, 0.0, scale, causal=causal, window_size_left=-1,
                                           window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False)
        return out, lse.contiguous()

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool,
                 scale: float, dropped: Dropped | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """As `AttentionBackend.backward`; deterministic."""
        from flash_attn.flash_attn_interface import _flash_attn_backward

        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        _flash_attn_backward(grad.contiguous(), q, k, v, out, lse, dq, dk, dv, 0.0, scale, causal, -1, -1, 0.0, None,
                             True)
        return dq, dk, dv


class TorchCUDAAttention:
    """torch's own flash op. It wants equal heads: K and V are repeated, and their gradients summed."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float,
                dropped: Dropped | None = None) -> tuple[Tensor, Tensor]:
        """As `AttentionBackend.forward`."""
        q, k, v = _equal_heads(q, k, v)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out.transpose(1, 2), lse.contiguous()

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool,
                 scale: float, dropped: Dropped | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """As `AttentionBackend.backward`."""
        kv_heads = k.shape[2]
        q, k, v = _equal_heads(q, k, v)
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad.transpose(1, 2), q, k, v, out.transpose(1, 2), lse, None, None, q.shape[2], k.shape[2], 0.0, causal,
            seed, seed, scale=scale)
        group = q.shape[1] // kv_heads
        dk, dv = (x.unflatten(1, (kv_heads, group)).sum(2).transpose(1, 2) for x in (dk, dv))
        return dq.transpose(1, 2), dk, dv


def _equal_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`[b, heads, s, d]` each, K/V heads repeated for their query heads."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
