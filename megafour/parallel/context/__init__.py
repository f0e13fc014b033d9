"""Context parallelism: which positions a rank holds, and attention across ranks.

A method is a function `(layout, mesh, kernel) -> Core`; adding one adds a file and a line to `METHODS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from megafour.mesh import Mesh
from megafour.parallel.context.all_gather import AllGatherAttention
from megafour.parallel.context.blocks import Kernel, Places
from megafour.parallel.context.double_ring import DoubleRingAttention
from megafour.parallel.context.layout import Layout
from megafour.parallel.context.mask import Mask
from megafour.parallel.context.ring import RingAttention
from megafour.parallel.context.ulysses import UlyssesAttention
from megafour.parallel.random import AttentionDropout


class Core(Protocol):
    """softmax(scale · q k^T) v over the whole sequence, under the mask, for the tokens that this rank holds."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float,
                 dropout: AttentionDropout | None = None) -> Tensor:
        """q `[b, s_local, heads, d]`, k and v `[b, s_local, kv_heads, d]` -> `[b, s_local, heads, d]`."""
        ...


def places_of(layout: Layout, mesh: Mesh) -> Places:
    """What each member of the ring holds, with its ulysses ranks."""
    ulysses = mesh.group("ulysses").size
    return Places.of([layout.shared_positions(i * ulysses, ulysses) for i in range(mesh.group("ring").size)])


def _ring(layout: Layout, mesh: Mesh, kernel: Kernel) -> Core:
    return RingAttention(mesh.group("ring"), places_of(layout, mesh), kernel)


def _double_ring(layout: Layout, mesh: Mesh, kernel: Kernel) -> Core:
    return DoubleRingAttention(mesh.group("ring_inner"), mesh.group("ring_outer"), places_of(layout, mesh), kernel)


def _ulysses(layout: Layout, mesh: Mesh, kernel: Kernel) -> Core:
    group = mesh.group("ulysses")
    rows = layout.shared_positions(mesh.group("ring").rank * group.size, group.size).to(mesh.device)
    return UlyssesAttention(group, rows, RingAttention(mesh.group("ring"), places_of(layout, mesh), kernel))


def _all_gather(layout: Layout, mesh: Mesh, kernel: Kernel) -> Core:
    return AllGatherAttention(mesh.group("ring"), places_of(layout, mesh), kernel, mesh.device)


METHODS: dict[str, Callable[[Layout, Mesh, Kernel], Core]] = {
    "ring": _ring, "double_ring": _double_ring, "ulysses": _ulysses, "usp": _ulysses, "all_gather": _all_gather}
"""`parallel.context.method` -> how attention crosses ranks."""
