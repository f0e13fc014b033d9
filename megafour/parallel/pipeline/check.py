"""Proves a schedule table without running it, and tells its timeline, bubble and peak memory.

What is proved holds under the strictest reading of point-to-point transfers that a backend may have. A step posts its
sends and receives as one batch, which does not block. A rank's batches are served one after another: a batch becomes
active when it is posted and the one before it is complete (NCCL runs the batches of one communicator on one stream).
A transfer takes place once both its ends are in active batches (rendezvous: no send completes into a buffer that
nobody has posted), all transfers of an active batch side by side, and a batch is complete when its last transfer is.
A compute waits for the whole of the batch that brings its input, and for nothing else. What runs to its end under
these rules runs to its end on every backend that is more generous, at any durations: durations move moments, never
the order in which a rank posts and waits.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from megafour.parallel.pipeline.actions import Action, Kind, Message, ScheduleError, Table, Transfer

_TRAINING = ((Kind.FORWARD, Kind.BACKWARD), (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT))
_EVALUATION = ((Kind.FORWARD,),)
"""What a micro-batch does on a stage: one of these sequences, whole."""


@dataclass(frozen=True)
class Times:
    """Durations, in any one unit, of one micro-batch on one rank's whole share of the model."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    transfer: float = 0.0
    """One message between two ranks, once both are ready."""

    def of(self, kind: Kind) -> float:
        """Duration of one action of `kind` on the whole share."""
        return {Kind.FORWARD: self.forward, Kind.BACKWARD_INPUT: self.backward_input,
                Kind.BACKWARD_WEIGHT: self.backward_weight,
                Kind.BACKWARD: self.backward_input + self.backward_weight}[kind]

    @property
    def work(self) -> float:
        """Everything that one micro-batch costs one rank."""
        return self.forward + self.backward_input + self.backward_weight


@dataclass(frozen=True)
class Report:
    """What a table that passed the check costs."""

    spans: tuple[tuple[tuple[Action, float, float], ...], ...]
    """Per rank, its actions with their start and end."""
    peak_live: tuple[float, ...]
    """Per rank, the most activations held at once, in micro-batches of its whole share of the model: a forward adds
    one, the backward (of the weights, where it is split) takes it away. Receive buffers are not counted."""
    makespan: float
    """Start of the first action to the end of the last, over all ranks."""
    bubble: float
    """Idle share of the rank that is busy longest: 1 − m(T_F+T_B+T_W) / max over ranks (last end − first start)."""
    makespan_bubble: float
    """1 − m(T_F+T_B+T_W) / makespan: what a step that ends with a barrier pays."""


def check(table: Table, times: Times | None = None, *, training: bool = True) -> Report:
    """Prove `table` and measure it at `times` (default: T_F = T_B = T_W = 1, free transfers).

    Proved: every micro-batch passes every stage forward and backward exactly once, in an order that respects its
    dependencies; sends and receives match, in order, between every two ranks; nothing waits for ever. Without
    `training` only forwards are expected, as an evaluation has them. Raises ScheduleError naming the rank, the step
    and the action or transfer at fault.
    """
    _check_completeness(table, _TRAINING if training else _EVALUATION)
    for rank in range(table.placement.ranks):
        _check_rank(table, rank)
    _check_pairs(table)
    times = times or Times()
    spans = _Simulation(table, times).run()
    work = table.microbatches * (times.work if training else times.forward)
    first = min(row[0][1] for row in spans)
    last = max(row[-1][2] for row in spans)
    longest = max(row[-1][2] - row[0][1] for row in spans)
    return Report(
        spans=tuple(tuple(row) for row in spans),
        peak_live=tuple(_peak(table, rank) for rank in range(len(spans))),
        makespan=last - first,
        bubble=1 - work / longest if longest else 0.0,
        makespan_bubble=1 - work / (last - first) if last > first else 0.0,
    )


def _fail(rank: int, index: int, text: str) -> ScheduleError:
    return ScheduleError(f"rank {rank}, step {index}: {text}")


def _check_completeness(table: Table, allowed: tuple[tuple[Kind, ...], ...]) -> None:
    """Each rank runs one of the `allowed` sequences for each of its stages and micro-batches, whole and once."""
    placement = table.placement
    if len(table.steps) != placement.ranks:
        raise ScheduleError(f"the table has rows for {len(table.steps)} ranks, the placement {placement.ranks}")
    for rank, steps in enumerate(table.steps):
        chunks = len(placement.stages_of[rank])
        seen: dict[tuple[int, int], tuple[Kind, ...]] = {}
        for index, step in enumerate(steps):
            action = step.compute
            if action is None:
                continue
            if not (0 <= action.microbatch < table.microbatches and 0 <= action.chunk < chunks):
                raise _fail(rank, index, f"{action} is outside of {table.microbatches} micro-batches, {chunks} chunks")
            key = (action.microbatch, action.chunk)
            kinds = (*seen.get(key, ()), action.kind)
            if not any(kinds == whole[:len(kinds)] for whole in allowed):
                raise _fail(rank, index, f"{action} after {''.join(kinds[:-1]) or 'nothing'} of that micro-batch")
            seen[key] = kinds
        for chunk in range(chunks):
            for microbatch in range(table.microbatches):
                kinds = seen.get((microbatch, chunk), ())
                if kinds not in allowed:
                    missing = next(whole[len(kinds)] for whole in allowed if whole[:len(kinds)] == kinds)
                    raise ScheduleError(f"rank {rank}: {Action(missing, microbatch, chunk)} is missing")


def _check_rank(table: Table, rank: int) -> None:
    """Each rank sends what it made before, once; receives what it uses after, once; the peers are the right ones."""
    placement = table.placement
    made: set[Message] = set()
    held: set[Message] = set()
    posted: Counter[Message] = Counter()
    for index, step in enumerate(table.steps[rank]):
        for transfer in step.sends:
            _check_peer(table, rank, index, transfer, sending=True)
            if transfer.message not in made:
                raise _fail(rank, index, f"sends the {transfer.message}, which it did not make before or sent already")
            made.remove(transfer.message)
        for transfer in step.recvs:
            _check_peer(table, rank, index, transfer, sending=False)
            posted[transfer.message] += 1
            if posted[transfer.message] > 1:
                raise _fail(rank, index, f"receives the {transfer.message} twice")
            held.add(transfer.message)
        action = step.compute
        if action is None:
            continue
        stage = table.stage(rank, action)
        source = placement.source(action.kind, action.microbatch, stage)
        if source is not None:
            if source not in held:
                raise _fail(rank, index, f"{action} needs the {source}, which is not there")
            held.remove(source)
        product = placement.product(action.kind, action.microbatch, stage)
        if product is not None:
            (held if placement.receiver(product) == rank else made).add(product)
    if made or held:
        message = min(made or held, key=str)
        raise ScheduleError(f"rank {rank}: the {message} is never {'sent' if made else 'used'}")


def _check_peer(table: Table, rank: int, index: int, transfer: Transfer, *, sending: bool) -> None:
    placement, message = table.placement, transfer.message
    if not (0 <= message.stage < placement.stages and 0 <= message.microbatch < table.microbatches):
        raise _fail(rank, index, f"there is no {message}")
    source, target = placement.rank_of[message.stage], placement.receiver(message)
    expected = (source, target)
    named = (rank, transfer.peer) if sending else (transfer.peer, rank)
    if named != expected:
        raise _fail(rank, index, f"{'sends' if sending else 'receives'} the {message} from rank {named[0]} to rank "
                                 f"{named[1]}; it goes from rank {source} to rank {target}")


def _check_pairs(table: Table) -> None:
    """Between every two ranks the receives stand in the order of the sends: the wire has no addresses."""
    sent: dict[tuple[int, int], list[Message]] = {}
    received: dict[tuple[int, int], list[tuple[int, Message]]] = {}
    for rank, steps in enumerate(table.steps):
        for index, step in enumerate(steps):
            for transfer in step.sends:
                sent.setdefault((rank, transfer.peer), []).append(transfer.message)
            for transfer in step.recvs:
                received.setdefault((transfer.peer, rank), []).append((index, transfer.message))
    for source, target in sorted(sent.keys() | received.keys()):
        out, into = sent.get((source, target), []), received.get((source, target), [])
        for (index, message), other in zip(into, out, strict=False):
            if message != other:
                raise _fail(target, index, f"receives the {message} where rank {source} sends the {other}")
        if len(out) > len(into):
            raise ScheduleError(f"rank {source}: the {out[len(into)]} is sent, but rank {target} never receives it")
        if len(into) > len(out):
            index, message = into[len(out)]
            raise _fail(target, index, f"receives the {message}, which rank {source} never sends")


def _peak(table: Table, rank: int) -> float:
    live = peak = 0
    for step in table.steps[rank]:
        if step.compute is None:
            continue
        if step.compute.kind is Kind.FORWARD:
            live += 1
            peak = max(peak, live)
        elif step.compute.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            live -= 1
    return peak / len(table.placement.stages_of[rank])


@dataclass
class _Batch:
    """One posted batch: how many of its transfers are still to come, and the moments known so far."""

    transfers: tuple[Transfer, ...]
    left: int = 0
    posted: float | None = None
    active: float | None = None
    done: float | None = None
    latest: float = 0.0


@dataclass
class _Row:
    """Where one rank stands."""

    batches: list[_Batch] = field(default_factory=list)
    batch_of: dict[Message, int] = field(default_factory=dict)
    posted: int = 0
    done: int = 0
    """Batches posted, and complete, so far."""
    step: int = 0
    ready: bool = False
    """The batch of step `step` is posted; its compute is next."""
    now: float = 0.0


class _Simulation:
    """Runs a table on paper under the rules of this file's docstring."""

    def __init__(self, table: Table, times: Times) -> None:
        self._table, self._times = table, times
        self._rows = [_Row() for _ in table.steps]
        self._half: dict[Message, tuple[int, int]] = {}
        self._made: dict[Message, float] = {}
        self._spans: list[list[tuple[Action, float, float]]] = [[] for _ in table.steps]
        for row, steps in zip(self._rows, table.steps, strict=True):
            for step in steps:
                transfers = step.sends + step.recvs
                if transfers:
                    row.batch_of.update((transfer.message, len(row.batches)) for transfer in step.recvs)
                    row.batches.append(_Batch(transfers, len(transfers)))

    def run(self) -> list[list[tuple[Action, float, float]]]:
        """The spans of every rank; ScheduleError when the ranks wait for each other."""
        waiting = list(range(len(self._rows)))
        while waiting:
            woken = {other for rank in waiting for other in self._advance(rank)}
            waiting = sorted(woken)
        stuck = [self._describe(rank) for rank, row in enumerate(self._rows)
                 if row.step < len(self._table.steps[rank]) or row.done < len(row.batches)]
        if stuck:
            raise ScheduleError("deadlock: " + "; ".join(stuck))
        return self._spans

    def _advance(self, rank: int) -> set[int]:
        """Take `rank` as far as it gets; the ranks whose batches completed meanwhile, and may go on."""
        row, steps, woken = self._rows[rank], self._table.steps[rank], set()
        while row.step < len(steps):
            step = steps[row.step]
            if not row.ready:
                if step.sends or step.recvs:
                    row.batches[row.posted].posted = row.now
                    row.posted += 1
                    woken |= self._activate(rank)
                row.ready = True
            if step.compute is not None and not self._compute(rank, step.compute):
                break
            row.step, row.ready = row.step + 1, False
        return woken - {rank}

    def _compute(self, rank: int, action: Action) -> bool:
        """Run the action if its input is there; whether it was."""
        row, placement = self._rows[rank], self._table.placement
        stage = self._table.stage(rank, action)
        source = placement.source(action.kind, action.microbatch, stage)
        start = row.now
        if source is not None:
            arrived = self._made.get(source)
            if source in row.batch_of:
                arrived = row.batches[row.batch_of[source]].done
            if arrived is None:
                return False
            start = max(start, arrived)
        row.now = start + self._times.of(action.kind) / len(placement.stages_of[rank])
        self._spans[rank].append((action, start, row.now))
        product = placement.product(action.kind, action.microbatch, stage)
        if product is not None and placement.receiver(product) == rank:
            self._made[product] = row.now
        return True

    def _activate(self, rank: int) -> set[int]:
        """Activate this rank's next posted batch if the one before it is complete, and all that follows from it."""
        woken, queue = set(), [rank]
        while queue:
            rank = queue.pop()
            row = self._rows[rank]
            index = row.done
            if index == row.posted or row.batches[index].active is not None:
                continue
            batch = row.batches[index]
            before = row.batches[index - 1].done if index else None
            assert batch.posted is not None
            batch.active = max(batch.posted, before or 0.0)
            for transfer in batch.transfers:
                if transfer.message not in self._half:
                    self._half[transfer.message] = (rank, index)
                    continue
                other, at = self._half.pop(transfer.message)
                far = self._rows[other].batches[at]
                assert far.active is not None
                end = max(batch.active, far.active) + self._times.transfer
                for owner, one in ((rank, batch), (other, far)):
                    one.left, one.latest = one.left - 1, max(one.latest, end)
                    if one.left == 0:
                        one.done = one.latest
                        self._rows[owner].done += 1
                        woken.add(owner)
                        queue.append(owner)
        return woken

    def _describe(self, rank: int) -> str:
        """Where a stuck rank stands: its step, and the transfer that never takes place."""
        row, steps = self._rows[rank], self._table.steps[rank]
        where = f"rank {rank} at its end" if row.step >= len(steps) else f"rank {rank}, step {row.step}"
        if row.step < len(steps) and steps[row.step].compute is not None:
            where += f", {steps[row.step].compute}"
        batch = row.batches[row.done] if row.done < row.posted else None
        open_messages = [str(transfer.message) for transfer in batch.transfers
                         if transfer.message in self._half] if batch else []
        return where + (f" waits for the {open_messages[0]}" if open_messages else " waits")
