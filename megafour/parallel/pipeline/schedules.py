"""Every pipeline schedule by name: pure functions from (stages, micro-batches, virtual stages) to a table of steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from megafour.config.rules_pipeline import VEE
from megafour.parallel.pipeline.actions import Action, Kind, Placement, ScheduleError, Table
from megafour.parallel.pipeline.classic import gpipe, interleaved, one_forward_one_backward
from megafour.parallel.pipeline.dualpipe import dualpipe_v
from megafour.parallel.pipeline.transfers import with_transfers
from megafour.parallel.pipeline.vee import v_half, v_min, zb_v
from megafour.parallel.pipeline.zero_bubble import zb_h1, zb_h2

Schedule = Callable[[int, int, int], Table]

SCHEDULES: dict[str, Schedule] = {
    "gpipe": gpipe, "1f1b": one_forward_one_backward, "interleaved_1f1b": interleaved, "zb_h1": zb_h1, "zb_h2": zb_h2,
    "zb_v": zb_v, "v_half": v_half, "v_min": v_min, "dualpipe_v": dualpipe_v}
"""Every schedule by the name that the config uses."""


@lru_cache(maxsize=8)  # a table is immutable, and every step asks for the same one
def build(name: str, stages: int, microbatches: int, virtual_stages: int | None = None) -> Table:
    """The table of the schedule called `name`; `virtual_stages` None means the schedule's own default."""
    if name not in SCHEDULES:
        raise ScheduleError(f"unknown pipeline schedule {name!r}; known: {', '.join(sorted(SCHEDULES))}")
    chunks = (2 if name in VEE else 1) if virtual_stages is None else virtual_stages
    return SCHEDULES[name](stages, microbatches, chunks)


@lru_cache(maxsize=8)
def forward_only(placement: Placement, microbatches: int) -> Table:
    """The table of an evaluation: every micro-batch through every stage, no backward.

    A rank that can go on with a later stage does so first, so that no more micro-batches are under way than needed.
    """
    place = placement.rank_of
    orders: list[list[Action]] = [[] for _ in range(placement.ranks)]
    passed = [0] * placement.stages
    while passed[-1] < microbatches:
        able = [stage for stage in range(placement.stages)
                if passed[stage] < (microbatches if stage == 0 else passed[stage - 1])]
        for stage in {place[stage]: stage for stage in able}.values():    # one each: the latest stage that can
            chunk = placement.stages_of[place[stage]].index(stage)
            orders[place[stage]].append(Action(Kind.FORWARD, passed[stage], chunk))
            passed[stage] += 1
    return with_transfers(orders, placement, microbatches)
