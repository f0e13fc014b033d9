"""The entry point: load the config, train.

    torchrun --standalone --nproc-per-node N train.py --config FILE [--allow-change KEY ...] [section.key=value ...]
    python train.py --check [--world N] --config FILE [section.key=value ...]
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn

from megafour.cli._arguments import positive
from megafour.config.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """An argument parser that leaves it to the caller to say what is wrong: once a node, and in one line."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError."""
        raise ConfigError(f"{message} (see `train.py --help`)")


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line; overrides are `section.key=value` words."""
    parser = Parser(prog="train.py", description="Train a model on a DP×PP×TP×CP mesh.")
    parser.add_argument("--config", metavar="FILE", help="YAML file; it names only what it changes")
    parser.add_argument("--check", action="store_true", help="validate and resolve the config without launching")
    parser.add_argument("--world", type=positive, metavar="N",
                        help="number of processes that --check assumes (default: the fewest that the mesh takes)")
    parser.add_argument("--allow-change", metavar="KEY", action="append", default=[],
                        help="resume although KEY, which changes what the run means, differs from the checkpoint's; "
                             "for this launch; may be given several times")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="change one key")
    args = parser.parse_intermixed_args(argv)
    if args.world is not None and not args.check:
        parser.error("--world goes with --check; a launch takes its world from torchrun")
    return args


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 done, 1 failed, 2 wrong argument or config."""
    # Before torch is imported: oversubscribed OpenMP threads spin, which is several times slower.
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // local, 1)))
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        from megafour.mesh import Launch
        from megafour.trainer.main import refuse

        return refuse(error, Launch.from_environment(), 2)
    from megafour.trainer.main import check, run

    if args.check:
        return check(args.config, args.overrides, args.world)
    return run(args.config, args.overrides, args.allow_change)


if __name__ == "__main__":
    sys.exit(main())
