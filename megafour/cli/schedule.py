"""`megafour schedule`: a pipeline schedule checked and drawn, without running it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megafour.cli._arguments import location, path, positive
from megafour.config.errors import ConfigError
from megafour.config.rules_pipeline import SCHEDULES, is_own_schedule

if TYPE_CHECKING:
    from megafour.parallel.pipeline.actions import Table
    from megafour.parallel.pipeline.simulate import Times

DESCRIPTION = """Builds the table of a schedule, proves that every micro-batch passes every stage forward and backward
once, that sends match receives and that nothing waits for ever, and draws it: one row a rank, with the bubble and the
peak of live activations. Exits with 2 where a table of your own has a fault, and names the action."""


NAMES = (*SCHEDULES, "zb_auto")
"""What --name takes beside a file: zb_auto makes a table here, which a run then reads."""

LEAST = 1e-12
"""The shortest duration but 0, and its inverse the longest: sums of what lies between are numbers."""

MOST = 200_000
"""Micro-batches that all stages together pass, and that a table is made for here."""


def add_parser(subparsers: Any) -> None:
    """Adds the verb and its options."""
    parser = subparsers.add_parser("schedule", help="a pipeline schedule checked and drawn", description=DESCRIPTION)
    add = parser.add_argument
    add("--name", required=True, type=location, metavar="NAME",
        help=f"{', '.join(NAMES)}, or a table of your own: PATH.csv, PATH.json, PATH.py:function; zb_auto searches "
        "for the zero-bubble table with the smallest bubble at --times within --memory")
    add("--stages", type=positive, default=4, metavar="P", help="pipeline ranks (default: 4)")
    add("--micro-batches", type=positive, default=8, metavar="M", help="micro-batches of a step (default: 8)")
    add("--virtual-stages", type=positive, metavar="V", help="stages a rank (default: the schedule's own)")
    add("--times", type=_times, metavar="F,B,W,COMM", help="durations of one micro-batch's forward, input gradient and "
        "weight gradient on a rank, and of one transfer (default: 1,1,1,0)")
    add("--memory", type=_bound, metavar="N", help="for zb_auto: micro-batches whose activations a rank may hold "
        "(default: P, as 1F1B)")
    add("--kept", type=_share, metavar="SHARE", help="for zb_auto: the share of a micro-batch's "
        "activations that waits for the weight gradient once the input's is done (default: 1)")
    add("--save", type=_json_file, metavar="FILE.json",
        help="write the table, for parallel.pipeline.schedule=FILE.json")
    add("--out", type=_picture, metavar="FILE", help="a picture: .svg or .png")


def run(args: argparse.Namespace) -> int:
    """Runs the verb; ConfigError for an unknown or ill-fitting schedule, and for a table with a fault."""
    from megafour.parallel.pipeline.actions import ScheduleError
    from megafour.parallel.pipeline.check import check
    from megafour.parallel.pipeline.timeline import as_text, draw, predicted

    if args.name not in NAMES and not is_own_schedule(args.name):
        raise ConfigError(f"--name {args.name}: unknown pipeline schedule {args.name!r}; known: {', '.join(NAMES)}, "
                          f"and PATH.csv, PATH.json or PATH.py:function for your own")
    _refuse_what_has_no_effect(args)
    try:
        table = _table(args)
        report = check(table, args.times)
    except ScheduleError as error:
        raise ConfigError(f"--name {args.name}: {error}") from None
    timeline = predicted(args.name, table, report)
    print(as_text(timeline))
    if args.save is not None:
        from megafour.parallel.pipeline.own import as_json

        with _writing("--save", args.save):
            args.save.write_text(as_json(table), "utf-8")
    if args.out is not None:
        with _writing("--out", args.out):
            draw([timeline], args.out)
    return 0


@contextmanager
def _writing(option: str, file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{option} {file}: cannot be written: {error.strerror or error}") from None
    print(f"wrote {file}")


def _refuse_what_has_no_effect(args: argparse.Namespace) -> None:
    for option, value in (("--memory", args.memory), ("--kept", args.kept)):
        if args.name != "zb_auto" and value is not None:
            raise ConfigError(f"{option} {value:g} bounds the search of zb_auto and has no effect on --name "
                              f"{args.name}; leave it out, or take --name zb_auto")
    actions = args.stages * max(args.micro_batches, args.stages) * (args.virtual_stages or 1)
    if actions > MOST:
        raise ConfigError(f"--stages {args.stages} and --micro-batches {args.micro_batches}: ranks · micro-batches (as "
                          f"many as ranks at least) · stages a rank = {actions} is more than {MOST}, which would take "
                          "minutes; lower one of them")


def _table(args: argparse.Namespace) -> Table:
    from megafour.parallel.pipeline.auto import search
    from megafour.parallel.pipeline.select import find
    from megafour.parallel.pipeline.simulate import Times

    if args.name == "zb_auto":
        memory, kept = args.stages if args.memory is None else args.memory, 1.0 if args.kept is None else args.kept
        return search(args.stages, args.micro_batches, args.times or Times(), memory, args.virtual_stages or 1, kept)
    return find(args.name, args.stages, args.micro_batches, args.virtual_stages).table(args.micro_batches)


def _times(text: str) -> Times:
    from megafour.parallel.pipeline.simulate import Times

    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if len(values) not in (3, 4) or not all(v == 0 or LEAST <= v <= 1 / LEAST for v in values) or not any(
            values[:3]):
        raise argparse.ArgumentTypeError(f"{text!r} is not F,B,W or F,B,W,COMM: numbers that are 0, or from {LEAST:g} "
                                         f"to {1 / LEAST:g}, F, B and W not all 0")
    return Times(*values)


def _bound(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share, from 0 to 1")
    return value


def _picture(text: str) -> Path:
    return _file_of(text, ".svg", ".png")


def _json_file(text: str) -> Path:
    return _file_of(text, ".json")


def _file_of(text: str, *endings: str) -> Path:
    """A file's path with one of the endings and a name before it."""
    if Path(text).suffix not in endings:
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a file that ends in {' or '.join(endings)}, "
                                         f"such as table{endings[0]}")
    return path(text)
