"""Attention block by block: the kernel on each block of a mask, partial results merged in fp32 (fp64)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megafour.kernels.attention import AttentionBackend, Dropped
from megafour.kernels.attention_plain import PlainAttention
from megafour.kernels.matmul import wide_dtype
from megafour.parallel.context.mask import Block, Kind, Mask
from megafour.parallel.context.merge import merge_
from megafour.parallel.random import AttentionDropout


@dataclass(frozen=True)
class Kernel:
    """How one block is computed: the backend, and in which dtype."""

    backend: AttentionBackend
    fp32_blocks: bool = False
    """Upcast 16-bit blocks, so that partial outputs are merged unrounded."""
    tiles: PlainAttention = field(default_factory=PlainAttention)
    """The backend of blocks whose mask is written out: flash ops take none."""

    def cast(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """As the blocks compute them."""
        return tuple(x.to(wide_dtype(x.dtype)) for x in tensors) if self.fp32_blocks else tensors

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float,
                dropped: Dropped | None) -> tuple[Tensor, Tensor]:
        """(out, log-sum-exp) of one block, cut out of all local queries and keys."""
        q, k, v = self.cast(q[block.samples, block.rows], k[block.samples, block.keys], v[block.samples, block.keys])
        if block.kind is Kind.TILE:
            return self.tiles.forward(q, k, v, causal=False, scale=scale, dropped=dropped,
                                      visible=block.visible(q.device))
        return self.backend.forward(q, k, v, causal=block.kind is Kind.CAUSAL, scale=scale, dropped=dropped)

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block,
                 scale: float, dropped: Dropped | None) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of one block; `out` and `lse` are the merged ones of all local queries."""
        rows, keys = (block.samples, block.rows), (block.samples, block.keys)
        grad, q, k, v, out = self.cast(grad[rows], q[rows], k[keys], v[keys], out[rows])
        lse = lse[block.samples, :, block.rows].contiguous()
        if block.kind is Kind.TILE:
            return self.tiles.backward(grad, q, k, v, out, lse, causal=False, scale=scale, dropped=dropped,
                                       visible=block.visible(q.device))
        return self.backend.backward(grad, q, k, v, out, lse, causal=block.kind is Kind.CAUSAL, scale=scale,
                                     dropped=dropped)


@dataclass(frozen=True)
class Places:
    """The positions that each member of the group holds, ascending; index = rank in the group."""

    positions: tuple[np.ndarray, ...]
    runs: tuple[list[slice], ...]
    """The same as runs of consecutive positions."""

    @classmethod
    def of(cls, positions: Sequence[Tensor]) -> Places:
        """From one int64 tensor a rank, in any order."""
        held = tuple(x.sort().values.numpy() for x in positions)
        return cls(held, tuple(_runs(x) for x in held))

    def blocks(self, mask: Mask, queries: int, keys: int) -> list[Block]:
        """What the queries of one rank see of the keys of another."""
        q_pos, k_pos = self.positions[queries], self.positions[keys]
        return mask.blocks(q_pos, k_pos, (len(self.positions), queries, keys, len(q_pos), len(k_pos)))

    def first(self, length: int) -> Places:
        """The first `length` positions of each list: a text shorter than the sequence."""
        return Places.of([torch.from_numpy(x[:length]) for x in self.positions])

    def reach(self, mask: Mask) -> list[int]:
        """Per rank, the number of hops after which the last rank that sees its keys has had them."""
        return mask.remembered(("reach", len(self.positions)), lambda: self._reach(mask))

    def _reach(self, mask: Mask) -> list[int]:
        n = len(self.positions)
        return [max(i for i in range(n) if i == 0 or mask.meet(self.runs[(j + i) % n], self.runs[j]))
                for j in range(n)]


def _runs(positions: np.ndarray) -> list[slice]:
    """Consecutive positions as slices."""
    edges = [0, *(np.flatnonzero(np.diff(positions) != 1) + 1).tolist(), len(positions)]
    return [slice(int(positions[a]), int(positions[b - 1]) + 1) for a, b in zip(edges, edges[1:], strict=False)]


def dropped(bits: AttentionDropout | None, block: Block, q_pos: np.ndarray, k_pos: np.ndarray) -> Dropped | None:
    """The dropout of a block, by global positions."""
    if bits is None:
        return None
    own = replace(bits, sample_ids=bits.sample_ids[block.samples])
    return Dropped(own, torch.from_numpy(q_pos[block.rows]), torch.from_numpy(k_pos[block.keys]))


class Merged:
    """The output and log-sum-exp of the local queries over the blocks seen so far."""

    def __init__(self, q: Tensor) -> None:
        self.q = q
        self.out: Tensor | None = None
        self.lse: Tensor | None = None

    def add(self, block: Block, part: Tensor, part_lse: Tensor) -> None:
        """Fold in one block's part."""
        if self.out is None or self.lse is None:
            if part.shape[:2] == self.q.shape[:2]:    # the first block is all queries': nothing to merge with
                self.out, self.lse = part.to(wide_dtype(part.dtype)), part_lse
                return
            b, n, heads, _ = self.q.shape
            self.out = torch.zeros(self.q.shape, dtype=wide_dtype(self.q.dtype), device=self.q.device)
            self.lse = torch.full((b, heads, n), float("-inf"), dtype=self.out.dtype, device=self.q.device)
        merge_(self.out[block.samples, block.rows], self.lse[block.samples, :, block.rows], part.to(self.out.dtype),
               part_lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """(out in q's dtype, log-sum-exp). Every query sees its own key, so no row is empty."""
        assert self.out is not None and self.lse is not None
        return self.out.to(self.q.dtype), self.lse


@dataclass(frozen=True)
class Call:
    """What one attention needs besides its tensors; `here` is this rank's place."""

    kernel: Kernel
    places: Places
    here: int
    mask: Mask
    scale: float
    bits: AttentionDropout | None

    def forward(self, merged: Merged, k: Tensor, v: Tensor, source: int) -> None:
        """Fold in what the local queries see of the keys of `source`."""
        q_pos, k_pos = self.places.positions[self.here], self.places.positions[source]
        for block in self.places.blocks(self.mask, self.here, source):
            merged.add(block, *self.kernel.forward(merged.q, k, v, block, self.scale,
                                                   dropped(self.bits, block, q_pos, k_pos)))

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, source: int,
                 dq: Tensor) -> Iterator[KeyGradients]:
        """Add the gradients over the keys of `source` to dq; those of the keys come block by block."""
        q_pos, k_pos = self.places.positions[self.here], self.places.positions[source]
        for block in self.places.blocks(self.mask, self.here, source):
            part_q, part_k, part_v = self.kernel.backward(grad, q, k, v, out, lse, block, self.scale,
                                                          dropped(self.bits, block, q_pos, k_pos))
            dq[block.samples, block.rows] += part_q
            yield block, part_k, part_v


KeyGradients = tuple[Block, Tensor, Tensor]
"""(block, dk, dv) of the block's own keys."""


def add_keys(dk: Tensor, dv: Tensor, parts: Iterable[KeyGradients]) -> None:
    """Add the blocks' gradients to those of all keys."""
    for block, part_k, part_v in parts:
        dk[block.samples, block.keys] += part_k
        dv[block.samples, block.keys] += part_v


class _LocalAttention(torch.autograd.Function):
    """All keys are here: the blocks, and no transfer."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        merged = Merged(q)
        call.forward(merged, k, v, 0)
        out, lse = merged.result()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        call: Call = ctx.call
        blocks = call.places.blocks(call.mask, 0, 0)
        if len(blocks) == 1:    # the plain causal case: the kernel's own gradients, nothing added up
            block, positions = blocks[0], call.places.positions[0]
            bits = dropped(call.bits, block, positions, positions)
            parts = call.kernel.backward(grad, q, k, v, out, lse, block, call.scale, bits)
            return *(part.to(x.dtype) for part, x in zip(parts, (q, k, v), strict=True)), None
        dq, dk, dv = (torch.zeros(x.shape, dtype=wide_dtype(x.dtype), device=x.device) for x in (q, k, v))
        add_keys(dk, dv, call.backward(grad, q, k, v, out, lse, 0, dq))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def local_attention(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    """Attention of a group of one: q, k, v `[b, s, heads, d]` -> `[b, s, heads, d]`."""
    if q.shape[1] < len(call.places.positions[0]):
        call = replace(call, places=call.places.first(q.shape[1]))
    return _LocalAttention.apply(q, k, v, call)
