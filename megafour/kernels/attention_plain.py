"""Attention in plain torch, a block of queries at a time: any device and dtype, with addressed dropout."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megafour.kernels.attention import Dropped

QUERY_BLOCK = 256
"""Queries a block holds: its causal keys end with it, so that the masked half is skipped but for the diagonal tile."""


class PlainAttention:
    """Blockwise matmul and softmax; scores are fp32 (fp64 in fp64 runs). Deterministic.

    The query heads of one K/V head are stacked along the queries, so that K and V are never repeated.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float,
                dropped: Dropped | None = None) -> tuple[Tensor, Tensor]:
        """As `AttentionBackend.forward`."""
        kv_heads = k.shape[2]
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=_wide(q.dtype), device=q.device)
        for a, b, end in _blocks(q.shape[1], k.shape[2], causal):
            scores = _scores(_stack(q[:, a:b], kv_heads), k[:, :, :end], scale, b - a, causal)
            part = scores.logsumexp(-1, keepdim=True)
            weights = scores.sub_(part).exp_()
            if dropped is not None:
                weights.mul_(_keep(dropped, slice(a, b), end, weights.shape, q.shape[2]))
            out[:, a:b] = _unstack(weights.to(q.dtype) @ v[:, :, :end], b - a)
            lse[:, :, a:b] = part.view(q.shape[0], q.shape[2], b - a)
        return out, lse

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool,
                 scale: float, dropped: Dropped | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """As `AttentionBackend.backward` (Dao 2023, algorithm 2, one key block)."""
        kv_heads, heads = k.shape[2], q.shape[2]
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        dk = torch.zeros(k.shape, dtype=_wide(q.dtype), device=q.device)
        dv = torch.zeros_like(dk)
        for a, b, end in _blocks(q.shape[1], k.shape[2], causal):
            q_block, g_block = _stack(q[:, a:b], kv_heads), _stack(grad[:, a:b], kv_heads)
            weights = _scores(q_block, k[:, :, :end], scale, b - a, causal)
            weights.sub_(lse[:, :, a:b].reshape(*weights.shape[:-1], 1)).exp_()
            d_weights = (g_block @ v[:, :, :end].transpose(-1, -2)).to(weights.dtype)
            # sum over keys of weight · d_weight, dropout included, without another pass over the keys
            delta = (g_block.to(weights.dtype) * _stack(out[:, a:b], kv_heads)).sum(-1, keepdim=True)
            kept = weights
            if dropped is not None:
                keep = _keep(dropped, slice(a, b), end, weights.shape, heads)
                kept = weights * keep
                d_weights.mul_(keep)
            dv[:, :, :end] += kept.to(q.dtype).transpose(-1, -2) @ g_block
            d_scores = d_weights.sub_(delta).mul_(weights).mul_(scale).to(q.dtype)
            dq[:, a:b] = _unstack(d_scores @ k[:, :, :end], b - a)
            dk[:, :, :end] += d_scores.transpose(-1, -2) @ q_block
        return dq, dk.transpose(1, 2).to(q.dtype), dv.transpose(1, 2).to(q.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _blocks(queries: int, keys: int, causal: bool) -> Iterator[tuple[int, int, int]]:
    """(first query, end of queries, end of the keys they see)."""
    for a in range(0, queries, QUERY_BLOCK):
        b = min(a + QUERY_BLOCK, queries)
        yield a, b, b if causal else keys


def _stack(x: Tensor, kv_heads: int) -> Tensor:
    """`[b, n, heads, d]` -> `[b, kv_heads, group·n, d]`."""
    b, n, heads, d = x.shape
    return x.view(b, n, kv_heads, heads // kv_heads, d).permute(0, 2, 3, 1, 4).reshape(b, kv_heads, -1, d)


def _unstack(x: Tensor, n: int) -> Tensor:
    """The inverse of `_stack`."""
    b, kv_heads, rows, d = x.shape
    return x.view(b, kv_heads, rows // n, n, d).permute(0, 3, 1, 2, 4).reshape(b, n, -1, d)


def _scores(q: Tensor, k: Tensor, scale: float, n: int, causal: bool) -> Tensor:
    """Scaled scores `[b, kv_heads, group·n, keys]`; causal masks the last n keys, the diagonal tile."""
    scores = (q @ k.transpose(-1, -2)).to(_wide(q.dtype)).mul_(scale)
    if causal:
        future = torch.ones(n, n, dtype=torch.bool, device=q.device).triu_(1)
        tile = scores.view(*scores.shape[:2], -1, n, scores.shape[-1])[..., -n:]
        tile.masked_fill_(future, float("-inf"))
    return scores


def _keep(dropped: Dropped, queries: slice, end: int, shape: torch.Size, heads: int) -> Tensor:
    """Factor 0 or 1/(1-p) on every weight, in the stacked shape."""
    bits = dropped.bits.keep(slice(0, heads), dropped.q_pos[queries], dropped.k_pos[:end])
    return bits.reshape(shape).to(torch.float64) / (1.0 - dropped.bits.p)
