"""`megafour VERB …`: finds the verb's file, runs it, and turns what it raises into one line and an exit code."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Sequence
from typing import NoReturn

import megafour
import megafour.cli
from megafour.config.errors import say_error
from megafour.config.launch import local_rank
from megafour.console import OutputError, drop_output, not_text, open_console, use_utf8

EXIT_CODES = {"ConfigError": 2, "DataError": 1, "CheckpointError": 1, "OutputError": 1, "LaunchError": 1}
"""Failures that a user can mend: shown as one `error:` line, without a traceback. Known by name, so that a verb that
reads no checkpoint imports no torch just to name its error."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaint is one line, said once under torchrun."""

    def error(self, message: str) -> NoReturn:
        """Print `error: …` and exit 2."""
        complain(f"{message} (see `{self.prog} --help`)")
        sys.exit(2)


def verbs() -> list[str]:
    """The verbs there are: each is a file of this folder, with `add_parser(subparsers)` and `run(args) -> int`."""
    return sorted(m.name for m in pkgutil.iter_modules(megafour.cli.__path__)
                  if m.name != "main" and not m.name.startswith("_"))


def complain(message: str) -> None:
    """Say an error in one line, under torchrun once a node."""
    say_error(" ".join(message.split()), local_rank())


def exit_code(error: BaseException) -> int | None:
    """The exit code of a failure that one line explains; None for one that deserves its traceback."""
    return next((EXIT_CODES[c.__name__] for c in type(error).__mro__ if c.__name__ in EXIT_CODES), None)


def build_parser(names: Sequence[str]) -> Parser:
    """The parser that knows `names`; only their modules are imported."""
    parser = Parser(prog="megafour", description="4D-parallel LLM pretraining: every mesh is the same model.")
    parser.add_argument("--version", action="version", version=f"megafour {megafour.__version__}")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name in names:
        importlib.import_module(f"megafour.cli.{name}").add_parser(subparsers)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse one verb's command line; overrides (`section.key=value`) may stand anywhere between its options."""
    known = verbs()
    parser = build_parser(argv[:1] if argv and argv[0] in known else known)
    wrong = not_text(argv)
    if wrong is not None:
        parser.error(wrong)
    args, rest = parser.parse_known_args(argv)
    if isinstance(getattr(args, "overrides", None), list):    # argparse takes only the first run of them itself
        args.overrides += [word for word in rest if "=" in word and not word.startswith("-")]
        rest = [word for word in rest if word not in args.overrides]
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; the exit code is 0 when it did what it says, 2 for a wrong argument or config, else 1."""
    if argv is None:
        use_utf8()
    open_console(tolerant=False)
    try:
        try:
            args = parse(list(sys.argv[1:] if argv is None else argv))
            return int(importlib.import_module(f"megafour.cli.{args.verb}").run(args) or 0)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        complain("interrupted")
        return 1
    except BrokenPipeError:    # the reader of our output (`| head`) has seen enough
        drop_output()
        return 0
    except OSError as error:
        if error.errno is None:
            raise
        complain(str(error) if error.filename is None else f"{error.filename}: {error.strerror}")
        return 1
    except Exception as error:
        code = exit_code(error)
        if code is None:
            raise
        if isinstance(error, OutputError):
            drop_output()
        complain(str(error))
        return code
