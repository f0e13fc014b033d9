"""Zero-bubble schedules over a V of two stages a rank: ZB-V, V-Half and V-Min."""

from __future__ import annotations

from megafour.parallel.pipeline.actions import Action, Kind, Placement, Table
from megafour.parallel.pipeline.classic import only, require
from megafour.parallel.pipeline.transfers import Order, with_transfers

_F, _I, _W = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


def zb_v(stages: int, microbatches: int, virtual_stages: int = 2) -> Table:
    """ZB-V (Qi et al. 2023, section 6): the memory of 1F1B, and no bubble at T_F = T_B = T_W.

    The pattern unfolds with 2p−1 micro-batches; with fewer it is run without those that are missing.
    """
    require("zb_v", stages, microbatches, virtual_stages, chunks=2)
    whole = max(microbatches, 2 * stages - 1)
    orders = [_zb_v_order(rank, stages, whole) for rank in range(stages)]
    return with_transfers(only(orders, microbatches), Placement.vee(stages), microbatches)


def _zb_v_order(rank: int, ranks: int, microbatches: int) -> Order:
    """One rank's order: forwards until the first gradient, a steady round of all six actions, gradients to the end."""
    todo = {(kind, chunk): iter([Action(kind, m, chunk) for m in range(microbatches)]) for kind in (_F, _I, _W)
            for chunk in (0, 1)}
    order: list[Action] = []

    def add(*what: tuple[Kind, int]) -> None:
        order.extend(action for each in what for action in (next(todo[each], None),) if action is not None)

    for _ in range(2 * (ranks - rank) - 1):
        add((_F, 0))
    for _ in range(rank):
        add((_F, 1), (_F, 0))
    for _ in range(ranks - rank):
        add((_F, 1), (_I, 1), (_W, 1))
    # The first stage has run 2p−1−rank forwards, the second p: what is left of the second is the number of rounds.
    for _ in range(microbatches - ranks):
        add((_F, 0), (_I, 0), (_W, 0), (_F, 1), (_I, 1), (_W, 1))
    for _ in range(rank):
        add((_I, 0), (_I, 1))
    for _ in range(ranks - rank):
        add((_I, 0), (_W, 0))
    for chunk in (1, 0):
        order.extend(todo[_W, chunk])
    return order


def v_half(stages: int, microbatches: int, virtual_stages: int = 2) -> Table:
    """V-Half (Qi et al. 2025, "Pipeline parallelism with controllable memory"): half of 1F1B's memory, (p+2)//2."""
    require("v_half", stages, microbatches, virtual_stages, chunks=2)
    turns = (1, 4, 2) if stages % 2 == 0 else (1, 1, 2)
    return _repeated(stages, microbatches, (2, 1, 2, 1), turns)


def v_min(stages: int, microbatches: int, virtual_stages: int = 2) -> Table:
    """V-Min (Qi et al. 2025): a third of 1F1B's memory, (p+4)//3; a bubble each round where T_F, T_B, T_W differ."""
    require("v_min", stages, microbatches, virtual_stages, chunks=2)
    turns = (1, 3, 1) if stages % 3 == 0 else (1, 1, 1)
    return _repeated(stages, microbatches, (1, 1, 1, 1), turns)


def _repeated(stages: int, microbatches: int, hops: tuple[int, int, int, int], turns: tuple[int, int, int]) -> Table:
    """One micro-batch's way down the V and back, repeated every six units: the six actions of a rank fill a round.

    `hops`: units from one rank to the next, for forward down, forward up, backward down, backward up. `turns`: units
    from the last action of a leg to the first of the next. They are such that on no rank two actions fall into one
    unit of a round, and the time between a forward and its weight gradient, which is memory, is what the schedule
    promises. Only the order on each rank is kept: a rank runs its next action as soon as it can.
    """
    orders = []
    for rank in range(stages):
        below, last = stages - 1 - rank, stages - 1
        down = hops[0] * rank
        up = hops[0] * last + turns[0] + hops[1] * below
        back = hops[0] * last + turns[0] + hops[1] * last + turns[1] + hops[2] * rank
        home = hops[0] * last + turns[0] + hops[1] * last + turns[1] + hops[2] * last + turns[2] + hops[3] * below
        slots = {(_F, 0): down, (_F, 1): up, (_I, 1): back, (_I, 0): home}
        slots |= _weight_slots(back, home, {slot % _ROUND for slot in slots.values()})
        timed = {slot + _ROUND * m: Action(kind, m, chunk) for (kind, chunk), slot in slots.items()
                 for m in range(microbatches)}
        orders.append([timed[slot] for slot in sorted(timed)])
    return with_transfers(orders, Placement.vee(stages), microbatches)


_ROUND = 6
"""F, B and W of two stages, one unit each."""


def _weight_slots(back: int, home: int, taken: set[int]) -> dict[tuple[Kind, int], int]:
    """The two units of a round that are left, for the weight gradients: so that they wait as little as possible."""
    one, other = (unit for unit in range(_ROUND) if unit not in taken)

    def waits(first: int, second: int) -> tuple[int, int]:
        return (first - back - 1) % _ROUND, (second - home - 1) % _ROUND

    wait_back, wait_home = min(waits(one, other), waits(other, one), key=sum)
    return {(_W, 1): back + 1 + wait_back, (_W, 0): home + 1 + wait_home}
