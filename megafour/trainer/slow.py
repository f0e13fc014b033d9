"""Ranks that compute longer than those which do the same work: named, since all others wait for them."""

from __future__ import annotations

import os
import statistics
import threading
from dataclasses import dataclass, field
from typing import IO

import torch

from megafour.comm.objects import gather_objects
from megafour.mesh import Mesh
from megafour.trainer.step import control_sum, on_host

SHARE = 0.2
"""How far above the median of its stage a rank's compute is worth a line."""
ALONE = 1.0
"""The same, above the median of all, for a rank that is a stage by itself: stages differ by what they hold."""
LEAST = 0.01
"""Seconds a step below which a difference is a busy machine's noise."""
ON_DEVICE = 10
"""Steps over which the time is taken on GPUs: two events for each collective are not free."""


class CoreWait:
    """Seconds for which the thread that made this has been ready to run and waited for a core.

    From Linux's scheduler (`/proc/PID/task/TID/schedstat`); 0 where there is none. Sleeping and reading are no such
    waits.
    """

    def __init__(self) -> None:
        try:
            self._file: IO[bytes] | None = open(f"/proc/self/task/{threading.get_native_id()}/schedstat", "rb", 0)
        except OSError:
            self._file = None

    def __call__(self) -> float:
        """Seconds so far."""
        if self._file is None:
            return 0.0
        return int(os.pread(self._file.fileno(), 100, 0).split()[1]) / 1e9


@dataclass
class SlowRanks:
    """The time that each rank spends on a step without waiting for others: data, compute, the host's own work.

    On a machine with more ranks than cores a rank also waits for a core, one more than another by chance: that does not
    count, for the rank itself is not slow.
    """

    mesh: Mesh
    every: int
    """Steps over which the time is taken, and between two looks at everyone's; 0: never."""
    seconds: float = 0.0
    steps: int = 0
    """How many steps these are, and, in `passed`, how many there were since the last look."""
    passed: int = 0
    names: list[tuple[str, int]] = field(default_factory=list)
    """Every rank in words, and its pipeline rank."""

    def __post_init__(self) -> None:
        if self.mesh.world == 1:
            self.every = 0
        self._core = CoreWait() if self.every and self.mesh.device.type == "cpu" else None
        self._core_before = self._core_seconds = 0.0
        self.mesh.waits.without_core = self._core

    @property
    def _measured(self) -> bool:
        """Whether this step counts: on GPUs, where events on the stream take the time, only the last few do."""
        return self.every > 0 and (self.mesh.device.type == "cpu" or self.passed >= self.every - ON_DEVICE)

    def begin(self) -> None:
        """A step begins."""
        if self._measured:
            self.mesh.waits.on_device = self.mesh.device.type != "cpu"
            self.mesh.waits.take()
            self._core_before = self._core() if self._core is not None else 0.0

    def end(self, seconds: float) -> list[str]:
        """A step has ended that took so many seconds. All ranks call it together.

        Returns:
            a line for each slow rank, when it is time to look; the same on every rank.
        """
        if self._measured:
            core = self._core() - self._core_before if self._core is not None else 0.0
            self.seconds += seconds - self.mesh.waits.take() - core
            self._core_seconds += core
            self.steps += 1
        self.passed += 1
        if not self.every or self.passed < self.every:
            return []
        self.mesh.waits.on_device = False
        found = torch.zeros(2, self.mesh.world, dtype=torch.float64, device=self.mesh.device)
        found[0, self.mesh.rank], found[1, self.mesh.rank] = self.seconds / self.steps, self._core_seconds / self.steps
        self.seconds, self._core_seconds, steps, self.steps, self.passed = 0.0, 0.0, self.steps, 0, 0
        if not self.names:
            self.names = gather_objects((self.mesh.describe(), self.mesh.coords["pp"]), self.mesh.group("world"))
        own, core_waits = on_host(control_sum(found, self.mesh, "world"), self.mesh)
        return slow_lines(own, self.names, steps, core_waits)


def slow_lines(seconds: list[float], names: list[tuple[str, int]], steps: int,
               core_waits: list[float] | None = None) -> list[str]:
    """`slow: rank 3 (dp1-tp0): 1.42 s of compute a step, median 1.01 s`, the slowest first.

    Args:
        seconds: of each rank, a step.
        names: every rank in words, and its pipeline rank.
        steps: over which the seconds were taken.
        core_waits: seconds a step for which each rank waited for a core, not among its `seconds`: a rank that is put
            off so often also computes longer (cold caches), so only more than that counts.
    """
    lines, core_waits = [], core_waits or [0.0] * len(seconds)
    for rank, (name, stage) in enumerate(names):
        peers = [s for s, (_, other) in zip(seconds, names, strict=True) if other == stage]
        alone = len(peers) == 1
        # The lower one of two: else a rank would have to be half as slow again as its only peer.
        median = statistics.median_low(seconds if alone else peers)
        if seconds[rank] > median + max(LEAST, core_waits[rank], (ALONE if alone else SHARE) * median):
            whose = "of its stage" if 1 < len(peers) < len(names) else "of all ranks"
            lines.append((seconds[rank] / median, f"slow: {name}: {seconds[rank]:.3g} s of compute a step, median "
                                                  f"{whose} {median:.3g} s (over {steps} steps)"))
    return [line for _, line in sorted(lines, reverse=True)]
