"""Rules on the pp axis: schedules and how many stages a rank holds under each, and layers to stages."""

from collections.abc import Iterator
from difflib import get_close_matches

from megafour.config.schema import Config

ONE_STAGE = ("1f1b", "gpipe", "zb_h1", "zb_h2")
"""Schedules with one stage a rank."""

ANY_STAGES = ("interleaved_1f1b",)
"""Schedules with any number of stages a rank."""

VEE = ("zb_v", "v_half", "v_min", "dualpipe_v")
"""Schedules with two stages a rank, in a V."""

SCHEDULES = (*ONE_STAGE, *ANY_STAGES, *VEE)

FILES = (".csv", ".json")
"""Endings of a table of the user's own; PATH.py:function is the third way."""


def is_own_schedule(name: str) -> bool:
    """Whether `parallel.pipeline.schedule` names a file of the user's, and not one of SCHEDULES."""
    return name.endswith(FILES) or ".py:" in name


def stages_a_rank(config: Config) -> int | None:
    """Stages that each pipeline rank holds; None where only the user's own schedule says so."""
    pipeline = config.parallel.pipeline
    if pipeline.virtual_stages is not None:
        return pipeline.virtual_stages
    if is_own_schedule(pipeline.schedule):
        return None
    return 2 if pipeline.schedule in VEE else 1


def pipeline_rules(config: Config) -> Iterator[str]:
    """Schedule, virtual stages and partition against each other and the layers."""
    yield from _schedule(config)
    yield from _partition(config)


def _schedule(config: Config) -> Iterator[str]:
    name, asked = config.parallel.pipeline.schedule, config.parallel.pipeline.virtual_stages
    if name not in SCHEDULES and not is_own_schedule(name):
        near = get_close_matches(name, SCHEDULES, n=1, cutoff=0.5)
        meant = f"; did you mean {near[0]}?" if near else "."
        yield (f"parallel.pipeline.schedule = {name} is not a schedule{meant} There are {', '.join(SCHEDULES)}, and "
               "PATH.csv, PATH.json or PATH.py:function for your own")
    if name in ONE_STAGE and asked not in (None, 1):
        yield (f"{name} has one stage a rank, and parallel.pipeline.virtual_stages is {asked}; set it to null, or "
               "parallel.pipeline.schedule=interleaved_1f1b")
    if name in VEE and asked not in (None, 2):
        yield (f"{name} has two stages a rank, in a V, and parallel.pipeline.virtual_stages is {asked}; set it to null "
               "or 2")


def _partition(config: Config) -> Iterator[str]:
    held, pp = stages_a_rank(config), config.parallel.pp
    if held is None:    # the schedule's own file says how many stages there are: checked with its table
        return
    named = f"parallel.pp {pp}" + (f" · {held} stages a rank = {pp * held}" if held > 1 else "")
    yield from stage_rules(config, pp * held, named)


def stage_rules(config: Config, stages: int, named: str) -> Iterator[str]:
    """Layers against `stages` stages, and `parallel.pipeline.partition` against both; `named`: where they come from."""
    layers, pipeline = config.model.num_layers, config.parallel.pipeline
    if stages > layers:
        fix = f"lower parallel.pp to {layers} or less"
        if pipeline.schedule in ANY_STAGES:
            fix = "lower parallel.pipeline.virtual_stages or parallel.pp"
        elif pipeline.schedule not in ONE_STAGE:
            fix = "raise model.num_layers, lower parallel.pp, or take a schedule with one stage a rank"
        yield f"no empty stage: {named} is more than model.num_layers {layers}; {fix}"
    if pipeline.partition == "auto":
        return
    counts = [int(count) for count in pipeline.partition]
    total = " + ".join(map(str, counts))
    if len(counts) != stages:
        yield (f"one count a stage: parallel.pipeline.partition [{', '.join(map(str, counts))}] has {len(counts)} "
               f"entries and there are {stages} stages ({named}); change parallel.pipeline.partition")
    elif min(counts) < 1:
        yield (f"no empty stage: parallel.pipeline.partition [{', '.join(map(str, counts))}] gives stage "
               f"{counts.index(min(counts))} {min(counts)} layers; give each at least 1")
    elif sum(counts) != layers:
        yield (f"no layer dropped: parallel.pipeline.partition {total} = {sum(counts)} ≠ model.num_layers {layers}; "
               "change parallel.pipeline.partition")
