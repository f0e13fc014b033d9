"""From each rank's order of compute to a whole table: where every send and every receive is posted."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from megafour.parallel.pipeline.actions import (
    Kind,
    Message,
    Placement,
    ScheduleError,
    Step,
    Table,
    Transfer,
    Work,
)

Order = Sequence[Work]
"""One rank's compute, in the order in which it runs it."""

UNITS = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.BACKWARD_INPUT: 1, Kind.BACKWARD_WEIGHT: 1}
"""Durations on paper: T_F = T_B = T_W."""


def with_transfers(orders: Sequence[Order], placement: Placement, microbatches: int) -> Table:
    """Add to each rank's pure compute order the transfers that it needs: all that a new schedule has to give is orders.

    The orders are run through on paper, in units of F = I = W = 1. A send is posted right after its producer. Its
    receive is posted ahead of the compute that the receiver is about to finish, or is in the middle of, at that
    moment: so the tensor travels at once and under compute, also where real durations differ from those on paper, and
    every two ranks post their transfers in the same order. Raises ScheduleError when the orders wait for each other or
    for something that no rank makes.
    """
    spans = _spans(orders, placement)
    ends = [[end for _, end in row] for row in spans]
    sends: list[list[list[Transfer]]] = [[[] for _ in range(len(order) + 1)] for order in orders]
    recvs: list[list[list[Transfer]]] = [[[] for _ in range(len(order) + 1)] for order in orders]
    for ready, sender, index, message in _productions(orders, placement, spans):
        receiver = placement.receiver(message)
        if receiver == sender:
            continue  # two neighbouring stages on one rank: handed over in memory
        sends[sender][index + 1].append(Transfer(message, receiver))
        recvs[receiver][bisect_left(ends[receiver], ready)].append(Transfer(message, sender))
    steps = []
    for rank, order in enumerate(orders):
        row = [Step(work, tuple(sends[rank][index]), tuple(recvs[rank][index])) for index, work in enumerate(order)]
        last = Step(None, tuple(sends[rank][-1]), tuple(recvs[rank][-1]))
        steps.append((*row, last) if last.sends or last.recvs else tuple(row))
    return Table(placement, microbatches, tuple(steps))


def sources_of(work: Work, rank: int, placement: Placement) -> list[Message]:
    """What the work needs from other stages."""
    needed = (placement.source(a.kind, a.microbatch, placement.stages_of[rank][a.chunk]) for a in work.parts)
    return [message for message in needed if message is not None]


def _products(work: Work, rank: int, placement: Placement) -> list[Message]:
    """What other stages wait for from the work."""
    made = (placement.product(a.kind, a.microbatch, placement.stages_of[rank][a.chunk]) for a in work.parts)
    return [message for message in made if message is not None]


def _productions(orders: Sequence[Order], placement: Placement,
                 spans: list[list[tuple[int, int]]]) -> list[tuple[int, int, int, Message]]:
    """Every message as (moment it is ready, rank, index in that rank's order, message), in order of time."""
    made = [(spans[rank][index][1], rank, index, message)
            for rank, order in enumerate(orders) for index, work in enumerate(order)
            for message in _products(work, rank, placement)]
    return sorted(made, key=lambda entry: entry[:3])


def _spans(orders: Sequence[Order], placement: Placement) -> list[list[tuple[int, int]]]:
    """(start, end) of each action, run as soon as its input exists and its rank is free; sends take no time."""
    ready: dict[Message, int] = {}
    spans: list[list[tuple[int, int]]] = [[] for _ in orders]
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while len(spans[rank]) < len(order):
                work = order[len(spans[rank])]
                sources = sources_of(work, rank, placement)
                if any(source not in ready for source in sources):
                    break
                start = max([spans[rank][-1][1] if spans[rank] else 0, *(ready[source] for source in sources)])
                end = start + sum(UNITS[action.kind] for action in work.parts)
                spans[rank].append((start, end))
                ready.update((product, end) for product in _products(work, rank, placement))
                moved = True
    for rank, order in enumerate(orders):
        if len(spans[rank]) < len(order):
            work = order[len(spans[rank])]
            source = next(source for source in sources_of(work, rank, placement) if source not in ready)
            raise ScheduleError(f"rank {rank}: {work} waits for ever for the {source}")
    return spans
