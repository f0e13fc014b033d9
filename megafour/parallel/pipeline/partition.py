"""Which layers go to which stage: the cut that balances the ranks' work and then their memory, or explicit counts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from megafour.architecture.model import Architecture, Part
from megafour.architecture.sublayer import Flops
from megafour.cost.flops import ModelFlops, model_flops
from megafour.cost.memory import ELEMENT, activation_bytes, sharing, state_bytes
from megafour.cost.parameters import parameters, tensor_parallel
from megafour.parallel.pipeline.balance import Loads, balance
from megafour.parallel.pipeline.check import peak_live
from megafour.parallel.pipeline.select import Pipeline, micro_batches

Span = tuple[int, int]
"""(first layer, number of layers) of one stage."""


def partition_layers(config: Any, pipeline: Pipeline, vocab_size: int | None = None) -> list[Span]:
    """The layers of each stage of a resolved configuration, first to last, at least one each.

    Explicit counts are taken as they are. Else `balance` cuts: by FLOPs first, with the embedding's look-up on the
    first stage, the head on the last, and what recomputation does again; then by memory (`loads`). Every rank computes
    the same answer, from the configuration alone. `vocab_size`: where the model's own is still `auto`. Raises
    ValueError where layers and stages do not fit.
    """
    model, placement, asked = config.model, pipeline.placement, config.parallel.pipeline.partition
    if asked != "auto":
        return explicit(asked, model.num_layers, placement.stages)
    if placement.stages == 1:
        return [(0, model.num_layers)]  # holds before the vocabulary's size is known, too
    vocabulary = int(model.vocab_size) if vocab_size is None else vocab_size
    return _spans(balance(loads(config, pipeline, vocabulary), placement))


def explicit(counts: Sequence[int], num_layers: int, stages: int) -> list[Span]:
    """The spans of explicit per-stage layer counts; ValueError shows the equation that fails."""
    if len(counts) != stages:
        raise ValueError(f"partition has {len(counts)} counts for {stages} stages: {list(counts)}")
    if any(count < 1 for count in counts):
        raise ValueError(f"partition leaves a stage without layers: {list(counts)}")
    if sum(counts) != num_layers:
        raise ValueError(f"partition {' + '.join(map(str, counts))} = {sum(counts)} is not num_layers = {num_layers}")
    return _spans(counts)


def _spans(counts: Sequence[int]) -> list[Span]:
    return list(zip([0, *accumulate(counts)], counts, strict=False))


def loads(config: Any, pipeline: Pipeline, vocab_size: int) -> Loads:
    """What the cut has to balance.

    Compute in FLOPs a token. Memory in bytes: weights, gradients and optimizer of what a stage holds, and for each
    micro-batch that the schedule keeps alive on a rank, what its layers save for their backward.
    """
    model = Architecture(config.model, vocab_size)
    flops, at = model_flops(model, config.data.seq_length), tensor_parallel(config)
    first, last = Part(range(0), True, False), Part(range(0), False, True)
    ends = pipeline.placement.rank_of[0] == pipeline.placement.rank_of[-1]

    moments = 2 if config.optimizer.name == "adamw" else 0
    zero_stage, shares = sharing(config.parallel)

    def held(*parts: Part) -> int:
        elements = sum(p.numel for p in parameters(model, parts, at))
        return state_bytes(elements, zero_stage=zero_stage, shares=shares, element=ELEMENT[config.train.precision],
                           moments=moments).total

    states = [held(Part(range(layer.index, layer.index + 1), False, False)) for layer in model.layers]
    saved = [activation_bytes(config, layer) for layer in model.layers]
    live = peak_live(pipeline.table(max(1, micro_batches(config))))
    return Loads(
        layers=layer_costs(flops, config.train.recompute), first=flops.embedding, last=flops.head,
        memory=[[state + round(count * kept) for state, kept in zip(states, saved, strict=True)] for count in live],
        first_memory=held(first),
        last_memory=held(first, last) - held(first) if ends else held(last))    # a tied embedding on one rank is one


def layer_costs(flops: ModelFlops, recompute: str = "none") -> list[int]:
    """FLOPs a token that each layer really costs: its own, and a third of what the backward computes again."""
    def again(layer: Flops) -> int:
        return {"none": 0, "selective": layer.pairs, "full": layer.total}[recompute]

    return [layer.total + again(layer) // 3 for layer in flops.layers]
