"""The cut of layers into stages whose dearest rank is cheapest: in compute first, then in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from megafour.parallel.pipeline.actions import Placement


@dataclass(frozen=True)
class Loads:
    """What layers, embedding and head cost; in whole numbers, so that no rounding can tip a tie."""

    layers: Sequence[int]
    """Compute of each layer."""
    first: int = 0
    """Compute that the first stage has besides its layers: the embedding."""
    last: int = 0
    """Compute that the last stage has besides its layers: the head."""
    memory: Sequence[Sequence[int]] = ()
    """Per rank, what each layer takes there: weights, optimizer, and the activations that the schedule keeps alive; the
    later ranks of 1F1B keep fewer. Empty: memory is no matter."""
    first_memory: int = 0
    """Of the embedding."""
    last_memory: int = 0
    """Of the head."""


def balance(loads: Loads, placement: Placement) -> list[int]:
    """Layers of each stage, first to last, at least one each. The cut is the best by, in this order:

    1. the compute of the dearest *rank*, all its stages together: a step cannot take less than a rank's work;
    2. the compute of the dearest stage, where ranks hold several: what the ranks beside it wait for;
    3. the memory of the fullest rank;
    4. evenness (least sum of squares over stages).

    Exact with one stage a rank, by dynamic programming, and with layers that cost the same (the first three by
    bisection, the last one greedily). With several stages a rank and layers that differ it is a descent that moves one
    layer from any stage to any other. Raises ValueError where there are fewer layers than stages.
    """
    if not 1 <= placement.stages <= len(loads.layers):
        raise ValueError(f"{len(loads.layers)} layers cannot fill {placement.stages} stages with at least one each")
    if placement.stages == placement.ranks:
        return _by_programming(_Costs(loads, placement))
    return _descend(_Costs(loads, placement), _alike(loads, placement))


class _Costs:
    """What a cut costs; a stage is priced by its first layer and the one after its last."""

    def __init__(self, loads: Loads, placement: Placement) -> None:
        self.loads, self.placement = loads, placement
        self.count, self.stages = len(loads.layers), placement.stages
        self._prefix = [0, *accumulate(loads.layers)]
        self._memory = [[0, *accumulate(row)] for row in loads.memory]

    def compute(self, stage: int, begin: int, end: int) -> int:
        """Of one stage."""
        return self._prefix[end] - self._prefix[begin] + _ends(stage, self.stages, self.loads.first, self.loads.last)

    def memory(self, stage: int, begin: int, end: int) -> int:
        """Of one stage."""
        if not self.loads.memory:
            return 0
        ends = _ends(stage, self.stages, self.loads.first_memory, self.loads.last_memory)
        prefix = self._memory[self.placement.rank_of[stage]]
        return prefix[end] - prefix[begin] + ends

    def of(self, counts: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        """The compute of every rank and of every stage, and the memory of every rank."""
        edges = [0, *accumulate(counts)]
        stages = [self.compute(i, edges[i], edges[i + 1]) for i in range(self.stages)]
        memory = [self.memory(i, edges[i], edges[i + 1]) for i in range(self.stages)]
        held = self.placement.stages_of
        return [sum(stages[i] for i in row) for row in held], stages, [sum(memory[i] for i in row) for row in held]


def _ends(stage: int, stages: int, first: int, last: int) -> int:
    return (first if stage == 0 else 0) + (last if stage == stages - 1 else 0)


def _by_programming(costs: _Costs) -> list[int]:
    """One stage a rank: the smallest maximum of compute, of memory under it, of squares under both.

    Among equals the one with fewer layers on earlier stages.
    """
    layers, stages = costs.count, costs.stages
    compute = _smallest_maximum(layers, stages, costs.compute, lambda *span: True)

    def cheap(*span: int) -> bool:
        return costs.compute(*span) <= compute

    memory = _smallest_maximum(layers, stages, costs.memory, cheap)
    # best[k][i]: (sum of squares, cut) of the layers from i on over the stages from k on.
    best: list[dict[int, tuple[int, int]]] = [{} for _ in range(stages)] + [{layers: (0, layers)}]
    for stage in reversed(range(stages)):
        for begin in range(stage, layers):
            options = [(costs.compute(stage, begin, end) ** 2 + best[stage + 1][end][0], end)
                       for end in range(begin + 1, layers + 1) if end in best[stage + 1]
                       and cheap(stage, begin, end) and costs.memory(stage, begin, end) <= memory]
            if options:
                best[stage][begin] = min(options)
    cuts = [0]
    for stage in range(stages):
        cuts.append(best[stage][cuts[-1]][1])
    return [end - begin for begin, end in zip(cuts, cuts[1:], strict=False)]


def _smallest_maximum(layers: int, stages: int, cost: Callable[..., int], allowed: Callable[..., bool]) -> int:
    """The smallest possible cost of the dearest stage, of the cuts whose stages are all `allowed`."""
    reach = {0: 0}
    for stage in range(stages):
        after: dict[int, int] = {}
        for begin, dearest in reach.items():
            for end in range(begin + 1, layers + 1):
                if allowed(stage, begin, end):
                    here = max(dearest, cost(stage, begin, end))
                    after[end] = min(here, after.get(end, here))
        reach = after
    return reach[layers]


def _alike(loads: Loads, placement: Placement) -> list[int]:
    """The counts for layers that all cost their mean: only how many a stage has matters then, not which."""
    layer, held = _mean(loads.layers), placement.stages_of
    kept = [_mean(row) for row in loads.memory]
    extra = [_ends(i, placement.stages, loads.first, loads.last) for i in range(placement.stages)]
    heavy = [_ends(i, placement.stages, loads.first_memory, loads.last_memory) for i in range(placement.stages)]
    most = len(loads.layers)
    of_rank, of_stage = [most] * placement.ranks, [most] * placement.stages    # so many at most

    def fits(rank: Sequence[int], stage: Sequence[int]) -> bool:
        room = [min(rank[r], sum(stage[i] for i in row)) for r, row in enumerate(held)]
        return (min(stage) >= 1 and all(room[r] >= len(row) for r, row in enumerate(held)) and sum(room) >= most)

    def compute(limit: int) -> list[int]:
        return [(limit - sum(extra[i] for i in row)) // layer for row in held]

    def dearest(limit: int) -> list[int]:
        return [(limit - more) // layer for more in extra]

    def memory(limit: int) -> list[int]:
        return [min(of_rank[r], (limit - sum(heavy[i] for i in row)) // kept[r])
                for r, row in enumerate(held)]

    of_rank = compute(_least(lambda limit: fits(compute(limit), of_stage)))
    of_stage = dearest(_least(lambda limit: fits(of_rank, dearest(limit))))
    if loads.memory:
        of_rank = memory(_least(lambda limit: fits(memory(limit), of_stage)))
    return _fill(placement, most, of_rank, of_stage, lambda stage, count: count * layer + extra[stage])


def _mean(layers: Sequence[int]) -> int:
    return max(1, sum(layers) // len(layers))


def _least(enough: Callable[[int], bool]) -> int:
    """The smallest whole number that is enough."""
    high = 1
    while not enough(high):
        high *= 2
    low = high // 2
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _fill(placement: Placement, layers: int, of_rank: Sequence[int], of_stage: Sequence[int],
          cost: Callable[[int, int], int]) -> list[int]:
    """One layer after another to the rank, and there to the stage, with least to do that has room; else the later."""
    counts, held = [1] * placement.stages, placement.stages_of
    for _ in range(layers - placement.stages):
        free = [r for r, row in enumerate(held) if sum(counts[i] for i in row) < of_rank[r]
                and any(counts[i] < of_stage[i] for i in row)]
        rank = min(free, key=lambda r: (sum(cost(i, counts[i]) for i in held[r]), -r))
        stage = min((i for i in held[rank] if counts[i] < of_stage[i]), key=lambda i: (cost(i, counts[i]), -i))
        counts[stage] += 1
    return counts


def _descend(costs: _Costs, counts: list[int]) -> list[int]:
    """Move single layers between stages while that helps; first for all ranks' compute, so that of two dearest ranks
    one after the other can be relieved."""
    def even(counts: Sequence[int]) -> Any:
        return sorted(costs.of(counts)[0], reverse=True)

    def wanted(counts: Sequence[int]) -> Any:
        ranks, stages, memory = costs.of(counts)
        return max(ranks), max(stages), max(memory), sum(stage * stage for stage in stages)

    best = counts
    if len(set(costs.loads.layers)) > 1:
        best = min(_descended(counts, even), counts, key=wanted)
    return _descended(best, wanted)


def _descended(counts: list[int], key: Callable[[Sequence[int]], Any]) -> list[int]:
    while True:
        moved = []
        for source in range(len(counts)):
            for target in range(len(counts)):
                if source != target and counts[source] > 1:
                    other = list(counts)
                    other[source] -= 1
                    other[target] += 1
                    moved.append((key(other), other))
        if not moved or min(moved)[0] >= key(counts):
            return counts
        counts = min(moved)[1]
