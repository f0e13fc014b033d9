"""When gradients are summed over the ranks that hold the same weights: once a step, or with every micro-batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megafour.comm import primitives
from megafour.comm.group import Group
from megafour.parallel.data.bucket import Bucket
from megafour.parallel.pieces import uses_of
from megafour.sizes import PRODUCTION

Look = Callable[[Bucket], None]
"""Sees a bucket whose gradients are complete on this rank, in place of their reduction."""


@dataclass
class _Queue:
    """Buckets that are launched in a fixed order, round after round: all ranks of a group post the same sequence."""

    buckets: list[Bucket]
    launched: int = 0

    @property
    def first(self) -> Bucket:
        """The bucket whose turn it is."""
        return self.buckets[self.launched % len(self.buckets)]


class Reduction:
    """Sums each bucket over `shard`, of which every rank keeps its share, and the shares over `replicas`.

    `each`: with every micro-batch (ZeRO 2 and 3), so that a whole gradient is there only while one micro-batch fills
    it; else once a step. Contributions are counted from the start of the step, so that no order of backwards and
    weight gradients matters: a bucket is due for the k-th time when each of its parameters has had k micro-batches'
    worth. What has come of later micro-batches by then, where schedules put weight gradients off or a tied weight has
    two uses, is summed with it.
    """

    def __init__(self, buckets: Sequence[Bucket], shard: Group, replicas: Group, *, each: bool,
                 in_flight: int = PRODUCTION.in_flight) -> None:
        self.in_flight = in_flight
        self.buckets, self.shard, self.replicas, self.each = buckets, shard, replicas, each
        self._of = {param: bucket for bucket in buckets for param in bucket.params}
        self._queues: dict[int, _Queue] = {}
        for bucket in buckets:
            self._queues.setdefault(bucket.chunk if each else 0, _Queue([])).buckets.append(bucket)
        self._running, self._rounds = False, 0
        self._look: Look | None = None
        self._flying: deque[tuple[Bucket, primitives.Pending]] = deque()
        self._sums: list[primitives.Pending] = []

    def start(self, microbatches: int, look: Look | None = None) -> None:
        """A step of `microbatches` begins: reduce each bucket as soon as it is due; `look`: only let that see it."""
        self._running, self._look, self._rounds = True, look, microbatches if self.each else 1
        for bucket in self.buckets:
            bucket.round = bucket.landed = 0
            bucket.came = dict.fromkeys(bucket.params, 0)
            per = 1 if self.each else microbatches
            bucket.due = {param: per * uses_of(param) for param in bucket.params}
            bucket.missing = len(bucket.params)
        for queue in self._queues.values():
            queue.launched = 0

    def ready(self, param: nn.Parameter) -> None:
        """A gradient was added to the parameter's buffer."""
        if not self._running:
            return
        bucket = self._of[param]
        bucket.came[param] += 1
        if bucket.came[param] == bucket.due[param] * (bucket.round + 1):
            bucket.missing -= 1
            if bucket.missing == 0:
                self._advance(self._queues[bucket.chunk if self.each else 0])

    def _advance(self, queue: _Queue) -> None:
        while queue.launched < self._rounds * len(queue.buckets) and queue.first.missing == 0:
            self._launch(queue)

    def _launch(self, queue: _Queue) -> None:
        bucket = queue.first
        queue.launched += 1
        bucket.round += 1
        bucket.missing = sum(bucket.came[p] < bucket.due[p] * (bucket.round + 1) for p in bucket.params)
        if self._look is not None:
            self._look(bucket)
            bucket.drop_grads()
        elif self.shard.size == 1:
            self._sum_replicas(bucket)
        else:
            out = torch.empty_like(bucket.grad_shard) if self.each else bucket.grad_shard
            pending = primitives.reduce_scatter(bucket.whole_grads(), self.shard, out=out, async_op=True)
            bucket.drop_grads()
            self._flying.append((bucket, pending))
            # Landing early frees a buffer, or lets the sum over replicas begin; what needs neither never waits.
            while len(self._flying) > self.in_flight and (self.each or self.replicas.size > 1):
                self._land()

    def _land(self) -> None:
        bucket, pending = self._flying.popleft()
        arrived = pending.wait()
        if self.each:
            bucket.grad_shard.add_(arrived)
        bucket.landed += 1
        if bucket.landed == self._rounds:
            self._sum_replicas(bucket)

    def _sum_replicas(self, bucket: Bucket) -> None:
        self._sums.append(primitives.all_reduce(bucket.grad_shard, self.replicas, async_op=True))

    def finish(self) -> None:
        """Launch what no gradient came for, and wait until every sum is here."""
        for queue in self._queues.values():
            while queue.launched < self._rounds * len(queue.buckets):
                self._launch(queue)
        while self._flying:
            self._land()
        for pending in self._sums:
            pending.wait()
        self._sums.clear()
        self._running = False
