"""The traffic ledger: calls and bytes per rank, by (primitive, axis, phase)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field


@dataclass
class Ledger:
    """Counts what this rank moves, by convention rather than on the wire (n = group size, B = bytes of the tensor).

    all-reduce 2(n-1)/n·B; all-gather and reduce-scatter (n-1)·shard; all-to-all what goes to the other ranks;
    point-to-point its payload at the sender; rooted calls (broadcast, scatter at the root; reduce, gather at the
    senders) the payload at the sender. Control scalars (counts, flags, norms) are kept apart under phase `control`.
    """

    phase: str = "forward"
    """What the step is doing now; set by whoever drives the step."""
    counts: dict[tuple[str, str, str], list[float]] = field(default_factory=lambda: defaultdict(lambda: [0, 0.0]))

    def record(self, primitive: str, axis: str, nbytes: float) -> None:
        """Add one call of `nbytes` bytes under the current phase."""
        entry = self.counts[(primitive, axis, self.phase)]
        entry[0] += 1
        entry[1] += nbytes

    def reset(self) -> None:
        """Forget everything, for the next step."""
        self.counts.clear()

    def rows(self) -> list[tuple[str, str, str, int, int]]:
        """Sorted (axis, primitive, phase, calls, bytes), one row for each key seen since the last reset."""
        return sorted(
            (axis, primitive, phase, int(calls), round(nbytes))
            for (primitive, axis, phase), (calls, nbytes) in self.counts.items()
        )

    def table(self) -> str:
        """The rows as aligned text, with a header."""
        lines = [f"{'axis':<10}{'primitive':<16}{'phase':<10}{'calls':>8}{'bytes':>16}"]
        lines += [f"{a:<10}{p:<16}{ph:<10}{c:>8}{b:>16,}" for a, p, ph, c, b in self.rows()]
        return "\n".join(lines)
