"""From the configuration to a pipeline: which table a step of so many micro-batches runs, and which rank holds what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from megafour.config.errors import ConfigError
from megafour.config.rules_pipeline import is_own_schedule, stage_rules
from megafour.config.schema import Config
from megafour.parallel.pipeline.actions import Placement, ScheduleError, Table
from megafour.parallel.pipeline.check import check
from megafour.parallel.pipeline.own import load
from megafour.parallel.pipeline.schedules import build


@dataclass(frozen=True)
class Pipeline:
    """A schedule chosen for a number of ranks."""

    placement: Placement
    make: Callable[[int], Table]
    """The table for a number of micro-batches."""

    def table(self, microbatches: int) -> Table:
        """The table of a step of `microbatches`, made once."""
        if microbatches not in self._made:
            self._made[microbatches] = self.make(microbatches)
        return self._made[microbatches]

    @cached_property
    def _made(self) -> dict[int, Table]:
        return {}


def micro_batches(config: Config) -> int:
    """How many micro-batches a step of a resolved configuration has on each rank."""
    return config.train.global_batch_size // (int(config.parallel.dp) * config.train.micro_batch_size)


def find(name: str, ranks: int, microbatches: int, virtual_stages: int | None = None) -> Pipeline:
    """The schedule called `name`, or the user's own in a file, for `ranks` ranks and steps of `microbatches`.

    Raises ScheduleError.
    """
    if not is_own_schedule(name):
        def make(microbatches: int) -> Table:
            return build(name, ranks, microbatches, virtual_stages)

        return Pipeline(make(1).placement, make)
    own = load(name, ranks, virtual_stages)
    first = own(microbatches)    # of no other number: a function need not know every one
    return Pipeline(first.placement, lambda wanted: first if wanted == microbatches else own(wanted))


def pipeline_of(config: Config, microbatches: int | None = None) -> Pipeline:
    """The pipeline that a resolved configuration asks for, with `microbatches` a step or what the configuration says.

    Raises:
        ConfigError: no such schedule, or one that does not fit these numbers of ranks, stages and micro-batches.
    """
    asked, pp = config.parallel.pipeline, config.parallel.pp
    try:
        pipeline = find(asked.schedule, pp, microbatches or micro_batches(config), asked.virtual_stages)
    except ScheduleError as error:
        raise ConfigError(f"parallel.pipeline.schedule = {asked.schedule}: {error}") from None
    return pipeline


def check_pipeline(config: Config) -> None:
    """Prove the table that a resolved configuration would run, and that the model fills its stages.

    Raises:
        ConfigError: with the action at fault.
    """
    asked, pipeline = config.parallel.pipeline, pipeline_of(config)
    placement = pipeline.placement
    for message in stage_rules(config, placement.stages, f"parallel.pipeline.schedule {asked.schedule} with "
                               f"{placement.stages} stages"):
        raise ConfigError(message)
    ends = placement.rank_of[0], placement.rank_of[-1]
    if config.model.tie_embeddings and ends not in ((0, 0), (0, placement.ranks - 1)):
        raise ConfigError(f"parallel.pipeline.schedule = {asked.schedule}: with model.tie_embeddings the first stage "
                          "has to be on rank 0, and the last on rank 0 or on the last rank")
    try:
        check(pipeline.table(micro_batches(config)))
    except ScheduleError as error:
        raise ConfigError(f"parallel.pipeline.schedule = {asked.schedule}: {error}") from None
