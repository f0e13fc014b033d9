"""The tensors that one rank holds, in their order, and the flat buckets in which their gradients travel: sizes only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megafour.sizes import PRODUCTION, Sizes


@dataclass(frozen=True)
class Part:
    """What one pipeline stage holds."""

    layers: int
    first: bool
    """With the embedding."""
    last: bool
    """With the head."""


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
    """Times that ZeRO 3 gathers it in a micro-batch: for a forward and a backward that read it."""


def parameters(config: Any, parts: Sequence[Part], tp_rank: int, vocab_size: int) -> list[Parameter]:
    """Of a rank with these stages, in the order in which its modules register them.

    No backward reads the matrix of the embedding or of the head: a look-up's needs none, and the head's gradients are
    made with the loss. A tied one on one rank is read by both forwards.
    """
    local = _Local(config, tp_rank, vocab_size)
    alone = any(p.first for p in parts) and any(p.last for p in parts)
    tied, units = config.model.tie_embeddings, []
    for chunk, part in enumerate(parts):
        if part.first:
            token = replace(local.vocabulary(tied and not alone), gathers=2 if tied and alone else 1)
            units.append((chunk, [*(replace(p, gathers=1) for p in local.position()), token]))
        units += [(chunk, local.layer()) for _ in range(part.layers)]
        if part.last:
            head = local.norm(config.model.hidden_size, local.sp, config.model.norm == "layernorm")
            matrix = [] if tied and alone else [replace(local.vocabulary(tied), gathers=1)]
            units.append((chunk, [*head, *matrix]))
    return [replace(p, chunk=chunk, unit=i) for i, (chunk, held) in enumerate(units) for p in held]


@dataclass(frozen=True)
class _Local:
    config: Any
    tp_rank: int
    vocab_size: int

    @property
    def tp(self) -> int:
        return int(self.config.parallel.tp)

    @property
    def sp(self) -> bool:
        """Whether a replicated weight sees only this rank's share of the sequence."""
        return bool(self.config.parallel.sequence_parallel) and self.tp > 1

    def norm(self, size: int, summed: bool, bias: bool) -> list[Parameter]:
        return [self.replicated(size, summed)] * (2 if bias else 1)

    def replicated(self, size: int, summed: bool) -> Parameter:
        return Parameter(size, False, (("tp", 0, size),) if summed else ())

    def position(self) -> list[Parameter]:
        model = self.config.model
        if model.position != "learned":
            return []
        size = int(model.max_position_embeddings) * model.hidden_size
        return [Parameter(size, True, (("tp", 0, size),) if self.sp else ())]

    def vocabulary(self, tied: bool) -> Parameter:
        """Rows are rounded up; of a tied copy on another stage only the rows of real words are summed."""
        hidden, rows = self.config.model.hidden_size, -(-self.vocab_size // self.tp)
        valid = min(rows, self.vocab_size - min(self.tp_rank * rows, self.vocab_size))
        return Parameter(rows * hidden, True, (("embedding", 0, valid * hidden),) if tied and valid else ())

    def layer(self) -> list[Parameter]:
        model, tp, sp = self.config.model, self.tp, self.sp
        hidden, d, layernorm = model.hidden_size, model.head_size, model.norm == "layernorm"
        query, kv = model.num_attention_heads // tp * d, max(model.kv_heads // tp, 1) * d
        ffn = model.ffn_size // tp
        norm = self.norm(hidden, sp, layernorm)

        def fused(width: int, matrix: bool) -> Parameter:
            keys = ((query * width, (query + kv) * width), ((query + kv) * width, (query + 2 * kv) * width))
            shared = tuple(("kv", a, b) for a, b in keys) if tp > model.kv_heads else ()
            return Parameter((query + 2 * kv) * width, matrix, shared)

        attention = [fused(hidden, True)] + ([fused(1, False)] if model.qkv_bias else [])
        attention.append(Parameter(query * hidden, True))
        if model.linear_bias:
            attention.append(self.replicated(hidden, sp))
        if model.qk_norm:
            attention += [self.replicated(d, tp > 1)] * 2
        up = ffn * (2 if model.gated else 1)
        mlp = [Parameter(up * hidden, True)] + ([Parameter(up, False)] if model.linear_bias else [])
        mlp.append(Parameter(ffn * hidden, True))
        if model.linear_bias:
            mlp.append(self.replicated(hidden, sp))
        return [*norm, *attention, *norm, *mlp]


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
