"""What a rank waits for at this moment, and how long it has waited altogether."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Waits:
    """One rank's waiting: what it waits for now, for the report of a hang, and the sum, for the search of a slow rank.

    Shared by all groups of a mesh. Gloo's transfers between two ranks are not in torch's flight recorder, and a
    timeout that is set later does not reach them; so the primitives say themselves what they wait for.
    """

    phase: str = "start"
    """What the rank is doing: forward, backward, optimizer, evaluation, save, …; set by whoever drives it."""
    step: int = 0
    """The step that it is doing it for, counted from 1; 0 before the first."""
    now: Wait | None = None
    """What it waits for; None while it computes."""
    seconds: float = 0.0
    """Waited and moved on the host since `take`."""
    without_core: Callable[[], float] | None = field(default=None, repr=False)
    """Seconds for which this thread has waited for a core so far; what falls into a wait is taken out of `seconds`, so
    that whoever subtracts both from a step subtracts nothing twice. None: not taken."""
    on_device: bool = False
    """Take the times on the GPU's stream: there the host posts a collective and runs on."""
    spans: list[tuple[Any, Any]] = field(default_factory=list, repr=False)
    """Events around each wait of the stream since `take`."""
    beside: Waits | None = None
    """Those of the thread that computes beside the main one, where there may be one."""

    @property
    def all_now(self) -> list[Wait]:
        """What its threads wait for, the main one first."""
        return [wait for wait in (self.now, self.beside.now if self.beside is not None else None) if wait is not None]

    def take(self) -> float:
        """Seconds waited since the last call; the stream must have come to the last wait."""
        total, self.seconds = self.seconds, 0.0
        if self.on_device and self.spans:
            self.spans[-1][1].synchronize()
            total = sum(begin.elapsed_time(end) for begin, end in self.spans) / 1e3
        self.spans.clear()
        return total


class Wait:
    """One wait, as a context manager around what blocks; may be entered again, and one may lie in another."""

    def __init__(self, waits: Waits, primitive: str, axis: str, ranks: tuple[int, ...], entry: Any = None) -> None:
        """Prepare it.

        Args:
            primitive, axis: what is waited for, in the ledger's words.
            ranks: global ranks that take part.
            entry: the ledger's, where traffic is counted; it takes the time too.
        """
        self.waits, self.primitive, self.axis, self.ranks, self.entry = waits, primitive, axis, ranks, entry
        self.since = 0.0
        self._outer: Wait | None = None
        self._without_core = 0.0
        self._begin: Any = None

    def __enter__(self) -> Wait:
        outer = self.waits.now
        if outer is None and self.waits.without_core is not None:
            self._without_core = self.waits.without_core()
        self.since = time.perf_counter()
        self._outer, self.waits.now = outer, self       # from here on the hang watch sees it
        if self.waits.on_device:
            self._begin = _mark()
        return self

    def __exit__(self, *error: object) -> None:
        waits = self.waits
        waits.now = self._outer
        seconds = time.perf_counter() - self.since
        if self.entry is not None:
            self.entry.seconds += seconds
        if waits.now is None:       # the outer one counts for both
            waits.seconds += seconds
            if waits.without_core is not None:
                waits.seconds -= waits.without_core() - self._without_core
            if self._begin is not None:
                waits.spans.append((self._begin, _mark()))
        self._begin = None

    @property
    def words(self) -> str:
        """`all_reduce over tp (ranks 0, 1)`."""
        return f"{self.primitive} over {self.axis} (ranks {', '.join(map(str, self.ranks))})"


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
