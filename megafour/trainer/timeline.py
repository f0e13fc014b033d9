"""One recorded step of the pipeline: what each rank did when, drawn under what its table predicts."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from megafour.comm.objects import gather_objects
from megafour.parallel.pipeline.actions import Kind, Table
from megafour.parallel.pipeline.check import check
from megafour.parallel.pipeline.record import Recorder
from megafour.parallel.pipeline.simulate import Times
from megafour.parallel.pipeline.timeline import as_text, draw, measured, predicted
from megafour.trainer.step import TrainState

Spans = list[tuple[str, float, float]]


def save_timeline(state: TrainState, recorder: Recorder, microbatches: int, name: str, folder: Path) -> str | None:
    """Every rank calls it after a recorded step; the first rank writes and returns what a person may read.

    Writes `timeline.json` (per pipeline rank: action, start, end in seconds) and `timeline.svg`, for the pipeline
    that rank 0 is in.
    """
    mine, pp = recorder.spans(), state.mesh.group("pp")
    everyone = gather_objects(mine, state.mesh.group("world"))
    if state.mesh.rank != 0:
        return None
    spans = [everyone[rank] for rank in pp.ranks]
    (folder / "timeline.json").write_text(json.dumps({"schedule": name, "ranks": spans}), encoding="utf-8")
    table = state.pipeline.table(microbatches)
    expected = predicted(name, table, check(table, mean_times(table, spans)))
    real = measured(table, spans)
    draw([expected, real], folder / "timeline.svg")
    return f"{as_text(expected)}\n{as_text(real)}"


def mean_times(table: Table, spans: list[Spans]) -> Times:
    """Mean durations of one micro-batch on one rank's whole share, from measured (action, start, end); free transfers.

    A whole backward counts as input and weight gradient in equal parts; pairs, which mix two kinds, are left out where
    the table has the kinds alone too.
    """
    seconds: dict[Kind, list[float]] = defaultdict(list)
    for steps, row in zip(table.steps, spans, strict=True):
        works = (step.compute for step in steps if step.compute is not None)
        for work, (_, start, end) in zip(works, row, strict=True):
            if len(work.parts) == 1:
                seconds[work.parts[0].kind].append(end - start)
    mean = {kind: len(table.placement.stages_of[0]) * sum(some) / len(some) for kind, some in seconds.items()}
    half = mean.get(Kind.BACKWARD, 0.0) / 2
    return Times(mean.get(Kind.FORWARD, 1e-9), mean.get(Kind.BACKWARD_INPUT, half) or 1e-9,
                 mean.get(Kind.BACKWARD_WEIGHT, half) or 1e-9)
