"""Lines for people: every rank's own log file, and a console that only one rank writes to."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from megafour.console import drop_output


class RankLog:
    """`logs/rank-N.log` of one rank. The writer's lines go to the console too.

    A line that cannot be written (a full disk, a console whose reader has gone) is lost and ends no run.
    Python's warnings and the log records of libraries go to the file as well, so that a cluster's logs say where.
    """

    def __init__(self, folder: Path, rank: int, where: str = "", *, console: bool | None = None,
                 stream: TextIO | None = None) -> None:
        """Open the log.

        Args:
            folder: where the logs lie; made if needed.
            rank: global rank, in the file's name.
            where: the rank in words, `rank 12 (pp1-tp0)`, before each of its lines on the console but the writer's.
            console: whether this rank is the console's writer; None: rank 0 is.
            stream: the console, standard output by default.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"rank-{rank}.log"
        self.console = rank == 0 if console is None else console
        self._where, self._stream = where or f"rank {rank}", stream or sys.stdout
        self._file = open(self.path, "a", buffering=1, encoding="utf-8", errors="replace")
        self._bar: Any = None
        self._handler = _Records(self)
        logging.getLogger().addHandler(self._handler)
        logging.captureWarnings(True)

    def say(self, text: str) -> None:
        """A line for the log, and on the writer for the console."""
        self.note(text)
        if self.console:
            self.show(text)

    def note(self, text: str) -> None:
        """A line for this rank's log only."""
        if not self._file.closed:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            with contextlib.suppress(OSError):
                self._file.write("".join(f"{stamp} {line}\n" for line in text.splitlines()))

    def show(self, text: str) -> None:
        """A line for the console only, above the progress bar if there is one."""
        try:
            if self._bar is not None:
                self._bar.write(text, file=self._stream)
            else:
                print(text, file=self._stream, flush=True)
        except BrokenPipeError:     # what is left in its buffer would fail again, and at exit too
            drop_output(self._stream)
        except (OSError, ValueError):
            pass

    def alarm(self, text: str) -> None:
        """A failure of this rank: in its log and, named by its rank, on standard error."""
        self.note(text)
        with contextlib.suppress(OSError, ValueError):
            print(f"{self._where}: {text}", file=sys.stderr, flush=True)

    def progress_bar(self, total: int, start: int) -> Any:
        """A tqdm bar over steps where the console is a terminal and this is its writer; None elsewhere."""
        if not self.console or not self._stream.isatty():
            return None
        try:
            from tqdm import tqdm
        except ImportError:
            return None
        self._bar = tqdm(total=total, initial=start, unit="step", file=self._stream, dynamic_ncols=True)
        return self._bar

    def close(self) -> None:
        """Flush and close; the console remains."""
        logging.getLogger().removeHandler(self._handler)
        logging.captureWarnings(False)
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        with contextlib.suppress(OSError):
            self._file.close()


class _Records(logging.Handler):
    """Log records and warnings of libraries, as lines of a rank's log."""

    def __init__(self, log: RankLog) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        try:
            self._log.note(f"{record.levelname.lower()} {record.name}: {record.getMessage()}")
        except Exception:
            self.handleError(record)
