"""The forward half of a pair, on a thread of its own beside the backward half."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from megafour.comm.group import Lane
from megafour.comm.waits import Waits

T = TypeVar("T")


@dataclass(frozen=True)
class Beside:
    """Runs work on the second lane: what it sends goes over the twins of the layers' groups (`Mesh.lane`)."""

    lane: Lane
    waits: Waits

    def start(self, work: Callable[[], T]) -> Callable[[], T]:
        """Begin, and return what waits for the result, or raises what the work raised."""
        future: Future[T] = Future()

        def run() -> None:
            self.lane.second = True
            try:
                future.set_result(work())
            except BaseException as error:    # noqa: B036  it is raised again where the result is asked for
                future.set_exception(error)

        # A daemon: where the other half fails, this one may wait for ranks that wait for the end of this process.
        threading.Thread(target=run, name="forward-half", daemon=True).start()

        def join() -> T:
            since = time.perf_counter()
            result = future.result()
            if self.waits.beside is not None:     # of its waits those count that this thread had to wait for
                self.waits.seconds += min(self.waits.beside.take(), time.perf_counter() - since)
            return result

        return join
