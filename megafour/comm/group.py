"""A named process group as a value: who is in it, where this rank stands, and the ledger that counts its traffic."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from torch.distributed import ProcessGroup

from megafour.comm.ledger import Ledger
from megafour.comm.waits import Wait, Waits

UNTIMED: AbstractContextManager[object] = nullcontext()
"""In place of a clock where nothing is waited for."""


class Lane(threading.local):
    """Which of two sets of process groups a thread's collectives go over: two threads cannot share one, for the ranks
    of a group must meet in the same order."""

    second: bool = False
    """Set by a thread that computes beside the main one."""


@dataclass(frozen=True)
class Group:
    """One axis (or derived set of axes) of the mesh, seen from one rank.

    A group of one has no process group and every primitive on it returns its input untouched: a collective that
    moves nothing would still cost 0.2 ms on gloo.
    """

    name: str
    """Axis name, as the ledger reports it (`tp`, `cp`, `dp_cp`, ...)."""
    ranks: tuple[int, ...]
    """Global ranks, in group order."""
    rank: int
    """This process's index within `ranks`."""
    pg: ProcessGroup | None = None
    """The torch process group; None exactly when the group has one member."""
    ledger: Ledger | None = field(default=None, compare=False)
    """Where traffic is recorded; None when accounting is off."""
    poster: Executor | None = field(default=None, repr=False, compare=False)
    """One thread that posts this group's point-to-point transfers, in order; None posts from the caller's.

    gloo copies a message into the socket from the thread that posts it, before anything can be computed under it.
    """
    waits: Waits = field(default_factory=Waits, compare=False, repr=False)
    """Where this rank says what it waits for."""
    twin: Group | None = field(default=None, repr=False, compare=False)
    """The same ranks over a process group of their own, for the thread of the second lane."""
    lane: Lane | None = field(default=None, repr=False, compare=False)
    """Says whose thread asks, where there is a twin."""

    @property
    def here(self) -> Group:
        """The group that this thread's collectives go over: the twin on the second lane."""
        return self.twin if self.twin is not None and self.lane is not None and self.lane.second else self

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)

    def timed(self, primitive: str, peers: Iterable[int] | None = None) -> AbstractContextManager[object]:
        """Says what its body waits for, and counts the seconds; may be entered again and again.

        `peers`: indices in the group of those who take part besides this rank; None: all.
        """
        ranks = self.ranks if peers is None else tuple(sorted({self.ranks[i] for i in (self.rank, *peers)}))
        entry = None if self.ledger is None else self.ledger.entry(primitive, self.name)
        return Wait(self.waits, primitive, self.name, ranks, entry)

    def record(self, primitive: str, nbytes: float) -> None:
        """Count one call of `primitive` that moved `nbytes` bytes by the ledger's convention."""
        if self.ledger is not None:
            self.ledger.record(primitive, self.name, nbytes)


def solo(name: str, rank: int = 0) -> Group:
    """The group of one: this process alone."""
    return Group(name=name, ranks=(rank,), rank=0)
