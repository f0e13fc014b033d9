"""Being asked to stop: SIGTERM and SIGUSR1 become a flag that the end of a step looks at, and so does a `stop` file."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Whether this process was asked to stop; a context manager, which restores the former handlers.

    The handler only sets a flag: a signal may come in the middle of a collective. Ranks agree at the end of the step.
    """

    def __init__(self, stop_file: Path | None = None, look_every: float = 1.0) -> None:
        """Watch the signals, and `stop_file` where it is given (on one rank: it lies on a shared disk)."""
        self.reason: str | None = None
        """What asked first: `SIGTERM`, `SIGUSR1` or the file; None while nothing did."""
        self._file, self._every, self._looked = stop_file, look_every, -float("inf")
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in SIGNALS:
            self._former[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self.restore()

    def restore(self) -> None:
        """Give the signals back their former handlers."""
        for number, former in self._former.items():
            signal.signal(number, former if former is not None else signal.SIG_DFL)
        self._former.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.reason = self.reason or signal.Signals(number).name

    def asked(self) -> bool:
        """Whether a stop was asked for; looks for the file at most once in `look_every` seconds."""
        if self.reason is None and self._file is not None and time.monotonic() - self._looked >= self._every:
            self._looked = time.monotonic()
            if self._file.exists():
                self.reason = f"the file {self._file}"
        return self.reason is not None
