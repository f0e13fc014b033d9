"""Flat buckets of weights and fp32 gradients: reduced once a step, overlapped with the last backward."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megafour.comm import primitives
from megafour.comm.group import Group
from megafour.cost.parameters import BUCKET_BYTES, SHARE_UNIT
from megafour.parallel.grads import Deferral, attach_main_grad
from megafour.parallel.pieces import Piece, pieces_of


@dataclass
class Bucket:
    """A run of parameters whose weights, and whose gradients, lie in one flat tensor each."""

    params: list[nn.Parameter]
    decay: bool
    weights: Tensor
    """Flat, in the model's dtype; the parameters are views of it. Padded to equal shares."""
    grads: Tensor
    """Flat fp32 (fp64 in fp64 runs) sums over micro-batches."""
    starts: dict[nn.Parameter, int]
    shard: slice
    """The range this rank optimises: all of it, or its 1/n under ZeRO."""
    waiting: dict[nn.Parameter, int] = field(default_factory=dict)
    pending: primitives.Pending | None = None
    launched: bool = False

    def shard_ranges(self) -> Iterable[tuple[nn.Parameter, Piece, int, int]]:
        """(param, piece, start, stop): each piece's part within this rank's shard, as offsets into the shard."""
        for param in self.params:
            for piece in pieces_of(param):
                a, b = piece.flat_range(tuple(param.shape))
                a, b = a + self.starts[param] - self.shard.start, b + self.starts[param] - self.shard.start
                a, b = max(a, 0), min(b, self.shard.stop - self.shard.start)
                if a < b:
                    yield param, piece, a, b


def uses_decay(param: nn.Parameter) -> bool:
    """Weight decay falls on every tensor of two or more dims, nothing else."""
    return param.dim() >= 2


def _plan(params: list[nn.Parameter], bytes_per: int) -> list[list[nn.Parameter]]:
    """Parameters in the order their gradients come (last layer first), cut where a bucket is full.

    Tied embeddings get a bucket of their own, so that ZeRO cuts it alike on the first and the last stage.
    """
    plans: list[list[nn.Parameter]] = []
    for decay in (True, False):
        current: list[nn.Parameter] = []
        for param in reversed([p for p in params if uses_decay(p) == decay]):
            if any(piece.reduce == "embedding" for piece in pieces_of(param)):
                plans.append([param])
                continue
            current.append(param)
            if sum(p.numel() for p in current) * bytes_per >= BUCKET_BYTES:
                plans.append(current)
                current = []
        if current:
            plans.append(current)
    return plans


class GradientBuckets:
    """Owns the flat storage of a stage's weights and gradients, and their reduction over dp×cp (`group`).

    Reduction happens over dp×cp also when dp is 1: with cp > 1 every rank holds the gradient of its own tokens only.
    """

    def __init__(self, params: Iterable[nn.Parameter], group: Group, *, zero_stage: int,
                 accumulate: torch.dtype) -> None:
        self.group, self.zero_stage = group, zero_stage
        self.reducing = False
        self.deferral = Deferral()
        """Where weight gradients wait when a schedule splits the backward."""
        self.buckets: list[Bucket] = []
        self._of: dict[nn.Parameter, Bucket] = {}
        for chosen in _plan(list(params), torch.empty((), dtype=accumulate).element_size()):
            self.buckets.append(self._flatten(chosen, accumulate))

    @property
    def sharded(self) -> bool:
        """Whether each rank keeps and optimises only its share (ZeRO 1)."""
        return self.zero_stage >= 1 and self.group.size > 1

    def _flatten(self, params: list[nn.Parameter], accumulate: torch.dtype) -> Bucket:
        total = sum(p.numel() for p in params)
        unit = SHARE_UNIT * self.group.size
        padded = math.ceil(total / unit) * unit
        device = params[0].device
        weights = torch.zeros(padded, dtype=params[0].dtype, device=device)
        grads = torch.zeros(padded, dtype=accumulate, device=device)
        share = padded // self.group.size
        shard = slice(self.group.rank * share, (self.group.rank + 1) * share) if self.sharded else slice(0, padded)
        bucket = Bucket(params, uses_decay(params[0]), weights, grads, {}, shard)
        start = 0
        for param in params:
            stop = start + param.numel()
            weights[start:stop].copy_(param.detach().reshape(-1))
            param.data = weights[start:stop].view(param.shape)
            attach_main_grad(param, grads[start:stop].view(param.shape), self._ready, self.deferral)
            bucket.starts[param] = start
            self._of[param] = bucket
            start = stop
        return bucket

    def zero(self) -> None:
        """Forget the last step's gradients."""
        for bucket in self.buckets:
            bucket.grads.zero_()

    def start_reduction(self, microbatches: int) -> None:
        """A step of `microbatches` begins: reduce each bucket as soon as the last gradient for it is in.

        Counted from the start, so that no order of backwards and weight gradients matters.
        """
        self.reducing = True
        for bucket in self.buckets:
            bucket.launched, bucket.pending = False, None
            bucket.waiting = {p: microbatches * getattr(p, "uses", 1) for p in bucket.params}

    def _ready(self, param: nn.Parameter) -> None:
        if not self.reducing:
            return
        bucket = self._of[param]
        bucket.waiting[param] -= 1
        if bucket.waiting[param] == 0:
            del bucket.waiting[param]
            self._launch_whole()

    def _launch_whole(self) -> None:
        """Launch whole buckets in their fixed order: every rank of the group must post the same sequence."""
        for bucket in self.buckets:
            if bucket.launched:
                continue
            if bucket.waiting:
                return
            self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        bucket.launched = True
        if self.sharded:
            bucket.pending = primitives.reduce_scatter(bucket.grads, self.group, out=bucket.grads[bucket.shard],
                                                       async_op=True)
        else:
            bucket.pending = primitives.all_reduce(bucket.grads, self.group, async_op=True)

    def finish_reduction(self) -> None:
        """Wait until every bucket's sum over dp×cp is here."""
        for bucket in self.buckets:
            if not bucket.launched:
                self._launch(bucket)
        for bucket in self.buckets:
            if bucket.pending is not None:
                bucket.pending.wait()
            bucket.pending = None
        self.reducing = False

    def gather_weights(self) -> None:
        """ZeRO: collect the shards that the other ranks have updated."""
        if self.sharded:
            flying = [primitives.all_gather(b.weights[b.shard], self.group, out=b.weights, async_op=True)
                      for b in self.buckets]
            for pending in flying:
                pending.wait()


def sync_replicated(buckets: Iterable[Bucket], groups: dict[str, Group]) -> None:
    """Sum the gradients of replicated pieces over the group that each names, one collective a group.

    Norm weights and row-parallel biases in a sequence-parallel region (`tp`), replicated K/V heads (`kv`), the tied
    embedding on first and last stage (`embedding`). After the data-parallel reduction, so that under ZeRO only this
    rank's shard travels; the sums commute.
    """
    wanted: dict[str, list[Tensor]] = {}
    for bucket in buckets:
        shard = bucket.grads[bucket.shard]
        for _, piece, a, b in bucket.shard_ranges():
            if piece.reduce is not None:
                wanted.setdefault(piece.reduce, []).append(shard[a:b])
    for name in sorted(wanted):
        group, parts = groups[name], wanted[name]
        if group.size == 1:
            continue
        flat = primitives.all_reduce(torch.cat(parts), group)
        for part, summed in zip(parts, flat.split([p.numel() for p in parts]), strict=True):
            part.copy_(summed)


def squared_norm(buckets: Iterable[Bucket]) -> Tensor:
    """This rank's share of the squared gradient norm, 0-D float64: counted pieces of its shards only."""
    total: Tensor | None = None
    for bucket in buckets:
        shard = bucket.grads[bucket.shard]
        for a, b in _merged(bucket):
            part = torch.linalg.vector_norm(shard[a:b]).double().square()
            total = part if total is None else total + part
        total = torch.zeros((), dtype=torch.float64, device=shard.device) if total is None else total
    assert total is not None
    return total


def _merged(bucket: Bucket) -> list[tuple[int, int]]:
    """The counted ranges of the shard, neighbours joined, so that a bucket costs a few kernels."""
    spans: list[tuple[int, int]] = []
    for _, piece, a, b in bucket.shard_ranges():
        if not piece.counted:
            continue
        if spans and spans[-1][1] == a:
            spans[-1] = (spans[-1][0], b)
        else:
            spans.append((a, b))
    return spans
