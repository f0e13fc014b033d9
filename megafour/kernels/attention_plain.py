"""Attention in plain torch, a block of queries at a time: any device and dtype, with addressed dropout."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megafour.kernels.attention import Dropped
from megafour.kernels.matmul import matmul_dtype, wide_dtype
from megafour.sizes import PRODUCTION


class PlainAttention:
    """Blockwise matmul and softmax; softmax and sums in fp32 (fp64 in fp64 runs). Bitwise deterministic.

    The query heads of one K/V head are stacked along the queries, so that K and V are never repeated.
    """

    def __init__(self, query_block: int = PRODUCTION.query_block) -> None:
        self.query_block = query_block

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float,
                dropped: Dropped | None = None, visible: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `AttentionBackend.forward`; `visible`, boolean `[n, m]`, masks besides. A row that sees no key has out 0
        and log-sum-exp -inf."""
        (b, n, heads, _), kv_heads = q.shape, k.shape[2]
        dtype = matmul_dtype(q)
        k, v = (x.transpose(1, 2).to(dtype) for x in (k, v))
        out = torch.empty(q.shape, dtype=dtype, device=q.device)
        lse = torch.empty(b, heads, n, dtype=wide_dtype(q.dtype), device=q.device)
        for first, last, end in _blocks(n, k.shape[2], causal, self.query_block):
            scores = _scores(_stack(q[:, first:last], kv_heads, dtype), k[:, :, :end], scale, last - first, causal)
            if visible is None:
                # log_softmax is one fused pass, and any visible key gives its row's log-sum-exp: the first one is.
                log_weights = torch.log_softmax(scores, -1)
                row_lse = scores[..., 0] - log_weights[..., 0]
                weights = log_weights.exp_()
            else:
                _hide(scores, visible[first:last, :end])
                row_lse = scores.logsumexp(-1)
                weights = scores.sub_(row_lse.clamp_min(torch.finfo(row_lse.dtype).min).unsqueeze(-1)).exp_()
            lse[:, :, first:last] = row_lse.view(b, heads, -1)
            if dropped is not None:
                weights.mul_(_keep(dropped, slice(first, last), end, weights))
            out[:, first:last] = _unstack(weights.to(dtype) @ v[:, :, :end], last - first)
        return out, lse

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool,
                 scale: float, dropped: Dropped | None = None,
                 visible: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """As `AttentionBackend.backward` (Dao 2023, algorithm 2, one key block). dk and dv are summed in fp32."""
        kv_heads, dtype, wide = k.shape[2], matmul_dtype(q), wide_dtype(q.dtype)
        k, v = (x.transpose(1, 2).to(dtype) for x in (k, v))
        dq = torch.empty(q.shape, dtype=dtype, device=q.device)
        dk = torch.zeros(k.shape, dtype=wide, device=q.device)
        dv = torch.zeros_like(dk)
        for first, last, end in _blocks(q.shape[1], k.shape[2], causal, self.query_block):
            q_block, g_block, out_block = (_stack(x[:, first:last], kv_heads, dtype) for x in (q, grad, out))
            weights = _scores(q_block, k[:, :, :end], scale, last - first, causal)
            if visible is not None:
                _hide(weights, visible[first:last, :end])
            weights.sub_(lse[:, :, first:last].reshape(*weights.shape[:-1], 1)).exp_()
            d_weights = (g_block @ v[:, :, :end].mT).to(wide)
            # sum over keys of weight · d_weight, dropout included, without another pass over the keys
            delta = torch.mul(g_block.to(wide), out_block).sum(-1, keepdim=True)
            kept = weights
            if dropped is not None:
                keep = _keep(dropped, slice(first, last), end, weights)
                kept = weights * keep
                d_weights.mul_(keep)
            dv[:, :, :end] += kept.to(dtype).mT @ g_block
            d_scores = d_weights.sub_(delta).mul_(weights).to(dtype)
            # the scale goes onto the products: they are head_dim wide, the scores as wide as the keys
            dq[:, first:last] = _unstack((d_scores @ k[:, :, :end]).mul_(scale), last - first)
            dk[:, :, :end] += d_scores.mT @ q_block
        return dq, dk.mul_(scale).transpose(1, 2), dv.transpose(1, 2)


def _blocks(queries: int, keys: int, causal: bool, size: int) -> Iterator[tuple[int, int, int]]:
    """(first query, end of queries, end of the keys they see)."""
    for first in range(0, queries, size):
        last = min(first + size, queries)
        yield first, last, last if causal else keys


def _stack(x: Tensor, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """`[b, n, heads, d]` -> `[b, kv_heads, group·n, d]`."""
    b, _, _, d = x.shape
    return x.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).reshape(b, kv_heads, -1, d).to(dtype)


def _unstack(x: Tensor, n: int) -> Tensor:
    """The inverse of `_stack`."""
    b, kv_heads, rows, d = x.shape
    return x.view(b, kv_heads, rows // n, n, d).permute(0, 3, 1, 2, 4).reshape(b, n, -1, d)


def _scores(q: Tensor, k: Tensor, scale: float, n: int, causal: bool) -> Tensor:
    """Scaled scores `[b, kv_heads, group·n, keys]`; causal masks the last n keys, the diagonal tile."""
    scores = (q @ k.mT).to(wide_dtype(q.dtype)).mul_(scale)
    if causal:
        future = torch.ones(n, n, dtype=torch.bool, device=q.device).triu_(1)
        tile = scores.view(*scores.shape[:2], -1, n, scores.shape[-1])[..., -n:]
        tile.masked_fill_(future, float("-inf"))
    return scores


def _hide(scores: Tensor, visible: Tensor) -> None:
    """Set the scores of keys that a query does not see to -inf, in place."""
    n, m = visible.shape
    scores.view(*scores.shape[:2], -1, n, m).masked_fill_(~visible, float("-inf"))


def _keep(dropped: Dropped, queries: slice, end: int, like: Tensor) -> Tensor:
    """Factor 0 or 1/(1-p) on every weight, in `like`'s stacked shape and dtype."""
    q_pos, k_pos = (x.to(like.device) for x in (dropped.q_pos[queries], dropped.k_pos[:end]))
    heads = like.shape[1] * like.shape[2] // len(q_pos)
    bits = dropped.bits.keep(slice(0, heads), q_pos, k_pos)
    return bits.reshape(like.shape).to(like.dtype).div_(1.0 - dropped.bits.p)
