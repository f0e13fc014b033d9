"""Which layers go to which stage: the split whose dearest stage is cheapest, or explicit counts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from megafour.cost.flops import Flops, model_flops
from megafour.parallel.pipeline.actions import Placement

Span = tuple[int, int]
"""(first layer, number of layers) of one stage."""


def partition(model: Any, seq_length: int, stages: int, *, counts: Sequence[int] | None = None,
              vocab_size: int | None = None, recompute: str = "none") -> list[Span]:
    """Layers of `model` to `stages` stages, first to last; every stage gets at least one and every layer a stage.

    `counts` gives the layers of each stage; without it the split is balanced by FLOPs, the embedding's lookup counted
    on the first stage and the head on the last, recomputed forwards (`recompute`: none, selective, full) in the
    layers. Every rank computes the same answer. Raises ValueError where layers and stages do not fit.
    """
    if counts is not None:
        return explicit(counts, model.num_layers, stages)
    if stages == 1:
        return [(0, model.num_layers)]  # holds before the vocabulary's size is known, too
    flops = model_flops(model, seq_length, vocab_size)
    return balanced(layer_costs(flops, recompute), stages, flops.embedding, flops.head)


def partition_layers(config: Any, placement: Placement, vocab_size: int | None = None) -> list[Span]:
    """`partition` as the whole configuration asks for it; `vocab_size` where the model's own is still `auto`."""
    asked = config.parallel.pipeline.partition
    return partition(config.model, config.data.seq_length, placement.stages, counts=None if asked == "auto" else asked,
                     vocab_size=vocab_size, recompute=config.train.recompute)


def layer_costs(flops: Flops, recompute: str = "none") -> list[int]:
    """FLOPs a token that each layer really costs: its own, and a third of what the backward computes again."""
    again = {"none": [0] * flops.num_layers, "selective": flops.attention, "full": flops.layers}[recompute]
    return [own + more // 3 for own, more in zip(flops.layers, again, strict=True)]


def explicit(counts: Sequence[int], num_layers: int, stages: int) -> list[Span]:
    """The spans of explicit per-stage layer counts; ValueError shows the equation that fails."""
    if len(counts) != stages:
        raise ValueError(f"partition has {len(counts)} counts for {stages} stages: {list(counts)}")
    if any(count < 1 for count in counts):
        raise ValueError(f"partition leaves a stage without layers: {list(counts)}")
    if sum(counts) != num_layers:
        raise ValueError(f"partition {' + '.join(map(str, counts))} = {sum(counts)} is not num_layers = {num_layers}")
    starts = [0, *accumulate(counts)]
    return [(start, count) for start, count in zip(starts, counts, strict=False)]


def balanced(layer_costs: Sequence[int], stages: int, first: int = 0, last: int = 0) -> list[Span]:
    """The contiguous split with the smallest maximum stage cost, exact, by dynamic programming.

    `first` and `last` are added to the first and last stage. Among the optimal splits the most even one is taken
    (least sum of squares: a stage below the maximum still costs memory), and among those the one with fewer layers on
    earlier stages, which hold more micro-batches. Costs are whole numbers, so that no rounding can tip a tie.
    """
    layers = len(layer_costs)
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers cannot fill {stages} stages with at least one each")
    prefix = [0, *accumulate(layer_costs)]

    def cost(stage: int, begin: int, end: int) -> int:
        return prefix[end] - prefix[begin] + (first if stage == 0 else 0) + (last if stage == stages - 1 else 0)

    smallest = _dearest(layers, stages, cost)
    # best[k][i]: (sum of squares, cut) of the layers from i on over the stages from k on, no stage above `smallest`.
    best: list[dict[int, tuple[int, int]]] = [{} for _ in range(stages)] + [{layers: (0, layers)}]
    for stage in reversed(range(stages)):
        for begin in range(stage, layers):
            options = [(cost(stage, begin, end) ** 2 + best[stage + 1][end][0], end)
                       for end in range(begin + 1, layers + 1)
                       if end in best[stage + 1] and cost(stage, begin, end) <= smallest]
            if options:
                best[stage][begin] = min(options)
    spans, begin = [], 0
    for stage in range(stages):
        end = best[stage][begin][1]
        spans.append((begin, end - begin))
        begin = end
    return spans


def _dearest(layers: int, stages: int, cost: Any) -> int:
    """The smallest possible cost of the dearest stage; `cost(stage, begin, end)` prices layers [begin, end)."""
    reach = {end: cost(0, 0, end) for end in range(1, layers + 1)}
    for stage in range(1, stages):
        reach = {end: min(max(reach[begin], cost(stage, begin, end)) for begin in range(stage, end))
                 for end in range(stage + 1, layers + 1)}
    return reach[layers]
