"""From the configuration to a pipeline: which table a step of so many micro-batches runs, and which rank holds what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

from megafour.config.errors import ConfigError
from megafour.config.schema import Config
from megafour.parallel.pipeline.actions import Placement, ScheduleError, Table
from megafour.parallel.pipeline.check import check
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


def pipeline_of(config: Config) -> Pipeline:
    """The pipeline that a resolved configuration asks for.

    Raises:
        ConfigError: no such schedule, or one that does not fit these numbers of ranks, stages and micro-batches.
    """
    asked, pp = config.parallel.pipeline, config.parallel.pp
    try:
        make = partial(build, asked.schedule, pp, virtual_stages=asked.virtual_stages)
        return Pipeline(make(microbatches=1).placement, lambda count: make(microbatches=count))
    except ScheduleError as error:
        raise ConfigError(f"parallel.pipeline.schedule = {asked.schedule}: {error}") from None


def check_pipeline(config: Config) -> None:
    """Prove the table that a resolved configuration would run, and that the model fills its stages.

    Raises:
        ConfigError: with the action at fault.
    """
    asked, pipeline = config.parallel.pipeline, pipeline_of(config)
    try:
        check(pipeline.table(micro_batches(config)))
    except ScheduleError as error:
        raise ConfigError(f"parallel.pipeline.schedule = {asked.schedule}: {error}") from None
