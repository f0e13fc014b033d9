"""The entry point: load the config, train.

    torchrun --standalone --nproc-per-node N train.py --config FILE [--allow-change KEY ...] [section.key=value ...]
    python train.py --check [--world N] --config FILE [section.key=value ...]
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn

from megafour.cli._arguments import location, positive
from megafour.config.errors import ConfigError, say_error
from megafour.config.launch import Launch, local_rank
from megafour.console import not_text, open_console, use_utf8
from megafour.trainer.signals import StopRequest


class Parser(argparse.ArgumentParser):
    """An argument parser that leaves it to the caller to say what is wrong: once a node, and in one line."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError."""
        raise ConfigError(f"{message} (see `train.py --help`)")


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line; overrides are `section.key=value` words."""
    parser = Parser(prog="train.py", description="Train a model on a DP×PP×TP×CP mesh.")
    parser.add_argument("--config", type=location, metavar="FILE", help="YAML file; it names only what it changes")
    parser.add_argument("--check", action="store_true", help="validate and resolve the config without launching")
    parser.add_argument("--world", type=positive, metavar="N",
                        help="number of processes that --check assumes (default: the fewest that the mesh takes)")
    parser.add_argument("--allow-change", metavar="KEY", action="append", default=[],
                        help="resume although KEY, which changes what the run means, differs from the checkpoint's; "
                             "for this launch; may be given several times")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="change one key")
    wrong = not_text(argv)
    if wrong is not None:
        parser.error(wrong)
    args = parser.parse_intermixed_args(argv)
    if args.world is not None and not args.check:
        parser.error("--world goes with --check; a launch takes its world from torchrun")
    return args


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 done, 1 failed, 2 wrong argument or config."""
    if argv is None:
        use_utf8()
    stop = StopRequest().listen()
    open_console(tolerant=True)
    try:
        code = command(sys.argv[1:] if argv is None else argv, stop)
    except BaseException:
        stop.restore()
        raise
    if argv is not None:        # the process goes on; one that exits now ignores late signals
        stop.restore()
    return code


def command(argv: list[str], stop: StopRequest) -> int:
    """Do as the command line says; nothing before `run` imports torch."""
    try:
        args = parse(argv)
        launch = Launch() if args.check else Launch.from_environment()
    except ConfigError as error:
        stop.restore()
        say_error(str(error), local_rank())
        return 2
    # Before torch is imported: oversubscribed OpenMP threads spin, which is several times slower.
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // launch.local_world, 1)))
    from megafour.trainer.main import check, run

    if args.check:
        stop.restore()
        return check(args.config, args.overrides, args.world)
    return run(args.config, args.overrides, launch, stop, args.allow_change)


if __name__ == "__main__":
    sys.exit(main())
