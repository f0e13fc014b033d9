"""Dynamic loss scaling for fp16; 1 for every other precision."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LossScaler:
    """Doubles after `interval` finite steps in a row, halves after one that is not (Micikevicius et al. 2018, 3.2)."""

    dynamic: bool = False
    scale: float = 1.0
    interval: int = 1000
    good_steps: int = 0

    @classmethod
    def for_precision(cls, precision: str) -> LossScaler:
        """A dynamic scaler from 2^16 for fp16, none otherwise."""
        return cls(dynamic=True, scale=2.0**16) if precision == "fp16" else cls()

    @property
    def may_overflow(self) -> bool:
        """Whether a step that is not finite is this scaler's own search for the largest scale."""
        return self.dynamic and self.scale > 1.0

    def update(self, finite: bool) -> None:
        """Adapt to the outcome of a step; a power of two throughout, so that scaling rounds nothing."""
        if not self.dynamic:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale = max(self.scale / 2, 1.0)
        elif self.good_steps >= self.interval:
            self.scale, self.good_steps = min(self.scale * 2, 2.0**24), 0

    def state_dict(self) -> dict[str, float]:
        """Scale and the count of finite steps."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore what `state_dict` gave; a run that does not scale ignores it."""
        if self.dynamic:
            self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])
