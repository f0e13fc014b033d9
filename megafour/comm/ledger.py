"""The traffic ledger: calls, bytes and seconds per rank, by (primitive, axis, phase)."""

from __future__ import annotations

from dataclasses import dataclass, field

CONTROL = "control"
"""The phase of counts, flags and norms, which are kept apart."""


@dataclass
class Entry:
    """What one (primitive, axis, phase) has cost this rank."""

    calls: int = 0
    nbytes: float = 0.0
    seconds: float = 0.0
    """Spent in posting and in waiting: what ran beside the compute costs nothing."""


@dataclass
class Ledger:
    """Counts what this rank moves, by convention rather than on the wire (n = group size, B = bytes of the tensor).

    all-reduce 2(n-1)/n·B; all-gather and reduce-scatter (n-1)·shard; all-to-all what goes to the other ranks;
    point-to-point its payload at the sender; rooted calls (broadcast, scatter at the root; reduce, gather at the
    senders) the payload at the sender. Control scalars (counts, flags, norms) are kept apart under phase `control`.
    """

    phase: str = "forward"
    """What the step is doing now; set by whoever drives the step."""
    counts: dict[tuple[str, str, str], Entry] = field(default_factory=dict)

    def entry(self, primitive: str, axis: str) -> Entry:
        """Where calls of `primitive` on `axis` are counted in the current phase."""
        return self.counts.setdefault((primitive, axis, self.phase), Entry())

    def record(self, primitive: str, axis: str, nbytes: float) -> None:
        """Add one call of `nbytes` bytes under the current phase."""
        entry = self.entry(primitive, axis)
        entry.calls += 1
        entry.nbytes += nbytes

    def reset(self) -> None:
        """Forget everything, for the next step."""
        self.counts.clear()

    def rows(self) -> list[tuple[str, str, str, int, int]]:
        """Sorted (axis, primitive, phase, calls, bytes), one row for each key with a call since the last reset."""
        return sorted((axis, primitive, phase, entry.calls, round(entry.nbytes))
                      for (primitive, axis, phase), entry in self.counts.items() if entry.calls)

    def totals(self) -> dict[tuple[str, str], Entry]:
        """(axis, primitive) -> all phases but `control` together; without calls where this rank only received."""
        out: dict[tuple[str, str], Entry] = {}
        for (primitive, axis, phase), entry in sorted(self.counts.items()):
            if phase != CONTROL:
                had = out.setdefault((axis, primitive), Entry())
                had.calls, had.nbytes = had.calls + entry.calls, had.nbytes + entry.nbytes
                had.seconds += entry.seconds
        return out
