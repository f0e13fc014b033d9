"""Who sees whom, by global position, and how a pair of position lists falls into blocks that a kernel can run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megafour.sizes import PRODUCTION, Sizes


class Kind(StrEnum):
    """What a block needs of the kernel."""

    FULL = "full"
    """Every row sees every key."""
    CAUSAL = "causal"
    """As many keys as rows; row i sees keys 0 to i."""
    TILE = "tile"
    """Row i sees keys low[i] to high[i] - 1."""


@dataclass(frozen=True)
class Block:
    """Rows of the local queries on a range of keys, of some samples of the micro-batch."""

    samples: slice
    rows: slice
    keys: slice
    kind: Kind
    low: np.ndarray | None = None
    high: np.ndarray | None = None

    def visible(self, device: torch.device) -> Tensor | None:
        """The mask of a tile, boolean `[rows, keys]`; None for a block that needs none."""
        if self.low is None or self.high is None:
            return None
        low, high = (torch.from_numpy(x).to(device)[:, None] for x in (self.low, self.high))
        key = torch.arange(self.keys.stop - self.keys.start, device=device)
        return (key >= low) & (key < high)

    @property
    def pairs(self) -> int:
        """(Query, key) pairs that see each other, of one sample."""
        rows, keys = self.rows.stop - self.rows.start, self.keys.stop - self.keys.start
        if self.low is not None and self.high is not None:
            return int((self.high - self.low).sum())
        return rows * (rows + 1) // 2 if self.kind is Kind.CAUSAL else rows * keys


@dataclass
class Mask:
    """Causal ∧ same document ∧ within a window, described once, by global position, and evaluated block by block.

    It holds the blocks that were asked for, so that every layer with the same mask shares them.
    """

    window: int | None = None
    """Keys that a query sees at most, its own among them; None: all before it."""
    starts: Tensor | None = None
    """int64 `[b, seq]` on the CPU: where each token's document begins; None: one document a sample."""
    sizes: Sizes = PRODUCTION
    _known: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def samples(self) -> int:
        """Samples with masks of their own; 0 where one mask is all samples'."""
        return 0 if self.starts is None else len(self.starts)

    def first_visible(self, positions: np.ndarray, sample: int = 0) -> np.ndarray:
        """The first position that each query sees, int64 like `positions`; it never falls along the sequence."""
        first = np.zeros_like(positions)
        if self.window is not None:
            first = np.maximum(first, positions - self.window + 1)
        if self.starts is not None:
            first = np.maximum(first, self.starts[sample].numpy()[positions])
        return first

    def blocks(self, queries: np.ndarray, keys: np.ndarray, name: Any) -> list[Block]:
        """The blocks that cover what `queries` see of `keys`, both ascending positions, each visible pair once.

        `name` is what the two lists are known by (any hashable value): asked again, the same blocks come back.
        """
        if name not in self._known:
            if self.starts is None:
                self._known[name] = list(self._cut(queries, keys, 0, slice(None)))
            else:
                self._known[name] = [block for i in range(len(self.starts))
                                     for block in self._cut(queries, keys, i, slice(i, i + 1))]
        return self._known[name]

    def meet(self, queries: list[slice], keys: list[slice]) -> bool:
        """Whether any query sees any key, both given as runs of positions."""
        for q in queries:
            firsts = [int(self.first_visible(np.array([q.start]), i)[0]) for i in range(max(self.samples, 1))]
            if any(k.start < q.stop and min(firsts) < k.stop for k in keys):
                return True
        return False

    def remembered(self, name: Any, make: Any) -> Any:
        """What `make()` gave when this was first asked for under `name`."""
        if name not in self._known:
            self._known[name] = make()
        return self._known[name]

    def _cut(self, queries: np.ndarray, keys: np.ndarray, sample: int, samples: slice) -> Iterator[Block]:
        low = np.searchsorted(keys, self.first_visible(queries, sample), side="left")
        high = np.searchsorted(keys, queries, side="right")
        return staircase(low, high, samples, self.sizes)


@dataclass
class Masks:
    """The masks of one micro-batch, one for each window; without documents those of every micro-batch."""

    starts: Tensor | None = None
    """As `Mask.starts`."""
    sizes: Sizes = PRODUCTION
    _masks: dict[int | None, Mask] = field(default_factory=dict, repr=False)

    def within(self, window: int | None) -> Mask:
        """The mask of a layer with this window."""
        return self._masks.setdefault(window, Mask(window, self.starts, self.sizes))


def staircase(low: np.ndarray, high: np.ndarray, samples: slice = slice(None),
              sizes: Sizes = PRODUCTION) -> Iterator[Block]:
    """Blocks that together hold key j of row i exactly where low[i] <= j < high[i]; neither bound ever falls.

    Rows with one lower bound whose upper bound stands still are one rectangle; where it grows by one a row, they are a
    rectangle and a causal square. Whatever else there is goes into tiles of at most `sizes.mask_rows` rows.
    """
    short = sizes.short_run
    runs = list(_runs(low, high))
    few = len(runs) <= short
    pending: list[tuple[int, int]] = []
    for begin, end, regular in runs:
        if regular and (few or end - begin >= short):
            yield from _tiles(pending, low, high, samples, sizes.mask_rows)
            pending = []
            yield from _run(begin, end, low, high, samples)
        else:
            pending.append((begin, end))
    yield from _tiles(pending, low, high, samples, sizes.mask_rows)


def _runs(low: np.ndarray, high: np.ndarray) -> Iterator[tuple[int, int, bool]]:
    """[begin, end) of rows, and whether their lower bound stands still and the upper one stands or grows by one."""
    grows = np.diff(high)
    # A row that sees nothing is no part of a growing run: its own key is not there.
    regular = (np.diff(low) == 0) & ((grows == 0) | ((grows == 1) & (low[:-1] < high[:-1])))
    kind = np.where(regular, grows, -1)
    edges = [0, *(np.flatnonzero(np.diff(kind)) + 1).tolist(), len(kind)]
    taken = 0
    for first, last in zip(edges, edges[1:], strict=False):    # steps of one kind; they touch rows first to last
        end = last + 1 if last > first and kind[first] >= 0 else last    # an irregular step's last row may open a run
        if taken < end:
            yield taken, end, bool(kind[first] >= 0)
            taken = end
    if taken < len(low):
        yield taken, len(low), False


def _run(begin: int, end: int, low: np.ndarray, high: np.ndarray, samples: slice) -> Iterator[Block]:
    """One run of `_runs` as at most a rectangle and a square."""
    first, rows = int(low[begin]), slice(begin, end)
    grows = end - begin > 1 and high[end - 1] > high[begin]
    until = int(high[begin]) - grows
    if first < until:
        yield Block(samples, rows, slice(first, until), Kind.FULL)
    if grows:
        yield Block(samples, rows, slice(until, until + end - begin), Kind.CAUSAL)


def _tiles(runs: list[tuple[int, int]], low: np.ndarray, high: np.ndarray, samples: slice,
           most: int) -> Iterator[Block]:
    """Adjacent short runs in tiles of at most `most` rows."""
    joined: list[list[int]] = []
    for begin, end in runs:
        if joined and joined[-1][1] == begin:
            joined[-1][1] = end
        else:
            joined.append([begin, end])
    for begin, end in joined:
        begin += int(np.argmax(low[begin:end] < high[begin:end]))    # rows before the first that sees a key
        for row in range(begin, end, most):
            yield from _tile(row, min(row + most, end), low, high, samples, most)


def _tile(begin: int, end: int, low: np.ndarray, high: np.ndarray, samples: slice, most: int) -> Iterator[Block]:
    """Rows [begin, end): what all see as a rectangle, the edges as tiles; halved where an edge is too wide for one."""
    left, right = int(low[begin]), int(high[end - 1])
    inner, outer = int(low[end - 1]), int(high[begin])
    if right - left <= 2 * most:
        edges, whole = [(left, right)], None
    elif max(inner - left, right - outer) <= 2 * most and inner <= outer:
        edges, whole = [(left, inner), (outer, right)], (inner, outer)
    else:
        middle = (begin + end) // 2
        yield from _tile(begin, middle, low, high, samples, most)
        yield from _tile(middle, end, low, high, samples, most)
        return
    rows = slice(begin, end)
    if whole is not None and whole[0] < whole[1]:
        yield Block(samples, rows, slice(*whole), Kind.FULL)
    for first, last in edges:
        if first < last:
            width = last - first
            yield Block(samples, rows, slice(first, last), Kind.TILE, np.clip(low[rows] - first, 0, width),
                        np.clip(high[rows] - first, 0, width))
