"""Pipeline schedules: pure functions from (stages, micro-batches, virtual stages) to a table of every rank's steps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache

from megafour.parallel.pipeline.actions import (
    Action,
    Kind,
    Message,
    Placement,
    ScheduleError,
    Step,
    Table,
    Transfer,
)

Order = Sequence[Action]
"""One rank's compute actions, in the order in which it runs them."""
Schedule = Callable[[int, int, int], Table]

_UNITS = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.BACKWARD_INPUT: 1, Kind.BACKWARD_WEIGHT: 1}


def gpipe(stages: int, microbatches: int, virtual_stages: int = 1) -> Table:
    """All forwards, then all backwards (Huang et al. 2019); every micro-batch's activations are live at once."""
    _require_plain("gpipe", stages, microbatches, virtual_stages)
    order = [Action(kind, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for m in range(microbatches)]
    return with_transfers([order] * stages, Placement.looped(stages), microbatches)


def one_forward_one_backward(stages: int, microbatches: int, virtual_stages: int = 1) -> Table:
    """1F1B (Narayanan et al. 2019): after its warm-up a rank alternates; stage s holds at most p−s micro-batches."""
    _require_plain("1f1b", stages, microbatches, virtual_stages)
    orders = []
    for stage in range(stages):
        warmup = min(stages - 1 - stage, microbatches)
        order = [Action(Kind.FORWARD, m) for m in range(warmup)]
        for m in range(warmup, microbatches):
            order += [Action(Kind.FORWARD, m), Action(Kind.BACKWARD, m - warmup)]
        order += [Action(Kind.BACKWARD, m) for m in range(microbatches - warmup, microbatches)]
        orders.append(order)
    return with_transfers(orders, Placement.looped(stages), microbatches)


SCHEDULES: dict[str, Schedule] = {"gpipe": gpipe, "1f1b": one_forward_one_backward}
"""Every schedule by the name that the config uses."""


@lru_cache(maxsize=8)  # a table is immutable, and every step asks for the same one
def build(name: str, stages: int, microbatches: int, virtual_stages: int | None = None) -> Table:
    """The table of the schedule called `name`; `virtual_stages` None means the schedule's own default (1)."""
    if name not in SCHEDULES:
        raise ScheduleError(f"unknown pipeline schedule {name!r}; known: {', '.join(sorted(SCHEDULES))}")
    return SCHEDULES[name](stages, microbatches, 1 if virtual_stages is None else virtual_stages)


@lru_cache(maxsize=8)
def forward_only(placement: Placement, microbatches: int) -> Table:
    """The table of an evaluation: every micro-batch through every stage, no backward."""
    orders = [[Action(Kind.FORWARD, m, chunk) for chunk in range(len(stages)) for m in range(microbatches)]
              for stages in placement.stages_of]
    return with_transfers(orders, placement, microbatches)


def _require_plain(name: str, stages: int, microbatches: int, virtual_stages: int) -> None:
    if stages < 1 or microbatches < 1:
        raise ScheduleError(f"{name} needs at least one stage and one micro-batch, got {stages} and {microbatches}")
    if virtual_stages != 1:
        raise ScheduleError(f"{name} has one stage a rank, got virtual_stages={virtual_stages}")


def with_transfers(orders: Sequence[Order], placement: Placement, microbatches: int) -> Table:
    """Add to each rank's pure compute order the transfers that it needs: all that a new schedule has to give is orders.

    The orders are run through on paper, in units of F = I = W = 1. A send goes into the first batch after its
    producer. Its receive goes where the receiver stands at that moment: if it is in the middle of a compute, the
    receive is posted before that compute, so that the tensor travels under it; if it stands between two, there. So
    every rank posts its transfers in the order of one common clock, and transfers of one instant share a batch: two
    ranks that exchange tensors can never each wait for the other's send, although batches are served one by one.
    Raises ScheduleError when the orders wait for each other or for something that no rank makes.
    """
    spans = _spans(orders, placement)
    before: list[list[tuple[list[Transfer], list[Transfer]]]] = [[([], []) for _ in range(len(o) + 1)] for o in orders]
    during: list[list[list[Transfer]]] = [[[] for _ in range(len(o) + 1)] for o in orders]
    for _, sender, index, message in _productions(orders, placement, spans):
        ready, receiver = spans[sender][index][1], placement.receiver(message)
        if receiver == sender:
            continue  # two neighbouring stages on one rank: handed over in memory
        before[sender][index + 1][0].append(Transfer(message, receiver))
        slot = bisect_left(spans[receiver], (ready, ready))  # the receiver's first compute that starts at or after it
        if slot > 0 and spans[receiver][slot - 1][1] > ready:
            during[receiver][slot - 1].append(Transfer(message, sender))
        else:
            before[receiver][slot][1].append(Transfer(message, sender))
    steps = []
    for rank, order in enumerate(orders):
        lines: list[Step] = []
        for index, action in enumerate(order):
            source = placement.source(action.kind, action.microbatch, placement.stages_of[rank][action.chunk])
            lines += _lines(action, source, *before[rank][index], during[rank][index])
        sends, recvs = before[rank][-1]
        steps.append((*lines, Step(None, tuple(sends), tuple(recvs))) if sends or recvs else tuple(lines))
    return Table(placement, microbatches, tuple(steps))


def _lines(action: Action, source: Message | None, sends: list[Transfer], recvs: list[Transfer],
           early: list[Transfer]) -> list[Step]:
    """The steps of one action. What arrives only during it must not share a batch with what it has to await."""
    if early and any(transfer.message == source for transfer in recvs):
        return [Step(None, tuple(sends), tuple(recvs)), Step(action, (), tuple(early))]
    return [Step(action, tuple(sends), (*recvs, *early))]


def _productions(orders: Sequence[Order], placement: Placement,
                 spans: list[list[tuple[int, int]]]) -> list[tuple[int, int, int, Message]]:
    """Every message as (moment it is ready, rank, index in that rank's order, message), in order of time."""
    made = []
    for rank, order in enumerate(orders):
        for index, action in enumerate(order):
            stage = placement.stages_of[rank][action.chunk]
            message = placement.product(action.kind, action.microbatch, stage)
            if message is not None:
                made.append((spans[rank][index][1], rank, index, message))
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
                action = order[len(spans[rank])]
                stage = placement.stages_of[rank][action.chunk]
                source = placement.source(action.kind, action.microbatch, stage)
                if source is not None and source not in ready:
                    break
                free = spans[rank][-1][1] if spans[rank] else 0
                start = max(free, ready[source]) if source is not None else free
                end = start + _UNITS[action.kind]
                spans[rank].append((start, end))
                product = placement.product(action.kind, action.microbatch, stage)
                if product is not None:
                    ready[product] = end
                moved = True
    for rank, order in enumerate(orders):
        if len(spans[rank]) < len(order):
            action = order[len(spans[rank])]
            stage = placement.stages_of[rank][action.chunk]
            source = placement.source(action.kind, action.microbatch, stage)
            raise ScheduleError(f"rank {rank}: {action} waits for ever for the {source}")
    return spans
