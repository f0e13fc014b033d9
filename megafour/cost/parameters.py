"""The tensors that one rank holds, in their order, and the flat buckets in which their gradients travel: sizes only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

BUCKET_BYTES = 25 << 20
"""Gradient bytes a bucket holds: large enough that gloo and NCCL run at bandwidth, small enough to overlap."""

SHARE_UNIT = 64
"""Elements to which each rank's share is rounded, so that every shard starts on a cache line."""


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


def parameters(config: Any, parts: Sequence[Part], tp_rank: int, vocab_size: int) -> list[Parameter]:
    """Of a rank with these stages, in the order in which its modules register them."""
    local = _Local(config, tp_rank, vocab_size)
    alone = any(p.first for p in parts) and any(p.last for p in parts)
    tied, out = config.model.tie_embeddings, []
    for part in parts:
        if part.first:
            out += [*local.position(), local.vocabulary(tied and not alone)]
        for _ in range(part.layers):
            out += local.layer()
        if part.last:
            out += local.norm(config.model.hidden_size, local.sp, config.model.norm == "layernorm")
            if not (tied and alone):
                out.append(local.vocabulary(tied))
    return out


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

    def share(self, rank: int, ranks: int) -> Iterator[tuple[str, int]]:
        """(group, elements) of what is synced within the share of `rank` of `ranks`."""
        size = self.numel // ranks
        for group, a, b in self.synced:
            inside = min(b, (rank + 1) * size) - max(a, rank * size)
            if inside > 0:
                yield group, inside


def buckets(params: Sequence[Parameter], ranks: int, wide: int) -> list[Bucket]:
    """Matrices, then vectors, last one first, cut where BUCKET_BYTES of gradients (`wide` bytes each) are full.

    The copies of a tied embedding on two stages have a bucket of their own, so that both are cut alike.
    """
    plans: list[list[Parameter]] = []
    for matrix in (True, False):
        current: list[Parameter] = []
        for param in reversed([p for p in params if p.matrix == matrix]):
            if any(group == "embedding" for group, _, _ in param.synced):
                plans.append([param])
                continue
            current.append(param)
            if sum(p.numel for p in current) * wide >= BUCKET_BYTES:
                plans.append(current)
                current = []
        if current:
            plans.append(current)
    return [_flat(plan, ranks) for plan in plans]


def _flat(params: Sequence[Parameter], ranks: int) -> Bucket:
    start, synced = 0, []
    for param in params:
        synced += [(group, start + a, start + b) for group, a, b in param.synced]
        start += param.numel
    unit = SHARE_UNIT * ranks
    return Bucket(math.ceil(start / unit) * unit, tuple(synced))
