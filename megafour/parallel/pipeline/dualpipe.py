"""DualPipe-V: two stages a rank in a V, a forward of one micro-batch and a backward of another in turn."""

from __future__ import annotations

from megafour.parallel.pipeline.actions import Action, Kind, Placement, Table
from megafour.parallel.pipeline.classic import only, require
from megafour.parallel.pipeline.transfers import with_transfers


def dualpipe_v(stages: int, microbatches: int, virtual_stages: int = 2) -> Table:
    """DualPipe cut in half (DeepSeek-AI 2024; the V after Qi et al. 2025): p + 1 micro-batches live, no second copy of
    the weights.

    In the middle each rank runs the forward of one stage and the backward of the other in turn, on two micro-batches:
    what one has made travels while the other computes. The original runs the two at once, for the sake of the
    collectives inside of them; on one stream a `Pair` of them would hide nothing, but wait for both inputs and keep
    back the first result. The pattern needs 2p micro-batches to unfold; with fewer it is run without those that are
    missing.
    """
    require("dualpipe_v", stages, microbatches, virtual_stages, chunks=2)
    whole = max(microbatches, 2 * stages)
    orders = [_Rank(rank, stages, whole).order() for rank in range(stages)]
    return with_transfers(only(orders, microbatches), Placement.vee(stages), microbatches)


class _Rank:
    """Writes down one rank's order; counts how far each (kind, chunk) has come."""

    def __init__(self, rank: int, ranks: int, microbatches: int) -> None:
        self._rank, self._ranks, self._microbatches = rank, ranks, microbatches
        self._next: dict[tuple[str, int], int] = {}
        self._weights: list[Action] = []
        self._order: list[Action] = []

    def order(self) -> list[Action]:
        """The eight phases of the original, in its order."""
        rank, after = self._rank, self._ranks - self._rank - 1
        for _ in range(2 * after):
            self._add(self._forward(0))
        for _ in range(rank + 1):
            self._add(self._forward(0), self._forward(1))
        for _ in range(after):
            self._add(self._backward(1, split=True))
            self._add(self._weights.pop(0), self._forward(1))
        for _ in range(self._microbatches - 2 * self._ranks + rank + 1):
            self._add(self._forward(0), self._backward(1), self._forward(1), self._backward(0))
        for _ in range(after):
            self._add(self._backward(1), self._forward(1), self._backward(0))
        self._end(rank + 1)
        for _ in range(after):
            self._add(self._weights.pop(0), self._backward(0, split=True))
        return self._order + self._weights

    def _end(self, turns: int) -> None:
        """The last backwards of both stages; from the half on their weight gradients wait, to fill the bubble."""
        for half in range(2 * turns):
            self._add(self._backward(1 - half % 2, split=half >= turns))

    def _add(self, *actions: Action) -> None:
        self._order.extend(actions)

    def _take(self, what: str, chunk: int) -> int:
        """The next micro-batch of this kind on this chunk."""
        self._next[what, chunk] = self._next.get((what, chunk), -1) + 1
        return self._next[what, chunk]

    def _forward(self, chunk: int) -> Action:
        return Action(Kind.FORWARD, self._take("forward", chunk), chunk)

    def _backward(self, chunk: int, *, split: bool = False) -> Action:
        microbatch = self._take("backward", chunk)
        if split:
            self._weights.append(Action(Kind.BACKWARD_WEIGHT, microbatch, chunk))
        return Action(Kind.BACKWARD_INPUT if split else Kind.BACKWARD, microbatch, chunk)
