"""Ring attention: K and V travel round the ring a hop ahead of the compute, their gradients follow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megafour.comm.group import Group
from megafour.comm.primitives import Pending, send_recv
from megafour.kernels.attention import AttentionBackend, DropoutBits, Dropped
from megafour.parallel.context.layout import Layout
from megafour.parallel.context.merge import merge_


@dataclass(frozen=True)
class Ring:
    """What every step of the ring needs to know (Liu et al. 2023, "Ring Attention")."""

    layout: Layout
    group: Group
    backend: AttentionBackend

    def source(self, step: int) -> int:
        """Whose K/V are here at `step`."""
        return (self.group.rank - step) % self.group.size

    def block(self, step: int, length: int) -> tuple[slice, slice, bool]:
        """(rows of the local queries, rows of the arriving keys, causal) at `step`; the zigzag of Zhu 2024.

        Own K/V: causal on the whole local pair, since both are in global order. From an earlier rank: every local query
        comes after its first chunk and before its second. From a later rank: only the second local chunk comes after
        both of its chunks.
        """
        half, source = length // 2, self.source(step)
        if source == self.group.rank:
            return slice(0, length), slice(0, length), True
        if source < self.group.rank:
            return slice(0, length), slice(0, half), False
        return slice(half, length), slice(0, length), False

    def dropped(self, bits: DropoutBits | None, step: int, rows: slice, keys: slice) -> Dropped | None:
        """The dropout of the block at `step`, by global positions."""
        if bits is None:
            return None
        here, there = self.layout.positions(self.group.rank), self.layout.positions(self.source(step))
        return Dropped(bits, here[rows], there[keys])

    def hop(self, sent: Tensor, received: Tensor) -> Pending:
        """Send to the next rank while receiving from the one before."""
        n, r = self.group.size, self.group.rank
        return send_recv([(sent, (r + 1) % n)], [(received, (r - 1) % n)], self.group)

    def travelling(self, kv: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(step, the K/V that are here at it); the next ones are in flight meanwhile. Two buffers for all hops."""
        buffers = [torch.empty_like(kv) for _ in range(min(2, self.group.size - 1))]
        for step in range(self.group.size):
            more = step + 1 < self.group.size
            pending = self.hop(kv, buffers[step % 2]) if more else None
            yield step, kv
            if pending is not None:
                pending.wait()
                kv = buffers[step % 2]


class _RingAttention(torch.autograd.Function):
    """Two or more ranks. K and V are kept packed, as they travel: one tensor, one transfer a hop."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring, scale: float,
                bits: DropoutBits | None) -> Tensor:
        kv = torch.stack([k, v])
        out, lse = _forward(q, kv, ring, scale, bits)
        ctx.save_for_backward(q, kv, out, lse)
        ctx.ring, ctx.scale, ctx.bits = ring, scale, bits
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, kv, out, lse = ctx.saved_tensors
        return *_backward(grad, q, kv, out, lse, ctx.ring, ctx.scale, ctx.bits), None, None, None


class _LocalAttention(torch.autograd.Function):
    """One rank: the kernel, and nothing else."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring, scale: float,
                bits: DropoutBits | None) -> Tensor:
        whole = slice(0, q.shape[1])
        dropped = ring.dropped(bits, 0, whole, whole)
        out, lse = ring.backend.forward(q, k, v, causal=True, scale=scale, dropped=dropped)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.backend, ctx.scale, ctx.dropped = ring.backend, scale, dropped
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        grads = ctx.backend.backward(grad, *ctx.saved_tensors, causal=True, scale=ctx.scale, dropped=ctx.dropped)
        return *grads, None, None, None


def _forward(q: Tensor, kv: Tensor, ring: Ring, scale: float, bits: DropoutBits | None) -> tuple[Tensor, Tensor]:
    """Output in q's dtype and log-sum-exp, accumulated in fp32 (fp64)."""
    out, lse = torch.empty(0), torch.empty(0)
    for step, (k, v) in ring.travelling(kv):
        rows, keys, causal = ring.block(step, q.shape[1])
        part, part_lse = ring.backend.forward(q[:, rows], k[:, keys], v[:, keys], causal=causal, scale=scale,
                                              dropped=ring.dropped(bits, step, rows, keys))
        if step == 0:    # every row sees its own key, so this fills the accumulators
            out, lse = part.to(part_lse.dtype), part_lse
        else:
            merge_(out[:, rows], lse[:, :, rows], part.to(out.dtype), part_lse)
    return out.to(q.dtype), lse


def _backward(grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, ring: Ring, scale: float,
              bits: DropoutBits | None) -> tuple[Tensor, Tensor, Tensor]:
    """dQ stays; dK/dV travel with their K/V, growing on every rank, and one hop more to come home."""
    wide = lse.dtype
    dq = torch.zeros(q.shape, dtype=wide, device=q.device)
    dkv = torch.zeros(kv.shape, dtype=wide, device=kv.device)
    arriving = torch.empty_like(dkv)
    pending: Pending | None = None
    for step, (k, v) in ring.travelling(kv):
        rows, keys, causal = ring.block(step, q.shape[1])
        part_q, part_k, part_v = ring.backend.backward(
            grad[:, rows], q[:, rows], k[:, keys], v[:, keys], out[:, rows],
            lse[:, :, rows].contiguous(), causal=causal, scale=scale,
            dropped=ring.dropped(bits, step, rows, keys))
        dq[:, rows] += part_q
        if pending is not None:
            pending.wait()
            dkv, arriving = arriving, dkv
        dkv[0][:, keys] += part_k
        dkv[1][:, keys] += part_v
        pending = ring.hop(dkv, arriving)
    assert pending is not None
    pending.wait()
    return dq.to(q.dtype), arriving[0].to(q.dtype), arriving[1].to(q.dtype)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, *, ring: Ring, scale: float,
                   dropout: DropoutBits | None = None) -> Tensor:
    """Causal attention over the whole sequence; q `[b, s_local, heads, d]`, k and v `[b, s_local, kv_heads, d]`.

    Returns `[b, s_local, heads, d]`. A group of one calls the kernel and moves nothing.
    """
    function = _RingAttention if ring.group.size > 1 else _LocalAttention
    return function.apply(q, k, v, ring, scale, dropout)
