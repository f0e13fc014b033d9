"""Schedules whose backward stays whole: GPipe, 1F1B and interleaved 1F1B."""

from __future__ import annotations

from collections.abc import Sequence

from megafour.parallel.pipeline.actions import Action, Kind, Pair, Placement, ScheduleError, Table, Work
from megafour.parallel.pipeline.transfers import Order, with_transfers


def gpipe(stages: int, microbatches: int, virtual_stages: int = 1) -> Table:
    """All forwards, then all backwards (Huang et al. 2019); every micro-batch's activations are live at once."""
    require("gpipe", stages, microbatches, virtual_stages, chunks=1)
    order = [Action(kind, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for m in range(microbatches)]
    return with_transfers([order] * stages, Placement.looped(stages), microbatches)


def one_forward_one_backward(stages: int, microbatches: int, virtual_stages: int = 1) -> Table:
    """1F1B (Narayanan et al. 2019): after its warm-up a rank alternates; stage s holds at most p−s micro-batches."""
    require("1f1b", stages, microbatches, virtual_stages, chunks=1)
    forwards = [Action(Kind.FORWARD, m) for m in range(microbatches)]
    backwards = [Action(Kind.BACKWARD, m) for m in range(microbatches)]
    orders = [alternate(forwards, backwards, stages - 1 - stage) for stage in range(stages)]
    return with_transfers(orders, Placement.looped(stages), microbatches)


def interleaved(stages: int, microbatches: int, virtual_stages: int = 1) -> Table:
    """Interleaved 1F1B (Narayanan et al. 2021): `virtual_stages` stages a rank, stage i on rank i mod p.

    Micro-batches go in groups of p, a group through a rank's first stage, then through its second, and so on, so that
    a rank goes on with the next stage when the group's first micro-batch has come round. Where p does not divide the
    micro-batches, the last group is run without those that are missing: the bubble grows by what they leave open.
    """
    require("interleaved_1f1b", stages, microbatches, virtual_stages)
    groups = [range(first, first + stages) for first in range(0, microbatches, stages)]
    chunks = range(virtual_stages)
    forwards = [Action(Kind.FORWARD, m, c) for group in groups for c in chunks for m in group]
    backwards = [Action(Kind.BACKWARD, m, c) for group in groups for c in reversed(chunks) for m in group]
    # Before its first backward a rank has to pass the whole first group through all its stages but the last; the
    # further it is from the end, the more forwards fit in until the first gradient arrives.
    warmup = (virtual_stages - 1) * stages
    step = 1 if virtual_stages == 1 else 2
    orders = [alternate(forwards, backwards, warmup + step * (stages - 1 - rank)) for rank in range(stages)]
    return with_transfers(only(orders, microbatches), Placement.looped(stages, virtual_stages), microbatches)


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> list[Action]:
    """`warmup` forwards, then a forward and a backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    order = list(forwards[:warmup])
    for ahead, back in zip(forwards[warmup:], backwards, strict=False):
        order += [ahead, back]
    return order + list(backwards[len(forwards) - warmup:])


def only(orders: Sequence[Order], microbatches: int) -> list[Order]:
    """The orders without the micro-batches from `microbatches` on: whole ones are taken out, so that no other waits.

    How a schedule that is drawn for a certain number of micro-batches serves fewer.
    """
    kept: list[Order] = []
    for order in orders:
        row: list[Work] = []
        for work in order:
            parts = [action for action in work.parts if action.microbatch < microbatches]
            if len(parts) == 2:
                row.append(Pair(*parts))
            else:
                row.extend(parts)
        kept.append(row)
    return kept


def require(name: str, stages: int, microbatches: int, virtual_stages: int, chunks: int | None = None) -> None:
    """Refuse sizes that mean nothing, and another number of stages a rank than the schedule's `chunks`."""
    if stages < 1 or microbatches < 1 or virtual_stages < 1:
        raise ScheduleError(f"{name} needs at least one stage and one micro-batch, got {stages} and {microbatches}")
    if chunks is not None and virtual_stages != chunks:
        held = "one stage" if chunks == 1 else f"{chunks} stages"
        raise ScheduleError(f"{name} has {held} a rank, got virtual_stages={virtual_stages}")
