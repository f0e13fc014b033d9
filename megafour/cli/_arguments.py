"""Types of arguments that several command lines take; no torch is imported for them."""

import argparse
from pathlib import Path

from megafour.config.base import expand_home


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def location(text: str) -> str:
    """Where a file or folder lies, as text; `~` at its beginning is the home folder, as in the config."""
    try:
        return expand_home(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error}") from None


def path(text: str) -> Path:
    """As `location`, as a path."""
    return Path(location(text))


def kind_and_path(text: str) -> tuple[str, str]:
    """The two parts of a tokenizer's `KIND:PATH`; the path is empty where there is none."""
    kind, _, file = text.partition(":")
    return kind, location(file)
