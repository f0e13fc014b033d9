"""Searches for the zero-bubble table with the smallest bubble, at measured times and under a bound of memory."""

from __future__ import annotations

import heapq
from itertools import product

from megafour.parallel.pipeline.actions import Action, Kind, Placement, ScheduleError, Table
from megafour.parallel.pipeline.check import check, peak_live
from megafour.parallel.pipeline.schedules import build
from megafour.parallel.pipeline.simulate import Times
from megafour.parallel.pipeline.transfers import Order, with_transfers

_F, _I, _W = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


def search(ranks: int, microbatches: int, times: Times, memory: float, virtual_stages: int = 1,
           kept: float = 1.0) -> Table:
    """The table with the smallest bubble, among those that hold at most `memory` micro-batches' activations on a rank.

    With one stage a rank: ZB-H1, ZB-H2, and the tables of a greedy heuristic (after Qi et al. 2023, section 3) under
    each of its settings. With two: the schedules over a V. Every candidate is proved and timed by the checker.

    Args:
        kept: share of a micro-batch's activations that still waits for the weight gradient once the input's is done.
            1 is what fused attention leaves; Qi et al. count 32 / (34 + 5·heads·sequence/hidden), since without it
            most of the memory is probabilities of attention, which no weight gradient needs.
    Raises:
        ScheduleError: no candidate fits the memory.
    """
    names = {1: ("zb_h1", "zb_h2"), 2: ("zb_v", "v_half", "v_min")}.get(virtual_stages)
    if names is None:
        raise ScheduleError(f"the search knows one and two stages a rank, got virtual_stages={virtual_stages}")
    tables = [build(name, ranks, microbatches) for name in names]
    if virtual_stages == 1 and memory >= 1:
        for warmups, patience in product(_warmups(ranks, times, memory), (0.0, 0.25, 0.5, 0.75, 1.0)):
            orders = _Greedy(microbatches, times, warmups, memory, kept, patience).orders()
            tables.append(with_transfers(orders, Placement.looped(ranks), microbatches))
    fitting = [table for table in tables if max(peak_live(table, kept)) <= memory]
    if not fitting:
        least = min(max(peak_live(table, kept)) for table in tables)
        raise ScheduleError(f"no table holds at most {memory:g} micro-batches on a rank; the least is {least:g}")
    return min(fitting, key=lambda table: check(table, times).bubble)


def _warmups(ranks: int, times: Times, memory: float) -> list[list[int]]:
    """Ways to warm up: each the number of forwards that every rank runs before its first gradient.

    As 1F1B does; or as many as fit until that gradient can be there, where the last one is begun only if it delays the
    gradient by no more than a share of T_F: each rank's delay is every earlier rank's, too. Or as memory allows.
    """
    found = [[min(int(memory), ranks - rank) for rank in range(ranks)], [int(memory)] * ranks]
    for share in (0.0, 0.25, 0.5, 0.75):
        counts = [1] * ranks
        arrival = ranks * times.forward + (ranks - 1) * times.transfer    # when the last rank has its first gradient
        for rank in reversed(range(ranks - 1)):
            arrival += times.backward_input + times.transfer
            start = rank * (times.forward + times.transfer)
            room = (arrival - start) / times.forward if times.forward else memory
            counts[rank] = max(1, min(int(room + share), int(memory)))
            arrival = max(arrival, start + counts[rank] * times.forward)
        if counts not in found:
            found.append(counts)
    return found


class _Greedy:
    """Every rank, whenever it is free, takes the gradient that has arrived, else a forward, else a weight gradient.

    `warmups`: the forwards that each rank may run ahead of its first gradient; from then on memory is the bound.
    `patience`: the share of T_W for which a rank rather waits idle for an arrival than begin a weight gradient.
    """

    def __init__(self, microbatches: int, times: Times, warmups: list[int], memory: float, kept: float,
                 patience: float) -> None:
        ranks = len(warmups)
        self._ranks, self._times, self._patience = ranks, times, patience
        self._warmups, self._memory, self._kept = warmups, memory, kept
        self._done = [{_F: 0, _I: 0, _W: 0} for _ in range(ranks)]
        self._free = [0.0] * ranks
        self._arrived: list[dict[Kind, list[float]]] = [{_F: [], _I: []} for _ in range(ranks)]
        self._arrived[0][_F] = [0.0] * microbatches
        self._orders: list[list[Action]] = [[] for _ in range(ranks)]
        self._queue = [(0.0, rank) for rank in range(ranks)]

    def orders(self) -> list[Order]:
        """Each rank's order."""
        while self._queue:
            now, rank = heapq.heappop(self._queue)
            if now < self._free[rank]:    # it took something else meanwhile
                continue
            kind, wait = self._choose(rank, now)
            if kind is not None:
                self._run(rank, kind, now)
            elif wait is not None:
                heapq.heappush(self._queue, (wait, rank))
        return list(self._orders)

    def _choose(self, rank: int, now: float) -> tuple[Kind | None, float | None]:
        """What to run now; or else until when to wait, None where another rank has to move first."""
        done = self._done[rank]
        able = [_I, _F] if self._may_forward(rank) else [_I]
        next_arrival: float | None = None
        for kind in able:
            arrived = self._arrived[rank][kind]
            if done[kind] < len(arrived):
                if arrived[done[kind]] <= now:
                    return kind, None
                next_arrival = min(arrived[done[kind]], next_arrival or arrived[done[kind]])
        if done[_W] < done[_I]:
            if next_arrival is None or next_arrival - now > self._patience * self._times.backward_weight:
                return _W, None
        return None, next_arrival

    def _may_forward(self, rank: int) -> bool:
        """Whether there is room for one more micro-batch's activations."""
        done = self._done[rank]
        if not done[_I] and done[_F] >= self._warmups[rank]:
            return False
        return done[_F] + 1 - done[_I] + self._kept * (done[_I] - done[_W]) <= self._memory

    def _run(self, rank: int, kind: Kind, now: float) -> None:
        action = Action(kind, self._done[rank][kind])
        self._orders[rank].append(action)
        self._done[rank][kind] += 1
        end = self._free[rank] = now + self._times.of(action)
        heapq.heappush(self._queue, (end, rank))
        last = rank == self._ranks - 1
        target = rank if kind is _F and last else rank + 1 if kind is _F else rank - 1
        if kind is not _W and target >= 0:
            arrival = end if target == rank else end + self._times.transfer
            self._arrived[target][_I if kind is _I or last else _F].append(arrival)
            heapq.heappush(self._queue, (max(arrival, self._free[target]), target))
