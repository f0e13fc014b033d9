"""The tensors that one rank holds, in their order, and the flat buckets in which their gradients travel: sizes only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megafour.architecture.model import Architecture, Part
from megafour.architecture.pieces import Piece
from megafour.architecture.weights import TensorParallel
from megafour.sizes import PRODUCTION, Sizes


@dataclass(frozen=True)
class Parameter:
    """A local parameter: its elements, and the ranges of it whose gradients a group must sum."""

    numel: int
    matrix: bool
    """Of two or more dims: it decays, and has buckets of its own kind."""
    synced: tuple[tuple[str, int, int], ...] = ()
    """(group `tp`, `kv` or `embedding`, start, stop)."""
    chunk: int = 0
    """Which of the rank's virtual stages it belongs to."""
    unit: int = 0
    """Which block, embedding or head, counted over the rank."""
    gathers: int = 2
    """Times that ZeRO 3 gathers it in a micro-batch: for each forward and each backward that reads it."""


def parameters(architecture: Architecture, parts: Sequence[Part], at: TensorParallel) -> list[Parameter]:
    """Of a rank with these stages, in the order in which its modules register them."""
    return [parameter_of(spec.shape(at), spec.pieces(at), chunk=chunk, unit=unit, gathers=spec.gathers)
            for unit, (chunk, held) in enumerate(architecture.units(parts)) for spec in held]


def tensor_parallel(config: Any, rank: int = 0) -> TensorParallel:
    """What a resolved configuration asks of one tensor-parallel rank."""
    parallel = config.parallel
    return TensorParallel(parallel.tp, rank, bool(parallel.sequence_parallel) and parallel.tp > 1)


def parameter_of(shape: tuple[int, ...], pieces: Iterable[Piece], *, chunk: int, unit: int, gathers: int) -> Parameter:
    """A local parameter of this shape that holds these pieces."""
    synced = tuple((piece.reduce, *piece.flat_range(shape)) for piece in pieces if piece.reduce is not None)
    return Parameter(math.prod(shape), len(shape) >= 2, synced, chunk, unit, gathers)


@dataclass(frozen=True)
class Bucket:
    """Parameters one after another, padded to equal shares."""

    numel: int
    synced: tuple[tuple[str, int, int], ...]
    """As of a parameter, as offsets into the bucket."""
    gathers: int = 2
    """As of a parameter: the most of any."""

    def share(self, rank: int, ranks: int) -> Iterator[tuple[str, int]]:
        """(group, elements) of what is synced within the share of `rank` of `ranks`."""
        size = self.numel // ranks
        for group, a, b in self.synced:
            inside = min(b, (rank + 1) * size) - max(a, rank * size)
            if inside > 0:
                yield group, inside


def plan(params: Sequence[Parameter], wide: int, zero_stage: int,
         bucket_bytes: int = PRODUCTION.bucket_bytes) -> list[list[int]]:
    """Which parameters share a bucket, by their indices: the one description behind the buckets and their traffic.

    Matrices, then vectors, last one first, as their gradients come, cut where `bucket_bytes` of gradients (`wide` bytes
    each) are full. ZeRO 2 reduces with each micro-batch, so no bucket may wait for another virtual stage; what ZeRO 3
    gathers together, a block, an embedding or a head, has buckets of its own, uncut.
    """
    spans: dict[tuple[int, int], list[int]] = {}
    for index, param in enumerate(params):
        key = (0, 0) if zero_stage < 2 else (param.chunk, -param.unit if zero_stage == 3 else 0)
        spans.setdefault(key, []).append(index)
    limit = bucket_bytes if zero_stage < 3 else math.inf
    return [cut for key in sorted(spans) for matrix in (True, False) for cut in _cut(
        params, [i for i in reversed(spans[key]) if params[i].matrix == matrix], wide, limit)]


def _cut(params: Sequence[Parameter], chosen: list[int], wide: int, limit: float) -> list[list[int]]:
    """The copies of a tied embedding on two stages have a bucket of their own, so that both are cut alike."""
    plans: list[list[int]] = []
    current: list[int] = []
    for index in chosen:
        if any(group == "embedding" for group, _, _ in params[index].synced):
            plans.append([index])
            continue
        current.append(index)
        if sum(params[i].numel for i in current) * wide >= limit:
            plans.append(current)
            current = []
    return [*plans, current] if current else plans


def buckets(params: Sequence[Parameter], ranks: int, wide: int, zero_stage: int,
            sizes: Sizes = PRODUCTION) -> list[Bucket]:
    """The buckets of `plan`, each padded to equal shares for `ranks` ranks."""
    return [_flat([params[i] for i in chosen], ranks, sizes.share_unit)
            for chosen in plan(params, wide, zero_stage, sizes.bucket_bytes)]


def padded(numel: int, ranks: int, share_unit: int = PRODUCTION.share_unit) -> int:
    """Elements of a bucket whose shares all start on a cache line."""
    unit = share_unit * ranks
    return -(-numel // unit) * unit


def _flat(params: Sequence[Parameter], ranks: int, share_unit: int) -> Bucket:
    start, synced = 0, []
    for param in params:
        synced += [(group, start + a, start + b) for group, a, b in param.synced]
        start += param.numel
    return Bucket(padded(start, ranks, share_unit), tuple(synced), max(p.gathers for p in params))
