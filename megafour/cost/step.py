"""The bytes of a whole training step on one rank of the mesh: blocks, embedding, head, pipeline, gradients, sync."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megafour.architecture.model import Architecture, Part
from megafour.architecture.sublayer import Collective, LocalHeads
from megafour.architecture.weights import TensorParallel
from megafour.cost import traffic
from megafour.cost.memory import ELEMENT, sharing
from megafour.cost.parameters import Bucket, buckets, parameters, tensor_parallel
from megafour.cost.traffic import Heads, Traffic, collective, total
from megafour.sizes import PRODUCTION, Sizes

Reach = Callable[[int, int | None], Sequence[int]]
"""(micro-batch, window) -> hops that each ring rank's keys travel."""


@dataclass(frozen=True)
class Place:
    """One rank's place in the mesh."""

    pp: int = 0
    tp: int = 0
    ring: int = 0
    dp_cp: int = 0
    """Its index among the dp·cp ranks that hold the same weights."""


@dataclass(frozen=True)
class Stages:
    """The pipeline: per stage, first to last, the rank that holds it and the layers that it has."""

    rank_of: Sequence[int]
    layers: Sequence[range]

    def held(self, rank: int) -> list[int]:
        """Stages of one rank."""
        return [stage for stage, owner in enumerate(self.rank_of) if owner == rank]

    def parts(self, rank: int) -> list[Part]:
        """The same as what they hold."""
        return [Part(self.layers[i], i == 0, i == len(self.rank_of) - 1) for i in self.held(rank)]


@dataclass(frozen=True)
class StepTraffic:
    """What a resolved config moves in a step, seen from one rank. Sizes of the mesh and batch are the config's."""

    config: Any
    place: Place
    stages: Stages
    vocab_size: int
    sizes: Sizes = PRODUCTION

    @cached_property
    def architecture(self) -> Architecture:
        """The model."""
        return Architecture(self.config.model, self.vocab_size)

    @property
    def element(self) -> int:
        """Bytes of an activation's element."""
        return ELEMENT[self.config.train.precision]

    @property
    def wide(self) -> int:
        """Bytes of an element of what is accumulated."""
        return max(4, self.element)

    @property
    def micro_batches(self) -> int:
        """Of one rank, in a step."""
        train = self.config.train
        return train.global_batch_size // (int(self.config.parallel.dp) * train.micro_batch_size)

    @property
    def tokens(self) -> int:
        """Of a micro-batch on this rank."""
        return self.config.data.seq_length // self.config.parallel.cp * self.config.train.micro_batch_size

    @property
    def activation(self) -> int:
        """Bytes of the residual stream of those tokens, before sequence parallelism cuts it."""
        return self.tokens * self.config.model.hidden_size * self.element

    @property
    def sharers(self) -> int:
        """Ranks that hold the same weights."""
        return int(self.config.parallel.dp) * self.config.parallel.cp

    @property
    def shares(self) -> int:
        """Into how many shares ZeRO cuts what it shards."""
        return sharing(self.config.parallel)[1]

    @property
    def zero_stage(self) -> int:
        """The stage of ZeRO that has an effect: none where nothing is cut."""
        return sharing(self.config.parallel)[0]

    @property
    def at(self) -> TensorParallel:
        """This rank's place in tensor parallelism."""
        return tensor_parallel(self.config, self.place.tp)

    def block(self, layer: int, reach: Reach | None = None, micro_batch: int = 0) -> Traffic:
        """One transformer block, forward and backward, of one micro-batch."""
        described = self.architecture.layers[layer]
        exchanges = [self._attention(heads, reach or self._causal_reach, micro_batch)
                     for heads in described.attentions(self.at)]
        return self._collectives(described.collectives(self.at, self.config.train.recompute)) + total(exchanges)

    def _collectives(self, described: Iterable[Collective]) -> Traffic:
        parallel = self.config.parallel
        return traffic.collectives(described, {"tp": parallel.tp, "cp": parallel.cp}, self.tokens, self.element)

    def _attention(self, held: LocalHeads, reach: Reach, micro_batch: int) -> Traffic:
        parallel, recompute = self.config.parallel, self.config.train.recompute
        context, again, split = parallel.context, recompute != "none", self._ulysses
        heads = Heads(self.tokens, held.query, held.kv, held.size, self.element)
        n = parallel.cp // split
        if parallel.cp == 1:
            return Traffic()
        if context.method == "all_gather":
            return traffic.all_gather(heads, n, again=again)
        if context.method == "double_ring":
            inner = context.inner_ring or 1
            return traffic.double_ring(heads, n // inner, inner, again=again)
        around = traffic.ulysses(heads, split, again=recompute) if split > 1 else Traffic()
        if n == 1:
            return around
        inside = heads.exchanged(split) if split > 1 else heads
        return around + traffic.ring(inside, self.place.ring, reach(micro_batch, held.window), again=again)

    @property
    def _ulysses(self) -> int:
        asked = self.config.parallel.context.ulysses
        return 1 if asked == "auto" else int(asked)

    def _causal_reach(self, micro_batch: int, window: int | None) -> Sequence[int]:
        """Where a sample is one document; packed ones may end a key's way earlier."""
        parallel = self.config.parallel
        return traffic.reach(parallel.context.layout, parallel.cp // self._ulysses, self.config.data.seq_length,
                             ulysses=self._ulysses, window=window)

    def embedding(self) -> Traffic:
        """The look-up, forward and backward, of one micro-batch."""
        return self._collectives(self.architecture.embedding().collectives(self.at, self.config.train.recompute))

    def head(self, chunk_tokens: int) -> Traffic:
        """The output layer with its cross-entropy in chunks of so many tokens, of one micro-batch."""
        return self._collectives(self.architecture.head().collectives(
            self.at, self.config.train.recompute, chunks=-(-self.tokens // chunk_tokens)))

    def buckets(self) -> list[Bucket]:
        """The flat gradients of this rank."""
        held = parameters(self.architecture, self.stages.parts(self.place.pp), self.at)
        return buckets(held, self.shares, self.wide, self.zero_stage, self.sizes)

    def sync(self, flat: Sequence[Bucket]) -> Traffic:
        """What is replicated: one all-reduce a group of the elements that lie in this rank's share of the gradients.

        Over tp norms, biases and positions that see a share of the sequence, and q/k norms; over `kv` the K/V heads
        that several tp ranks hold; over `embedding` the tied embedding of first and last stage.
        """
        parallel = self.config.parallel
        shared = (self.place.dp_cp % self.shares, self.shares)
        found: dict[str, int] = {}
        for bucket in flat:
            for group, size in bucket.share(*shared):
                found[group] = found.get(group, 0) + size
        ranks = {"tp": parallel.tp, "kv": max(parallel.tp // self.config.model.kv_heads, 1), "embedding": 2}
        return total(collective(g, "all_reduce", ranks[g], size * self.wide) for g, size in found.items())

    def step(self, *, chunk_tokens: int, reach: Reach | None = None, updated: bool = True) -> Traffic:
        """The whole step.

        Args:
            chunk_tokens: tokens of a chunk of the cross-entropy.
            reach: how far keys travel in each micro-batch, where the mask depends on the data (packed documents).
            updated: whether the optimizer stepped.
        """
        parallel, held, m = self.config.parallel, self.stages.held(self.place.pp), self.micro_batches
        layers = [layer for stage in held for layer in self.stages.layers[stage]]
        if reach is None:
            out = total(self.block(layer) for layer in layers) * m
        else:
            out = total(self.block(layer, reach, i) for i in range(m) for layer in layers)
        if 0 in held:
            out += self.embedding() * m
        if len(self.stages.rank_of) - 1 in held:
            out += self.head(chunk_tokens) * m
        sent = self.activation // (parallel.tp if self.at.sequence_parallel else 1)
        out += traffic.pipeline(sent, self.place.pp, self.stages.rank_of, m)
        flat = self.buckets()
        return (out + self.sync(flat) + traffic.data_parallel(
            [(b.numel, b.gathers) for b in flat], self.sharers, zero_stage=self.zero_stage, shares=self.shares,
            element=self.element, micro_batches=m, updated=updated))
