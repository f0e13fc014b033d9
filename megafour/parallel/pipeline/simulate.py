"""Runs a schedule table on paper, under the strictest reading of point-to-point transfers that a backend may have.

Between two ranks there is one channel in each direction, and the channels know nothing of each other: on GPUs each has
a communicator of its own. A step posts its sends and receives, which does not block. A channel carries one message
after another, in the order posted; a message is on its way once both its ends are posted (rendezvous: no send completes
into a buffer that nobody has posted) and the one before it has arrived. A compute waits for the messages that it needs,
and for nothing else. What runs to its end under these rules runs to its end on every backend that is more generous, at
any durations: durations move moments, never the order in which a rank posts and waits.
"""

from __future__ import annotations

from dataclasses import dataclass

from megafour.parallel.pipeline.actions import Kind, Message, ScheduleError, Table, Work
from megafour.parallel.pipeline.transfers import sources_of

Span = tuple[Work, float, float]
"""What a rank computed, from when, to when."""


@dataclass(frozen=True)
class Times:
    """Durations, in any one unit, of one micro-batch on one rank's whole share of the model."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    transfer: float = 0.0
    """One message between two ranks, once both are ready."""

    def of(self, work: Work) -> float:
        """Duration of an action on the whole share; a pair's is the sum of its two."""
        return sum(self._of_kind(action.kind) for action in work.parts)

    def _of_kind(self, kind: Kind) -> float:
        return {Kind.FORWARD: self.forward, Kind.BACKWARD_INPUT: self.backward_input,
                Kind.BACKWARD_WEIGHT: self.backward_weight,
                Kind.BACKWARD: self.backward_input + self.backward_weight}[kind]

    @property
    def work(self) -> float:
        """Everything that one micro-batch costs one rank."""
        return self.forward + self.backward_input + self.backward_weight


class Simulation:
    """One run of a table on paper, at given durations."""

    def __init__(self, table: Table, times: Times) -> None:
        self._table, self._times = table, times
        self._step = [0] * len(table.steps)
        self._posted = [0] * len(table.steps)
        self._now = [0.0] * len(table.steps)
        self._spans: list[list[Span]] = [[] for _ in table.steps]
        self._half: dict[Message, float] = {}
        """Messages of which one end is posted, and when."""
        self._ready: dict[Message, float] = {}
        """Messages of which both ends are posted, and since when."""
        self._there: dict[Message, float] = {}
        """When a message has arrived, or was made where it is used."""
        self._queues: dict[tuple[int, int], list[Message]] = {}
        self._free: dict[tuple[int, int], tuple[int, float]] = {}
        """Per channel, how many of its messages have arrived, and when the last one did."""
        for rank, steps in enumerate(table.steps):
            for step in steps:
                for transfer in step.sends:
                    self._queues.setdefault((rank, transfer.peer), []).append(transfer.message)

    def run(self) -> list[list[Span]]:
        """The spans of every rank; ScheduleError when the ranks wait for each other."""
        waiting = set(range(len(self._step)))
        while waiting:
            waiting = {other for rank in sorted(waiting) for other in self._advance(rank)}
        if any(step < len(steps) for step, steps in zip(self._step, self._table.steps, strict=True)):
            raise ScheduleError("deadlock: " + "; ".join(
                self._describe(rank) for rank, steps in enumerate(self._table.steps) if self._step[rank] < len(steps)))
        return self._spans

    def _advance(self, rank: int) -> set[int]:
        """Take `rank` as far as it gets; the ranks that something has arrived for meanwhile."""
        steps, woken = self._table.steps[rank], set()
        while self._step[rank] < len(steps):
            step = steps[self._step[rank]]
            if self._posted[rank] == self._step[rank]:
                self._posted[rank] += 1
                for transfer in step.sends:
                    woken |= self._post(transfer.message, (rank, transfer.peer), self._now[rank])
                for transfer in step.recvs:
                    woken |= self._post(transfer.message, (transfer.peer, rank), self._now[rank])
            if step.compute is not None and not self._compute(rank, step.compute):
                break
            self._step[rank] += 1
        return woken - {rank}

    def _post(self, message: Message, channel: tuple[int, int], now: float) -> set[int]:
        """One end of a message is posted; the receiver, if anything arrives for it by that."""
        if message not in self._half:
            self._half[message] = now
            return set()
        self._ready[message] = max(now, self._half[message])
        queue, (done, free) = self._queues[channel], self._free.get(channel, (0, 0.0))
        before = done
        while done < len(queue) and queue[done] in self._ready:
            free = max(free, self._ready[queue[done]]) + self._times.transfer
            self._there[queue[done]] = free
            done += 1
        self._free[channel] = (done, free)
        return {channel[1]} if done > before else set()

    def _compute(self, rank: int, work: Work) -> bool:
        """Run the work if its inputs are there; whether they were."""
        placement, start = self._table.placement, self._now[rank]
        for source in sources_of(work, rank, self._table.placement):
            if source not in self._there:
                return False
            start = max(start, self._there[source])
        end = self._now[rank] = start + self._times.of(work) / len(placement.stages_of[rank])
        self._spans[rank].append((work, start, end))
        for action in work.parts:
            product = placement.product(action.kind, action.microbatch, self._table.stage(rank, action))
            if product is not None and placement.receiver(product) == rank:
                self._there[product] = end
        return True

    def _describe(self, rank: int) -> str:
        """Where a stuck rank stands: its step, and what never arrives."""
        work = self._table.steps[rank][self._step[rank]].compute
        assert work is not None
        missing = next(source for source in sources_of(work, rank, self._table.placement) if source not in self._there)
        return f"rank {rank}, step {self._step[rank]}, {work} waits for the {missing}"
