"""TensorBoard and wandb at their best effort: beside training, where no failure or hang of theirs reaches the run."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

PATIENCE = 60.0
"""Seconds that one call of a tracker may take while training goes on, its first connection included."""
ENDING = 5.0
"""Seconds that all trackers together get to finish, once the run has written how it ended."""


class Sink(Protocol):
    """Takes the numbers of a step. All but `abandon` is called from one thread."""

    def begin(self) -> str | None:
        """Begin, slow imports and connections included; returns what the log should say of it."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take finite numbers by name."""

    def close(self) -> None:
        """Write out what is left."""

    def abandon(self) -> None:
        """Give up at once, from another thread: nothing that it has started may hold the end of this process."""


class Tracker:
    """Feeds a sink from a thread of its own. A sink that fails or hangs is named in one line, once, and left alone."""

    def __init__(self, name: str, sink: Sink, say: Callable[[str], None], capacity: int = 10_000,
                 patience: float = PATIENCE) -> None:
        """Start the thread, which opens the sink.

        Args:
            say: takes the line.
            capacity: steps that may wait for the sink; further ones are dropped.
            patience: seconds that one of its calls may take before the end.
        """
        self._name, self._sink, self._say, self._patience = name, sink, say, patience
        self._queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(capacity)
        self._off = threading.Event()
        self._since: float | None = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Hand over the numbers of a step; never waits."""
        since = self._since
        if since is not None and time.monotonic() - since > self._patience:
            self._give_up(f"it has not answered for {self._patience:g} s")
        if not self._off.is_set():
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait((step, dict(values)))

    def finish(self) -> None:
        """Ask the sink to end after what it has been given; never waits."""
        while True:
            try:
                self._queue.put_nowait(None)
                return
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self._queue.get_nowait()

    def join(self, seconds: float) -> None:
        """Wait for that end at most so long, then give the sink up."""
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            self._give_up(f"it did not finish within {ENDING:g} s of the run's end; metrics.jsonl has every step")

    def _run(self) -> None:
        try:
            note = self._sink.begin()
            if note and not self._off.is_set():
                self._say(f"{self._name}: {note}")
            self._since = None
            while (item := self._queue.get()) is not None:
                self._since = time.monotonic()
                self._sink.log(*item)
                self._since = None
            self._sink.close()
        except BaseException as error:      # wandb ends some failures with SystemExit
            self._give_up(f"{type(error).__name__}: {error}")

    def _give_up(self, why: str) -> None:
        if not self._off.is_set():
            self._off.set()
            self._say(f"{self._name} is off: {' '.join(why.split())}")
            with contextlib.suppress(Exception):
                self._sink.abandon()


def close_all(trackers: Sequence[Tracker], seconds: float = ENDING) -> None:
    """Let trackers finish, all of them together within so many seconds."""
    end = time.monotonic() + seconds
    for tracker in trackers:
        tracker.finish()
    for tracker in trackers:
        tracker.join(end - time.monotonic())


class TensorBoard:
    """Event files in a folder."""

    def __init__(self, folder: Path, start_step: int) -> None:
        self._folder, self._start_step = folder, start_step
        self._writer: Any = None

    def begin(self) -> None:
        """Create the event file. Events of later steps, from before a resume, are hidden."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=self._start_step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()

    def abandon(self) -> None:
        """Nothing to end: its threads are daemons."""


class Wandb:
    """A run in a Weights & Biases project, held by a process of its own (`trainer/wandb_process.py`).

    wandb brings exit hooks, threads and a service that may each wait for minutes for a server. Ending that process ends
    them all, and what they print goes to its own log instead of the console.
    """

    def __init__(self, project: str, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        """Prepare it.

        Args:
            project, name: of the run there.
            folder: of this run; wandb keeps its files in it, and `logs/wandb.log` has what it prints.
            config: shown with the run.
        """
        self._settings = dict(project=project, name=name, dir=str(folder), config=dict(config), resume="allow")
        self._log = folder / "logs" / "wandb.log"
        self._process: subprocess.Popen[str] | None = None
        self._abandoned = False

    def begin(self) -> str | None:
        """Start the process and the run; returns the run's address."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join(part for part in sys.path if part)
        with open(self._log, "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "megafour.trainer.wandb_process"], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=output, encoding="utf-8", start_new_session=True,
                env={**os.environ, "PYTHONPATH": path})
        if self._abandoned:
            self.abandon()
        return self._ask("init", self._settings)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a step."""
        self._ask("log", [step, dict(values)])

    def close(self) -> None:
        """End the run there, and the process."""
        self._ask("finish", None)
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def abandon(self) -> None:
        """Kill the process, with what runs in its session."""
        self._abandoned = True
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _ask(self, what: str, value: Any) -> str | None:
        """Send a request and wait for its answer.

        Raises:
            RuntimeError: with what wandb raised, or because the process has ended.
        """
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps([what, value], default=str) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"its process ended with exit code {self._process.wait()} (see {self._log})")
        error, note = json.loads(answer)
        if error is not None:
            raise RuntimeError(f"{error} (see {self._log})")
        return note
