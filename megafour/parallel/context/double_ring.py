"""Double ring: an inner ring inside a node, an outer one across nodes, whose transfer has a whole inner round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megafour.comm.group import Group
from megafour.comm.primitives import Pending, send_recv
from megafour.parallel.context.blocks import Call, Kernel, Merged, Places, add_keys, local_attention, wide
from megafour.parallel.context.mask import Mask
from megafour.parallel.random import AttentionDropout


def hop(group: Group, sent: Tensor, received: Tensor) -> Pending:
    """Send to the next of the group while receiving from the one before."""
    n, r = group.size, group.rank
    return send_recv([(sent, (r + 1) % n)], [(received, (r - 1) % n)], group)


@dataclass(frozen=True)
class DoubleRing:
    """R = outer · inner ranks, inner ones adjacent (LoongTrain, Gu et al. 2024, section 4.3).

    In round a a node holds the keys of the node a before it, and passes them round its inner ring; each rank sends on
    to the next node what it had at the beginning of the round. Inner and outer are groups of their own, so that the
    slow outer transfer holds up no inner one.
    """

    inner: Group
    outer: Group

    def source(self, outer_step: int, inner_step: int) -> int:
        """Whose keys are here, as a rank of the whole ring."""
        node = (self.outer.rank - outer_step) % self.outer.size
        return node * self.inner.size + (self.inner.rank - inner_step) % self.inner.size

    def rounds(self, kv: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(round, the K/V with which it begins here); those of the next round are in flight meanwhile."""
        yield from _passing(self.outer, kv)

    def steps(self, kv: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(step of the inner ring, the K/V that are here at it)."""
        yield from _passing(self.inner, kv)


def _passing(group: Group, kv: Tensor) -> Iterator[tuple[int, Tensor]]:
    """What each hop brings, the next in flight meanwhile; two buffers for all hops."""
    buffers = [torch.empty_like(kv) for _ in range(min(2, group.size - 1))]
    for step in range(group.size):
        pending = hop(group, kv, buffers[step % 2]) if step + 1 < group.size else None
        yield step, kv
        if pending is not None:
            pending.wait()
            kv = buffers[step % 2]


class _Summing:
    """Sums that travel round a group and grow on every rank; after `size` hops each is home."""

    def __init__(self, group: Group, like: Tensor) -> None:
        self.group = group
        self.here, self.arriving = torch.zeros_like(like), torch.zeros_like(like)
        self.pending: Pending | None = None

    def add(self, part: Tensor) -> None:
        """Add this rank's part to what has arrived, and send it on."""
        if self.pending is not None:
            self.pending.wait()
            self.here, self.arriving = self.arriving, self.here
            self.here += part
        else:
            self.here.copy_(part)
        self.pending = hop(self.group, self.here, self.arriving) if self.group.size > 1 else Pending(None)

    def home(self) -> Tensor:
        """This rank's own sum, complete; ready for the next round."""
        assert self.pending is not None
        self.pending.wait()
        self.pending = None
        return self.arriving if self.group.size > 1 else self.here


class _DoubleRingAttention(torch.autograd.Function):
    """K and V are kept packed, as they travel."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: DoubleRing, call: Call) -> Tensor:
        packed, merged = torch.stack([k, v]), Merged(q)
        for outer_step, begun in ring.rounds(packed):
            for inner_step, kv in ring.steps(begun):
                call.forward(merged, kv[0], kv[1], ring.source(outer_step, inner_step))
        out, lse = merged.result()
        ctx.save_for_backward(q, packed, out, lse)
        ctx.ring, ctx.call = ring, call
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """dK/dV go round the inner ring in every round, and their sum over a node goes round the outer one."""
        q, packed, out, lse = ctx.saved_tensors
        ring: DoubleRing = ctx.ring
        dq = torch.zeros(q.shape, dtype=wide(q.dtype), device=q.device)
        part = torch.zeros(packed.shape, dtype=dq.dtype, device=q.device)
        inner, outer = _Summing(ring.inner, part), _Summing(ring.outer, part)
        for outer_step, begun in ring.rounds(packed):
            for inner_step, kv in ring.steps(begun):
                part.zero_()
                source = ring.source(outer_step, inner_step)
                add_keys(part[0], part[1], ctx.call.backward(grad, q, kv[0], kv[1], out, lse, source, dq))
                inner.add(part)
            outer.add(inner.home())
        dkv = outer.home().to(q.dtype)
        return dq.to(q.dtype), dkv[0], dkv[1], None, None


@dataclass(frozen=True)
class DoubleRingAttention:
    """The method `double_ring` over `inner` and `outer`, whose members hold `places`, node by node."""

    inner: Group
    outer: Group
    places: Places
    kernel: Kernel

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float,
                 dropout: AttentionDropout | None = None) -> Tensor:
        """As `Core`."""
        ring = DoubleRing(self.inner, self.outer)
        call = Call(self.kernel, self.places, ring.source(0, 0), mask, scale, dropout)
        if len(self.places.positions) == 1:
            return local_attention(q, k, v, call)
        return _DoubleRingAttention.apply(q, k, v, ring, call)
