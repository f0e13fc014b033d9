"""Steps whose gradient norm stands far out of those before it: skipped, so that one bad batch costs no run."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from megafour.config.schema import TrainConfig

SMALLEST = 1e-6
"""Least standard deviation that is assumed, as a share of the mean: norms that are all equal make no rounding a
spike."""


@dataclass
class SpikeGuard:
    """The gradient norms, before clipping, of the last steps that were applied; survives in every checkpoint.

    A skipped step's norm is not taken in: it would hide the next spike. A lasting change of level therefore ends the
    run by train.max_skipped_steps, where a person must judge.
    """

    deviations: float
    """A step is skipped when its norm exceeds the mean by more than so many standard deviations."""
    norms: deque[float]
    """As many as the window holds at most; until it is full no step is skipped."""

    @classmethod
    def of(cls, config: TrainConfig) -> SpikeGuard | None:
        """The guard that train.spike_deviations asks for; None: none."""
        if config.spike_deviations is None:
            return None
        return cls(config.spike_deviations, deque(maxlen=config.spike_window))

    def judge(self, norm: float) -> str | None:
        """What is wrong with a step of this norm, in words; None, and the norm is taken in, when nothing is."""
        if len(self.norms) == self.norms.maxlen:
            mean = statistics.fmean(self.norms)
            deviation = max(statistics.pstdev(self.norms, mean), SMALLEST * mean)
            if norm > mean + self.deviations * deviation:
                return (f"gradient norm {norm:.6g} is {(norm - mean) / deviation:.1f} standard deviations above the "
                        f"mean of the last {len(self.norms)} steps (mean {mean:.6g}, deviation {deviation:.6g}, "
                        f"train.spike_deviations={self.deviations:g})")
        self.norms.append(norm)
        return None

    def state_dict(self) -> dict[str, list[float]]:
        """The norms, oldest first; JSON keeps every bit of them."""
        return {"norms": list(self.norms)}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """Restore what `state_dict` gave; the newest ones, where the window is shorter now."""
        self.norms.clear()
        self.norms.extend(float(norm) for norm in state["norms"])
