"""Ring attention: K and V travel round the ring a hop ahead of the compute, their gradients follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megafour.comm.group import Group
from megafour.comm.primitives import Pending, send_recv
from megafour.kernels.matmul import wide_dtype
from megafour.parallel.context.blocks import (
    Call,
    Kernel,
    KeyGradients,
    Merged,
    Places,
    add_keys,
    local_attention,
)
from megafour.parallel.context.mask import Mask
from megafour.parallel.random import AttentionDropout


@dataclass(frozen=True)
class Ring:
    """The ring of one attention (Liu et al. 2023, "Ring Attention with Blockwise Transformers").

    Rank r's keys go to r+1, r+2, ... and no further than the last rank that sees any of them: under a causal mask a
    contiguous layout sends nothing backwards, and a window or short documents end the way early.
    """

    group: Group
    reach: list[int]
    """Per rank, how many hops its keys travel."""

    @property
    def steps(self) -> int:
        """Steps after the first, alike on all ranks."""
        return max(self.reach)

    def source(self, step: int) -> int:
        """Whose keys are here at `step`, if they come so far."""
        return (self.group.rank - step) % self.group.size

    def comes(self, step: int) -> bool:
        """Whether keys are here at `step`."""
        return self.reach[self.source(step)] >= step

    def hop(self, step: int, sent: Tensor, received: Tensor) -> Pending:
        """Send what is here at `step` on to the next rank, while what comes at step + 1 is received."""
        n, r = self.group.size, self.group.rank
        sends = [(sent, (r + 1) % n)] if self.reach[self.source(step)] > step else []
        recvs = [(received, (r - 1) % n)] if step < self.steps and self.comes(step + 1) else []
        return send_recv(sends, recvs, self.group)

    def hop_home(self, step: int, sent: Tensor, received: Tensor, home: Tensor) -> Pending:
        """As `hop`, for gradients: what has come to its last rank goes home from there, straight."""
        n, r = self.group.size, self.group.rank
        sends, recvs = [], []
        if self.comes(step):
            last = self.reach[self.source(step)] == step
            if not last or step > 0:
                sends.append((sent, self.source(step) if last else (r + 1) % n))
        if step < self.steps and self.comes(step + 1):
            recvs.append((received, (r - 1) % n))
        if step > 0 and self.reach[r] == step:
            recvs.append((home, (r + step) % n))
        return send_recv(sends, recvs, self.group)

    def travelling(self, kv: Tensor) -> Iterator[tuple[int, Tensor | None]]:
        """(step, the K/V that are here at it, if any); the next are in flight meanwhile. Two buffers for all hops."""
        buffers = [torch.empty_like(kv) for _ in range(min(2, self.steps))]
        for step in range(self.steps + 1):
            pending = self.hop(step, kv, buffers[step % 2]) if step < self.steps else None
            yield step, kv if self.comes(step) else None
            if pending is not None:
                pending.wait()
                kv = buffers[step % 2]

    def passing(self, kv: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(whose they are, K/V) of all that comes by."""
        for step, here in self.travelling(kv):
            if here is not None:
                yield self.source(step), here

    def key_gradients(self, kv: Tensor, compute: Compute) -> Tensor:
        """dK/dV travel behind their K/V, growing on every rank, and from the last one straight home."""
        dkv = torch.zeros(kv.shape, dtype=wide_dtype(kv.dtype), device=kv.device)
        arriving, home = torch.empty_like(dkv), torch.empty_like(dkv)
        pending: Pending | None = None
        for step, here in self.travelling(kv):
            parts = [] if here is None else list(compute(self.source(step), here))
            if pending is not None:
                pending.wait()    # for what others have summed so far; this rank's parts were computed meanwhile
                if here is not None:
                    dkv, arriving = arriving, dkv
            add_keys(dkv[0], dkv[1], parts)
            if step == 0 and self.reach[self.group.rank] == 0:
                home.copy_(dkv)
            pending = self.hop_home(step, dkv, arriving, home)
        assert pending is not None
        pending.wait()
        return home


Compute = Callable[[int, Tensor], Iterator[KeyGradients]]
"""(source, its K/V) -> the gradients of its keys, block by block; those of the local queries are added up besides."""


class Way(Protocol):
    """How packed K/V `[2, b, s, kv_heads, d]` reach every rank that sees them, and their gradients come home."""

    def passing(self, kv: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(whose they are, K/V) of all that comes by, the rank's own first."""
        ...

    def key_gradients(self, kv: Tensor, compute: Compute) -> Tensor:
        """The sum over ranks of the gradients of this rank's own keys, like kv in fp32 (fp64)."""
        ...


class _Travelling(torch.autograd.Function):
    """Two or more ranks. K and V are kept packed, as they travel: one tensor, one transfer a hop."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, way: Way, call: Call) -> Tensor:
        packed, merged = torch.stack([k, v]), Merged(q)
        for source, kv in way.passing(packed):
            call.forward(merged, kv[0], kv[1], source)
        out, lse = merged.result()
        ctx.save_for_backward(q, packed, out, lse)
        ctx.way, ctx.call = way, call
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, packed, out, lse = ctx.saved_tensors
        dq = torch.zeros(q.shape, dtype=wide_dtype(q.dtype), device=q.device)

        def compute(source: int, kv: Tensor) -> Iterator[KeyGradients]:
            return ctx.call.backward(grad, q, kv[0], kv[1], out, lse, source, dq)

        dkv = ctx.way.key_gradients(packed, compute).to(q.dtype)
        return dq.to(q.dtype), dkv[0], dkv[1], None, None


def travelling_attention(q: Tensor, k: Tensor, v: Tensor, way: Way, call: Call) -> Tensor:
    """Attention whose queries stay and whose keys come by: q, k, v `[b, s, heads, d]` -> `[b, s, heads, d]`."""
    return _Travelling.apply(q, k, v, way, call)


@dataclass(frozen=True)
class RingAttention:
    """The method `ring`: point-to-point hops over `group`, whose members hold `places`."""

    group: Group
    places: Places
    kernel: Kernel

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float,
                 dropout: AttentionDropout | None = None) -> Tensor:
        """As `Core`. A group of one calls the kernel and moves nothing."""
        call = Call(self.kernel, self.places, self.group.rank, mask, scale, dropout)
        if self.group.size == 1:
            return local_attention(q, k, v, call)
        return travelling_attention(q, k, v, Ring(self.group, self.places.reach(mask)), call)
