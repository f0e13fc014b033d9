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


def search(ranks: int, microbatches: int, times: Times, memory: float, virtual_stages: int = 1) -> Table:
    """The table with the smallest bubble, among those that hold at most `memory` micro-batches' activations on a rank.

    With one stage a rank: ZB-H1, ZB-H2, and the tables of a greedy heuristic (after Qi et al. 2023, section 3) under
    each of its settings. With two: the schedules over a V. Every candidate is proved and timed by the checker.

    Raises:
        ScheduleError: no candidate fits the memory.
    """
    names = {1: ("zb_h1", "zb_h2"), 2: ("zb_v", "v_half", "v_min")}.get(virtual_stages)
    if names is None:
        raise ScheduleError(f"the search knows one and two stages a rank, got virtual_stages={virtual_stages}")
    tables = [build(name, ranks, microbatches) for name in names]
    if virtual_stages == 1 and memory >= 1:
        for eager, patience in product((True, False), (0.0, 0.5, 1.0)):
            orders = _Greedy(ranks, microbatches, times, int(memory), eager, patience).orders()
            tables.append(with_transfers(orders, Placement.looped(ranks), microbatches))
    fitting = [table for table in tables if max(peak_live(table)) <= memory]
    if not fitting:
        least = min(max(peak_live(table)) for table in tables)
        raise ScheduleError(f"no table holds at most {memory:g} micro-batches on a rank; the least is {least:g}")
    return min(fitting, key=lambda table: check(table, times).bubble)


class _Greedy:
    """Every rank, whenever it is free, takes the gradient that has arrived, else a forward, else a weight gradient.

    `eager`: a rank takes forwards ahead of the gradient as long as memory allows, until its first gradient is there;
    else it warms up as 1F1B does. `patience`: the share of T_W for which a rank rather waits idle for an arrival than
    begin a weight gradient.
    """

    def __init__(self, ranks: int, microbatches: int, times: Times, memory: int, eager: bool, patience: float) -> None:
        self._ranks, self._count, self._times, self._patience = ranks, microbatches, times, patience
        self._room = [memory if eager else min(memory, ranks - rank) for rank in range(ranks)]
        self._memory = memory
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
        done, room = self._done[rank], self._room[rank] if not self._done[rank][_I] else self._memory
        able = [_I] + ([_F] if done[_F] - done[_W] < self._memory and done[_F] - done[_I] < room else [])
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
