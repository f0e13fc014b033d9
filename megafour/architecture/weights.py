"""Logical weights and the parameters that hold them: shapes, splits over tp, gradient sums, initial values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megafour.architecture.pieces import Piece


@dataclass(frozen=True)
class TensorParallel:
    """Tensor parallelism as one rank sees it."""

    size: int = 1
    rank: int = 0
    sequence_parallel: bool = False
    """Whether norms, dropout and the residual stream hold 1/size of the sequence; never with a size of 1."""

    def residual(self, width: int) -> int:
        """Elements of the residual stream, `width` a token, that a rank holds of each token on average."""
        return width // (self.size if self.sequence_parallel else 1)


@dataclass(frozen=True)
class Split:
    """How tensor parallelism cuts a weight: whole units of one dim, an equal number on each rank."""

    dim: int
    units: int
    """Heads, features or words: what a cut may not divide."""
    replicas: str | None = None
    """Group that sums the gradients where there are more ranks than units. Each unit then lives on size/units ranks,
    and each of them sees a part of its gradient. None: more ranks than units are an error."""
    padded: bool = False
    """Units need not divide: each rank has units/size, rounded up, and the last ranks have padding (a vocabulary)."""

    def per_rank(self, size: int) -> int:
        """Units in the local parameter of each of `size` ranks, padding included.

        Raises:
            ValueError: the units do not divide over the ranks.
        """
        if self.padded:
            return -(-self.units // size)
        if self.units % size and (self.replicas is None or size % self.units):
            raise ValueError(f"{self.units} units do not divide over {size} tensor-parallel ranks")
        return max(self.units // size, 1)

    def range(self, at: TensorParallel) -> tuple[int, int]:
        """(first unit, units without padding) of this rank."""
        first = min(at.rank // self.copies(at.size) * self.per_rank(at.size), self.units)
        return first, min(self.per_rank(at.size), self.units - first)

    def copies(self, size: int) -> int:
        """Ranks that hold the same units."""
        return 1 if self.padded else max(size // self.units, 1)


@dataclass(frozen=True)
class Weight:
    """One logical tensor of the whole model."""

    name: str
    """Global, `layers.17.attention.wq.weight`."""
    shape: tuple[int, ...]
    """Without padding."""
    split: Split | None = None
    """None: every tensor-parallel rank holds all of it."""
    partial: Literal["sequence", "heads"] = "sequence"
    """Of a weight that is not split: why each rank has only a part of its gradient, which tp must sum. `sequence`: it
    sees its share of the tokens, under sequence parallelism. `heads`: it sees its own heads, always."""
    init: Literal["normal", "ones", "zeros"] = "normal"
    std: float = 0.02
    """Standard deviation of a `normal` start."""
    copied: bool = False
    """The tied embedding on two stages: group `embedding` sums the gradients of both copies."""
    counted: bool = True
    """Of two copies, whether it is the one in norms and checkpoints."""

    @property
    def count(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    def local_shape(self, at: TensorParallel) -> tuple[int, ...]:
        """What the rank stores, padding included."""
        if self.split is None:
            return self.shape
        return self._cut(self.split.per_rank(at.size))

    def piece(self, at: TensorParallel, row: int = 0) -> Piece:
        """The rectangle that this rank holds, from row `row` of its local parameter on; empty in a rank of padding."""
        offset, size, reduce, counted = (0,) * len(self.shape), self.shape, None, self.counted
        if self.split is None:
            if at.size > 1 and (self.partial == "heads" or at.sequence_parallel):
                reduce = "tp"
            counted = counted and at.rank == 0
        else:
            first, units = self.split.range(at)
            unit, copies = self.shape[self.split.dim] // self.split.units, self.split.copies(at.size)
            offset = tuple(first * unit if dim == self.split.dim else 0 for dim in range(len(self.shape)))
            size = self._cut(units)
            if copies > 1:
                reduce, counted = self.split.replicas, counted and at.rank % copies == 0
        return Piece(self.name, self.shape, offset, size, row, "embedding" if self.copied else reduce, counted,
                     self.init, self.std)

    def _cut(self, units: int) -> tuple[int, ...]:
        assert self.split is not None
        rows = units * (self.shape[self.split.dim] // self.split.units)
        return tuple(rows if dim == self.split.dim else n for dim, n in enumerate(self.shape))


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter that a module registers: one weight, or several of equal width fused by rows."""

    weights: tuple[Weight, ...]
    uses: int = 1
    """Modules on this rank whose forward reads it: 2 for a tied embedding beside its head."""
    read_by_backward: bool = True
    """Whether a backward reads it. That of a look-up does not, nor that of a head, whose gradients come with its
    loss."""

    @property
    def gathers(self) -> int:
        """Times that ZeRO 3 gathers it in a micro-batch: for each forward and each backward that reads it."""
        return self.uses + self.read_by_backward

    def shape(self, at: TensorParallel) -> tuple[int, ...]:
        """Of the local parameter, padding included."""
        local = [weight.local_shape(at) for weight in self.weights]
        return (sum(shape[0] for shape in local), *local[0][1:])

    def pieces(self, at: TensorParallel) -> tuple[Piece, ...]:
        """What this rank holds of each weight; none of those of which it holds only padding."""
        found, row = [], 0
        for weight in self.weights:
            found.append(weight.piece(at, row))
            row += weight.local_shape(at)[0]
        return tuple(piece for piece in found if 0 not in piece.size)
