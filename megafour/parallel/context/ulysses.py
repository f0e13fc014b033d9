"""Ulysses: an all-to-all turns a split sequence into split heads and back; around a ring it is USP."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megafour.comm import regions
from megafour.comm.group import Group
from megafour.parallel.context.mask import Mask
from megafour.parallel.context.ring import RingAttention
from megafour.parallel.random import AttentionDropout


class _Permute(torch.autograd.Function):
    """Rows in another order; the backward is the inverse order, without adding anything up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.back = back
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad.index_select(0, ctx.back), None, None


class UlyssesAttention:
    """The methods `ulysses` and `usp`: heads split over `group` of U adjacent ranks (Jacobs et al. 2023), the sequence
    over the ring of `inner` (Fang and Zhao 2024, "USP"), which has one member in pure Ulysses.

    One exchange takes q, k and v together, one brings the output back. K/V heads are repeated to lcm(K/V heads, U), so
    that only the query heads must be a multiple of U; the repeat's backward sums their gradients.
    """

    def __init__(self, group: Group, rows: Tensor, inner: RingAttention) -> None:
        """`rows`: the positions that the group's ranks hold together, in their order, int64 `[U · s]`, on the device of
        the activations."""
        self.group, self.inner = group, inner
        self.order = torch.argsort(rows)
        self.back = torch.argsort(self.order)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float,
                 dropout: AttentionDropout | None = None) -> Tensor:
        """As `Core`."""
        ranks, heads, kv_heads = self.group.size, q.shape[2], k.shape[2]
        if ranks == 1:
            return self.inner(q, k, v, mask=mask, scale=scale, dropout=dropout)
        repeated = math.lcm(kv_heads, ranks)
        k, v = (x.repeat_interleave(repeated // kv_heads, 2) for x in (k, v))
        widths = [heads // ranks, repeated // ranks, repeated // ranks]
        packed = torch.cat([x.unflatten(2, (ranks, -1)) for x in (q, k, v)], 3)
        q, k, v = self._to_heads(packed).split(widths, 2)
        if dropout is not None:
            dropout = replace(dropout, first_head=dropout.first_head + self.group.rank * widths[0])
        out = self.inner(q, k, v, mask=mask, scale=scale, dropout=dropout)
        return self._to_sequence(out)

    def _to_heads(self, x: Tensor) -> Tensor:
        """`[b, s, U, heads, d]` -> `[b, U·s, heads, d]`, this rank's heads of the group's tokens, ascending."""
        moved = regions.exchange(x.permute(2, 1, 0, 3, 4), self.group).flatten(0, 1)
        return _Permute.apply(moved, self.order, self.back).transpose(0, 1)

    def _to_sequence(self, out: Tensor) -> Tensor:
        """`[b, U·s, heads, d]` -> `[b, s, U·heads, d]`, all heads of this rank's tokens."""
        ordered = _Permute.apply(out.transpose(0, 1), self.back, self.order)
        moved = regions.exchange(ordered.unflatten(0, (self.group.size, -1)), self.group)
        return moved.permute(2, 1, 0, 3, 4).flatten(2, 3)
