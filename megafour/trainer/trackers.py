"""TensorBoard and wandb at their best effort: on a thread of their own, where no failure or hang reaches the run."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol


class Sink(Protocol):
    """Takes the numbers of a step."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take finite numbers by name."""

    def close(self) -> None:
        """Write out what is left."""


class Tracker:
    """Feeds a sink from a thread. The first failure is said once, then the sink is left alone."""

    def __init__(self, name: str, make: Callable[[], Sink], say: Callable[[str], None], capacity: int = 10_000) -> None:
        """Start the thread, which makes the sink, slow imports included."""
        self._name, self._make, self._say = name, make, say
        self._queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(capacity)
        self._failed = False
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Hand over the numbers of a step; when the sink lags far behind they are dropped."""
        if not self._failed:
            try:
                self._queue.put_nowait((step, dict(values)))
            except queue.Full:
                pass

    def close(self, timeout: float = 20.0) -> None:
        """Let the sink finish, for at most `timeout` seconds."""
        end = time.monotonic() + timeout
        while self._thread.is_alive() and time.monotonic() < end:
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=0.1)
                break
        self._thread.join(max(0.0, end - time.monotonic()))

    def _run(self) -> None:
        try:
            sink = self._make()
            while (item := self._queue.get()) is not None:
                sink.log(*item)
            sink.close()
        except BaseException as error:      # wandb ends some failures with SystemExit
            self._failed = True
            self._say(f"{self._name} is off: {type(error).__name__}: {error}")


class TensorBoard:
    """Event files in a folder."""

    def __init__(self, folder: Path, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Events of later steps, from before a resume, are hidden.
        self._writer = SummaryWriter(str(folder), purge_step=start_step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class Wandb:
    """A run in a Weights & Biases project."""

    def __init__(self, project: str, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(project=project, name=name, dir=str(folder), config=dict(config), resume="allow")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """End the run there."""
        self._run.finish()
