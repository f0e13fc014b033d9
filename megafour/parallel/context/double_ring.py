"""Double ring: an inner ring inside a node, an outer one across nodes, whose transfer has a whole inner round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megafour.comm.group import Group
from megafour.comm.primitives import Pending, send_recv
from megafour.kernels.matmul import wide_dtype
from megafour.parallel.context.blocks import Call, Kernel, Places, add_keys, local_attention
from megafour.parallel.context.mask import Mask
from megafour.parallel.context.ring import Compute, Ring, travelling_attention
from megafour.parallel.random import AttentionDropout


def circle(group: Group) -> Ring:
    """The ring on which everything goes all the way round."""
    return Ring(group, [group.size - 1] * group.size)


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

    def passing(self, kv: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(whose they are, K/V) of all that comes by; those of the next round are in flight during a whole round."""
        for outer_step, (_, begun) in enumerate(circle(self.outer).passing(kv)):
            for inner_step, (_, here) in enumerate(circle(self.inner).passing(begun)):
                yield self.source(outer_step, inner_step), here

    def key_gradients(self, kv: Tensor, compute: Compute) -> Tensor:
        """dK/dV go round the inner ring in every round, and their sum over a node goes round the outer one."""
        part = torch.zeros(kv.shape, dtype=wide_dtype(kv.dtype), device=kv.device)
        inner, outer = _Summing(self.inner, part), _Summing(self.outer, part)
        for number, (source, here) in enumerate(self.passing(kv), 1):
            part.zero_()
            add_keys(part[0], part[1], compute(source, here))
            inner.add(part)
            if number % self.inner.size == 0:
                outer.add(inner.home())
        return outer.home()


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
        self.pending = self._hop()

    def _hop(self) -> Pending:
        n, r = self.group.size, self.group.rank
        if n == 1:
            return Pending(None)
        return send_recv([(self.here, (r + 1) % n)], [(self.arriving, (r - 1) % n)], self.group)

    def home(self) -> Tensor:
        """This rank's own sum, complete; ready for the next round."""
        assert self.pending is not None
        self.pending.wait()
        self.pending = None
        return self.arriving if self.group.size > 1 else self.here


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
        return travelling_attention(q, k, v, ring, call)
