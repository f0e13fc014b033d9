"""When each action of a real run started and ended on this rank."""

from __future__ import annotations

import time

import torch

from megafour.parallel.pipeline.actions import Work


class Recorder:
    """Takes the time of each action; on GPUs by events on the stream, so that nothing waits for the clock."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._started: list[float | torch.cuda.Event] = []
        self._ended: list[float | torch.cuda.Event] = []
        self._works: list[Work] = []

    def start(self) -> None:
        """An action begins: its inputs are here."""
        self._started.append(self._now())

    def stop(self, work: Work) -> None:
        """It has ended."""
        self._ended.append(self._now())
        self._works.append(work)

    def spans(self) -> list[tuple[str, float, float]]:
        """(action, start, end) in seconds; on CPUs of the machine's clock, on GPUs since the first action."""
        if not self._cuda:
            return [(str(w), float(a), float(b)) for w, a, b in  # type: ignore[arg-type]
                    zip(self._works, self._started, self._ended, strict=True)]
        torch.cuda.synchronize()
        first = self._started[0]
        since = [[first.elapsed_time(event) / 1e3 for event in events]  # type: ignore[union-attr, arg-type]
                 for events in (self._started, self._ended)]
        return [(str(w), a, b) for w, a, b in zip(self._works, *since, strict=True)]

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
