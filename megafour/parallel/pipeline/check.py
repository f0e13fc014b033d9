"""Proves a schedule table without running it, and tells its timeline, bubble and peak memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from megafour.parallel.pipeline.actions import Action, Kind, Message, Pair, ScheduleError, Table, Transfer
from megafour.parallel.pipeline.simulate import Simulation, Span, Times

_TRAINING = ((Kind.FORWARD, Kind.BACKWARD), (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT))
_EVALUATION = ((Kind.FORWARD,),)
"""What a micro-batch does on a stage: one of these sequences, whole."""


@dataclass(frozen=True)
class Report:
    """What a table that passed the check costs."""

    spans: tuple[tuple[Span, ...], ...]
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
    spans = Simulation(table, times).run()
    work = table.microbatches * (times.work if training else times.forward)
    first = min(row[0][1] for row in spans)
    last = max(row[-1][2] for row in spans)
    longest = max(row[-1][2] - row[0][1] for row in spans)
    return Report(
        spans=tuple(tuple(row) for row in spans),
        peak_live=peak_live(table),
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
            for action in step.parts:
                if not (0 <= action.microbatch < table.microbatches and 0 <= action.chunk < chunks):
                    raise _fail(rank, index,
                                f"{action} is outside of {table.microbatches} micro-batches, {chunks} chunks")
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
        if isinstance(step.compute, Pair):
            _check_independent(rank, index, step.compute)
        for action in step.parts:
            source = placement.source(action.kind, action.microbatch, table.stage(rank, action))
            if source is not None:
                if source not in held:
                    raise _fail(rank, index, f"{action} needs the {source}, which is not there")
                held.remove(source)
        for action in step.parts:
            product = placement.product(action.kind, action.microbatch, table.stage(rank, action))
            if product is not None:
                (held if placement.receiver(product) == rank else made).add(product)
    if made or held:
        message = min(made or held, key=str)
        raise ScheduleError(f"rank {rank}: the {message} is never {'sent' if made else 'used'}")


def _check_independent(rank: int, index: int, pair: Pair) -> None:
    """A pair is a forward and a backward of which neither waits for the other."""
    ahead, back = pair.forward, pair.backward
    if ahead.kind is not Kind.FORWARD or back.kind not in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
        raise _fail(rank, index, f"{pair} is not a forward and a backward")
    if (ahead.microbatch, ahead.chunk) == (back.microbatch, back.chunk):
        raise _fail(rank, index, f"{pair}: the backward needs the forward that it is to run beside")


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


def peak_live(table: Table, kept: float = 1.0) -> tuple[float, ...]:
    """Per rank, the most activations held at once, as `Report` counts them; depends on the order alone.

    `kept`: the share of a micro-batch's activations that is still held when the gradient of its input is done and that
    of its weights is not.
    """
    return tuple(_peak(table, rank, kept) for rank in range(len(table.steps)))


def _peak(table: Table, rank: int, kept: float) -> float:
    whole = waiting = 0
    peak = 0.0
    for step in table.steps[rank]:
        for action in step.parts:
            whole += {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_INPUT: -1, Kind.BACKWARD_WEIGHT: 0}[action.kind]
            waiting += {Kind.BACKWARD_INPUT: 1, Kind.BACKWARD_WEIGHT: -1}.get(action.kind, 0)
            peak = max(peak, whole + kept * waiting)
    return peak / len(table.placement.stages_of[rank])
