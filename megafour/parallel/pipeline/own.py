"""Schedules of a user's own: a table read from a CSV or JSON file, or made by a Python function."""

from __future__ import annotations

import csv
import json
import re
import runpy
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megafour.parallel.pipeline.actions import Action, Kind, Pair, Placement, ScheduleError, Step, Table, Work
from megafour.parallel.pipeline.classic import only
from megafour.parallel.pipeline.transfers import Order, with_transfers

_ACTION = re.compile(r"([FBIW])(\d+)(?:\.(\d+))?")


def load(name: str, ranks: int, virtual_stages: int | None) -> Callable[[int], Table]:
    """What makes the table of `PATH.csv`, `PATH.json` or `PATH.py:function` for a number of micro-batches.

    A CSV file has a row for each rank: its actions in order, `F0`, `B0.1` (micro-batch 0 on the rank's second stage),
    `I0` and `W0` (the two halves of a backward), `F1&B0` (a pair); empty cells mean nothing. A JSON file is
    `{"placement": "looped" | "v", "orders": [[...], ...]}` with the same words. Sends and receives are added. A Python
    function takes (ranks, micro-batches, virtual stages or None) and returns a `Table`.

    Raises:
        ScheduleError: the file is not there or not such a table, or it is for another number of ranks.
    """
    path, python, function = name.partition(".py:")
    if python:
        return _from_function(Path(path + ".py"), function, ranks, virtual_stages)
    kind, rows = _json(_text(name)) if name.endswith(".json") else ("looped", _csv(_text(name)))
    orders: list[Order] = [[_work(rank, str(cell)) for cell in row if str(cell).strip()]
                           for rank, row in enumerate(rows)]
    if len(orders) != ranks:
        raise ScheduleError(f"has rows for {len(orders)} ranks, and there are {ranks}")
    actions = [action for order in orders for work in order for action in work.parts]
    if not actions:
        raise ScheduleError("has no actions")
    chunks = _counted("stage", {action.chunk for action in actions})
    microbatches = _counted("micro-batch", {action.microbatch for action in actions})
    if virtual_stages not in (None, chunks):
        raise ScheduleError(f"has {chunks} stages a rank, and virtual_stages is {virtual_stages}")
    if kind == "v" and chunks != 2:
        raise ScheduleError(f"is over a V and has {chunks} stages a rank instead of 2")
    placement = Placement.vee(ranks) if kind == "v" else Placement.looped(ranks, chunks)
    return _cut(orders, placement, microbatches)


def as_json(table: Table) -> str:
    """The file from which `load` makes this table again; looped placements and the V only."""
    vee = table.placement.ranks > 1 and table.placement.rank_of == Placement.vee(table.placement.ranks).rank_of
    rows = ",\n".join(json.dumps([str(step.compute) for step in steps if step.compute is not None])
                      for steps in table.steps)
    return f'{{"placement": "{"v" if vee else "looped"}", "orders": [\n{rows}\n]}}\n'


def _cut(orders: list[Order], placement: Placement, given: int) -> Callable[[int], Table]:
    def make(microbatches: int) -> Table:
        if microbatches > given:
            raise ScheduleError(f"has {given} micro-batches, and a step has {microbatches}")
        return with_transfers(only(orders, microbatches), placement, microbatches)

    return make


def _text(name: str) -> str:
    try:
        return Path(name).read_text("utf-8-sig")    # spreadsheets write a byte-order mark
    except OSError as error:
        raise ScheduleError(f"cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ScheduleError("is no text in UTF-8") from None


def _csv(text: str) -> list[list[str]]:
    try:
        return [row for row in csv.reader(text.splitlines()) if row]
    except csv.Error as error:
        raise ScheduleError(f"is no CSV: {error}") from None


def _json(text: str) -> tuple[str, list[list[Any]]]:
    shape = 'is not {"placement": "looped" or "v", "orders": [one list of actions a rank]}'
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise ScheduleError(shape) from None
    if not isinstance(content, dict) or not {"orders"} <= content.keys() <= {"placement", "orders"}:
        raise ScheduleError(shape)
    placement, orders = content.get("placement", "looped"), content["orders"]
    if not isinstance(orders, list) or not all(isinstance(order, list) for order in orders):
        raise ScheduleError(shape)
    if placement not in ("looped", "v"):
        raise ScheduleError(f"has the placement {placement!r}; known: looped, v")
    return placement, orders


def _counted(what: str, seen: set[int]) -> int:
    """How many there are of what is numbered from 0 without a gap."""
    gap = next(number for number in range(len(seen) + 1) if number not in seen)
    if gap < len(seen):
        raise ScheduleError(f"has actions of {what} {max(seen)} and none of {what} {gap}")
    return gap


def _work(rank: int, text: str) -> Work:
    parts = [_ACTION.fullmatch(part.strip()) for part in text.split("&")]
    actions = [Action(Kind(part[1]), int(part[2]), int(part[3] or 0)) for part in parts if part is not None]
    if len(actions) != len(parts) or len(actions) > 2:
        raise ScheduleError(f"rank {rank}: {text!r} is not an action such as F0, B0.1, I2, W2 or F1&B0")
    return Pair(*actions) if len(actions) == 2 else actions[0]


def _from_function(path: Path, name: str, ranks: int, virtual_stages: int | None) -> Callable[[int], Table]:
    if not path.is_file():
        raise ScheduleError(f"there is no file {path}")
    function = _guarded(path, lambda: runpy.run_path(str(path))).get(name)
    if not callable(function):
        raise ScheduleError(f"{path} has no function {name}")

    def make(microbatches: int) -> Table:
        table = _guarded(path, lambda: function(ranks, microbatches, virtual_stages))
        if (not isinstance(table, Table) or sorted(set(table.placement.rank_of)) != [*range(ranks)]
                or table.microbatches != microbatches):
            raise ScheduleError(f"{name} does not return a Table for {ranks} ranks, each with a stage, and "
                                f"{microbatches} micro-batches")
        for rank, steps in enumerate(table.steps):
            for index, step in enumerate(steps):
                if not isinstance(step, Step) or not isinstance(step.compute, Action | Pair | None):
                    raise ScheduleError(f"rank {rank}, step {index}: {step!r} is not a Step of an Action or a Pair")
        return table

    return make


def _guarded(path: Path, work: Callable[[], Any]) -> Any:
    """What the user's code gives; what it raises is a fault of the schedule, with the line of `path` that led to it."""
    try:
        return work()
    except ScheduleError:
        raise
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__)
                 if Path(frame.filename).resolve() == path.resolve()]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        said = traceback.format_exception_only(error)[-1].strip()
        raise ScheduleError(f"{path}" + (f", line {line}" if line else "") + f": {said}") from error
