"""Being asked to stop: by SIGTERM, SIGUSR1, a `stop` file or torchrun's death, all seen at the end of a step."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Those that ask a run to stop."""


class StopRequest:
    """Whether this process was asked to stop; a context manager, which restores the former handlers.

    The handler only sets a flag: a signal may come in the middle of a collective. Ranks agree at the end of the step.
    A run that has said how it ended calls `ignore`: whoever asks again must not turn its exit code into the signal's,
    which torchrun takes for a failure and starts it again.
    """

    def __init__(self, stop_file: Path | None = None, look_every: float = 1.0, launcher: int | None = None) -> None:
        """Watch the signals, and what else is given.

        Args:
            stop_file: on one rank, for it lies on a shared disk.
            look_every: seconds between two looks at it.
            launcher: the process that started this one and whose death asks, too.
        """
        self.watch(stop_file, launcher)
        self.reason: str | None = None
        """What asked first: `SIGTERM`, `SIGUSR1`, the file or that death; None while nothing did."""
        self._every, self._looked = look_every, -float("inf")
        self._former: dict[signal.Signals, Any] = {}

    def watch(self, stop_file: Path | None = None, launcher: int | None = None) -> None:
        """Look at these beside the signals, once the run's folder is known."""
        self._file, self._launcher = stop_file, launcher

    def listen(self) -> StopRequest:
        """Let the signals ask from now on. A program calls it first: torch takes seconds to import."""
        for number in SIGNALS:
            self._former[number] = signal.signal(number, self._handle)
        return self

    def __enter__(self) -> StopRequest:
        return self.listen()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self.restore()

    def restore(self) -> None:
        """Give the signals back their former handlers."""
        for number, former in self._former.items():
            signal.signal(number, former if former is not None else signal.SIG_DFL)
        self._former.clear()

    def ignore(self) -> None:
        """Ignore these signals, and Ctrl-C, until `restore`, which a program that ends now does not call.

        Without effect after `restore`.
        """
        if self._former:
            for number in (*SIGNALS, signal.SIGINT):
                former = signal.signal(number, signal.SIG_IGN)
                self._former.setdefault(number, former)

    @staticmethod
    def torchrun() -> int | None:
        """The agent that started this process; None where another launcher did.

        A bare SIGKILL or SIGUSR1 ends it and leaves its ranks behind, which would train on with nobody to end them, and
        hold the run's folder against the next start. A shell that exits does not matter: without torchrun nobody
        watches the ranks in the first place.
        """
        return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.reason = self.reason or signal.Signals(number).name

    def asked(self) -> bool:
        """Whether a stop was asked for; looks for the file at most once in `look_every` seconds."""
        if self.reason is None and self._launcher is not None and os.getppid() != self._launcher:
            self.reason = f"the death of torchrun (pid {self._launcher})"
        if self.reason is None and self._file is not None and time.monotonic() - self._looked >= self._every:
            self._looked = time.monotonic()
            if self._file.exists():
                self.reason = f"the file {self._file}"
        return self.reason is not None
