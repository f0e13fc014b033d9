"""K/V all-gather: every rank gathers the keys of a head group at a time; their gradients are reduce-scattered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megafour.comm import primitives
from megafour.comm.group import Group
from megafour.comm.primitives import Pending
from megafour.kernels.matmul import wide_dtype
from megafour.parallel.context.blocks import Call, Kernel, Merged, Places, add_keys, local_attention
from megafour.parallel.context.mask import Mask
from megafour.parallel.random import AttentionDropout


@dataclass(frozen=True)
class _Gathering:
    """The gathered keys in the order of the sequence, one K/V head at a time (Llama 3 report 2024, section 3.3.2).

    The whole sequence is one more place after the ranks' own, so that blocks are cut by the same mask.
    """

    group: Group
    places: Places
    order: Tensor
    """Row of the gathered keys at each position of the sequence, int64 `[seq]`."""
    back: Tensor
    """Its inverse."""

    @property
    def whole(self) -> int:
        """The place that holds the whole sequence."""
        return self.group.size

    def heads(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(head, k, v `[b, seq, 1, d]`) of every K/V head; the next one is in flight meanwhile."""
        def start(head: int) -> Pending:
            packed = torch.stack([k[:, :, head], v[:, :, head]]).permute(2, 0, 1, 3).contiguous()
            return primitives.all_gather(packed, self.group, async_op=True)

        pending = start(0)
        for head in range(k.shape[2]):
            gathered = pending.wait()
            if head + 1 < k.shape[2]:
                pending = start(head + 1)
            both = gathered.index_select(0, self.order).permute(1, 2, 0, 3).unsqueeze(3)
            yield head, both[0], both[1]

    def scatter(self, dk: Tensor, dv: Tensor) -> Pending:
        """Sum `[b, seq, 1, d]` over the ranks; the result, `[s, 2, b, d]`, is this rank's part."""
        packed = torch.stack([dk, dv]).squeeze(3).permute(2, 0, 1, 3).index_select(0, self.back)
        return primitives.reduce_scatter(packed, self.group, async_op=True)


def _of_head(call: Call, head: int, width: int) -> Call:
    """The call of the query heads of one K/V head, `width` of them."""
    bits = call.bits
    return replace(call, bits=None if bits is None else replace(bits, first_head=bits.first_head + head * width))


class _AllGatherAttention(torch.autograd.Function):
    """Only the rank's own keys are kept between the passes: the backward gathers anew."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, gathering: _Gathering, call: Call) -> Tensor:
        (b, n, heads, _), width = q.shape, q.shape[2] // k.shape[2]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(b, heads, n, dtype=wide_dtype(q.dtype), device=q.device)
        for head, keys, values in gathering.heads(k, v):
            own = slice(head * width, (head + 1) * width)
            merged = Merged(q[:, :, own])
            _of_head(call, head, width).forward(merged, keys, values, gathering.whole)
            out[:, :, own], lse[:, own] = merged.result()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.gathering, ctx.call = gathering, call
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        gathering: _Gathering = ctx.gathering
        width, accumulate = q.shape[2] // k.shape[2], wide_dtype(q.dtype)
        dq = torch.zeros(q.shape, dtype=accumulate, device=q.device)
        parts: list[Pending] = []
        for head, keys, values in gathering.heads(k, v):
            own = slice(head * width, (head + 1) * width)
            dk, dv = (torch.zeros(keys.shape, dtype=accumulate, device=q.device) for _ in range(2))
            add_keys(dk, dv, _of_head(ctx.call, head, width).backward(
                grad[:, :, own], q[:, :, own], keys, values, out[:, :, own], lse[:, own], gathering.whole,
                dq[:, :, own]))
            parts.append(gathering.scatter(dk, dv))
        dkv = torch.stack([part.wait() for part in parts], 3).permute(1, 2, 0, 3, 4).to(k.dtype)
        return dq.to(q.dtype), dkv[0], dkv[1], None, None


class AllGatherAttention:
    """The method `all_gather` over `group`, whose members hold `places`."""

    def __init__(self, group: Group, places: Places, kernel: Kernel, device: torch.device) -> None:
        self.group, self.kernel = group, kernel
        rows = np.concatenate(places.positions)
        order = torch.from_numpy(np.argsort(rows)).to(device)
        sequence = torch.from_numpy(np.sort(rows))
        everywhere = Places.of([*(torch.from_numpy(x) for x in places.positions), sequence])
        self.gathering = _Gathering(group, everywhere, order, torch.argsort(order))
        self.places = places

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float,
                 dropout: AttentionDropout | None = None) -> Tensor:
        """As `Core`."""
        if self.group.size == 1:
            return local_attention(q, k, v, Call(self.kernel, self.places, 0, mask, scale, dropout))
        call = Call(self.kernel, self.gathering.places, self.group.rank, mask, scale, dropout)
        return _AllGatherAttention.apply(q, k, v, self.gathering, call)
