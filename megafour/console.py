"""Standard output and error, and the arguments, of every process of ours: what they cannot show or take ends no run."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from typing import TextIO


class OutputError(Exception):
    """Standard output cannot take what a command was called for."""


class Descriptor(io.FileIO):
    """A file descriptor that may lose what is written to it: on a full disk, without a reader, or closed."""

    def __init__(self, number: int, *, tolerant: bool) -> None:
        """Wrap an open descriptor, which stays open.

        Args:
            number: the descriptor.
            tolerant: drop what cannot be written; False raises OutputError, or BrokenPipeError without a reader.
        """
        super().__init__(number, "w", closefd=False)
        self._tolerant = tolerant

    def write(self, data: object, /) -> int:
        """Write bytes; returns how many of them the caller need not write again."""
        size = memoryview(data).nbytes      # type: ignore[arg-type]
        try:
            written = super().write(data)   # type: ignore[arg-type]
        except OSError as error:
            if self._tolerant:
                return size
            if isinstance(error, BrokenPipeError):
                raise
            raise OutputError(f"standard output cannot be written: {error.strerror or error}") from None
        return size if written is None and self._tolerant else written   # None: it would block


def open_console(*, tolerant: bool) -> None:
    """Let standard output and error replace what the console's encoding lacks, whatever the locale says.

    Standard error never fails. A stream that somebody else has put in place (a test, a notebook) is left alone. A
    descriptor that was closed when the process began leads to the null device: the next file that is opened would
    take its number, and with it every line that a library prints.

    Args:
        tolerant: whether standard output drops what cannot be written (a full disk, a reader that has gone). False
            raises (see `Descriptor`): for a command whose output is what it was called for.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)      # takes the lowest number that is free: this one
    sys.stdout = _console(sys.stdout, sys.__stdout__, 1, tolerant)
    sys.stderr = _console(sys.stderr, sys.__stderr__, 2, True)


def _console(now: TextIO | None, first: TextIO | None, number: int, tolerant: bool) -> TextIO:
    if now is not None and now is not first:
        return now
    raw = Descriptor(number, tolerant=tolerant)
    direct = isinstance(now, io.TextIOWrapper) and now.write_through       # python -u
    if now is not None:
        with contextlib.suppress(OSError, ValueError):
            now.flush()
    return io.TextIOWrapper(raw if direct else io.BufferedWriter(raw),      # type: ignore[type-var]
                            encoding=now.encoding if now is not None else "utf-8", errors="replace",
                            line_buffering=number == 2 or raw.isatty(), write_through=direct)


def drop_output(stream: TextIO | None = None) -> None:
    """Lead a stream, or standard output, to the null device: nobody reads it, and the flush at exit must not fail."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, (stream or sys.stdout).fileno())
        os.close(null)


def use_utf8() -> None:
    """Start Python again in its UTF-8 mode where the locale would read arguments and file names as something else.

    A name from a UTF-8 config could not be opened there. Call it first, and only in a process whose command line is
    this one's: it replaces the program.
    """
    if not sys.executable or sys.flags.utf8_mode or sys.getfilesystemencoding().replace("-", "").lower() == "utf8":
        return
    os.execve(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]], {**os.environ, "PYTHONUTF8": "1"})


def not_text(arguments: Sequence[str]) -> str | None:
    """What is wrong with the first argument whose bytes are not UTF-8 text; None where all are.

    Such an argument could be neither printed nor written to a config.
    """
    for number, word in enumerate(arguments, 1):
        try:
            word.encode("utf-8")
        except UnicodeEncodeError:
            shown = os.fsencode(word).decode("utf-8", "backslashreplace")
            return f"argument {number}, {shown[:80]}, is not UTF-8 text; write it in UTF-8"
    return None
