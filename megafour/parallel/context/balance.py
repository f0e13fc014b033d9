"""How evenly attention's work falls on the ranks: a pure function of layout, mask and method."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from megafour.comm.group import Group
from megafour.config.rules_context import ulysses_ranks
from megafour.config.schema import Config
from megafour.parallel.context.double_ring import DoubleRing
from megafour.parallel.context.layout import LAYOUTS, Layout
from megafour.parallel.context.mask import Mask


@dataclass(frozen=True)
class Balance:
    """The slowest rank's (query, key) pairs over the mean rank's: 1 is level, cp is all work on one rank."""

    whole: float
    """Over the whole attention: what it costs where ranks wait for each other only at its end."""
    steps: float
    """The slowest rank of each ring step, summed over the steps: what it costs where every hop holds up its receiver.

    Never below `whole`; the same for one causal document, where one rank is slowest at every step.
    """


def pairs(layout: Layout, mask: Mask) -> np.ndarray:
    """(Query, key) pairs that see each other, over all samples: int64 `[rank of the query, rank of the key]`.

    One pass over the sequence for each rank; nothing of the size of queries × keys is made.
    """
    sequence = np.arange(layout.seq_length)
    owner = np.empty(layout.seq_length, int)
    for rank in range(layout.cp):
        owner[layout.positions(rank).numpy()] = rank
    found = np.zeros((layout.cp, layout.cp), np.int64)
    for sample in range(max(mask.samples, 1)):
        first = mask.first_visible(sequence, sample)
        for rank in range(layout.cp):
            before = np.concatenate([[0], np.cumsum(owner == rank)])    # this rank's keys before each position
            np.add.at(found[:, rank], owner, before[1:] - before[first])
    return found


def step_work(layout: Layout, mask: Mask, method: str = "ring", ulysses: int = 1,
              inner_ring: int | None = None) -> np.ndarray:
    """Pairs that each rank computes at each ring step, int64 `[step, ring rank]`, every head counted alike.

    Ulysses ranks hold the same queries and keys, of different heads, and count as one; `all_gather` has one step.
    """
    ring = layout.cp // ulysses
    met = pairs(layout, mask).reshape(ring, ulysses, ring, ulysses).sum((1, 3))
    if method == "all_gather":
        return met.sum(1)[None]
    inner = inner_ring if method == "double_ring" and inner_ring else ring
    outer, names = ring // inner, tuple(range(ring))
    order = [[DoubleRing(Group("inner", names[:inner], rank % inner), Group("outer", names[:outer], rank // inner))
              .source(a, b) for a in range(outer) for b in range(inner)] for rank in range(ring)]
    return np.stack([met[rank, order[rank]] for rank in range(ring)], 1)


def balance(layout: Layout, mask: Mask, method: str = "ring", ulysses: int = 1,
            inner_ring: int | None = None) -> Balance:
    """The slowest rank's share of attention's work over the mean; arguments as `step_work`'s.

    One causal document: contiguous 2 - 1/R, zigzag exactly 1, striped 1 + (R-1)/(seq + 1) (Brandon et al. 2023).
    """
    return _level(step_work(layout, mask, method, ulysses, inner_ring))


def _level(work: np.ndarray) -> Balance:
    mean = work.sum() / work.shape[1]
    return Balance(float(work.sum(0).max() / mean), float(work.max(1).sum() / mean))


def of_config(config: Config, layout: str) -> Balance:
    """The balance of a resolved config's layers together, each sample one document, were `layout` its layout."""
    context, cp = config.parallel.context, config.parallel.cp
    places = Layout(config.data.seq_length, cp, layout)
    windows = Counter(config.model.window(layer) for layer in range(config.model.num_layers))
    return _level(np.concatenate([layers * step_work(places, Mask(window), context.method, ulysses_ranks(config),
                                                     context.inner_ring) for window, layers in windows.items()]))


def describe(config: Config) -> str:
    """One line on a resolved config: the slowest rank over the mean, for its layout and, to compare, the others."""
    cp, chosen = config.parallel.cp, config.parallel.context.layout
    if cp == 1:
        return "attention work, slowest rank / mean: 1.000 (one rank holds the whole sequence)"
    unit = {name: Layout(2 * cp, cp, name).unit for name in LAYOUTS}
    words = []
    for name in sorted(LAYOUTS, key=lambda name: name != chosen):
        if config.data.seq_length % unit[name] == 0:
            found = of_config(config, name)
            waits = f", step by step {found.steps:.3f}" if found.steps > found.whole + 5e-4 else ""
            words.append(f"{name} {found.whole:.3f}{waits}")
    documents = "; every sample one document, packed ones change it" if config.data.document_mask else ""
    return f"attention work, slowest rank / mean: {words[0]} (not chosen: {'; '.join(words[1:])}){documents}"
