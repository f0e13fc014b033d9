"""Checks a command line of train.py for a world of N ranks and prints its run's folder: `run_dir.py N --config F …`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from megafour.config.errors import ConfigError  # noqa: E402
from megafour.config.load import load_config  # noqa: E402
from megafour.config.rules import resolve  # noqa: E402
from train import parse  # noqa: E402


def main(argv: list[str]) -> int:
    """Exit code: 0 printed, 2 a config that no run of that size would accept."""
    try:
        args = parse(argv[1:])
        print(resolve(load_config(args.config, args.overrides), int(argv[0])).run_dir)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
