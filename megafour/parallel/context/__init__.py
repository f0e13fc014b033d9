"""Context parallelism: which positions a rank holds, and attention across ranks.

A method is a function `(layout, group, backend) -> attention core`; adding one adds a file and a line to `METHODS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megafour.comm.group import Group
from megafour.kernels.attention import AttentionBackend, DropoutBits
from megafour.parallel.context.layout import Layout
from megafour.parallel.context.ring import Ring, ring_attention

Core = Callable[..., Tensor]
"""(q, k, v, *, scale, dropout) -> out, all `[b, s_local, heads, head_dim]`."""


def _ring(layout: Layout, group: Group, backend: AttentionBackend) -> Core:
    ring = Ring(layout, group, backend)

    def core(q: Tensor, k: Tensor, v: Tensor, *, scale: float, dropout: DropoutBits | None = None) -> Tensor:
        return ring_attention(q, k, v, ring=ring, scale=scale, dropout=dropout)

    return core


METHODS: dict[str, Callable[[Layout, Group, AttentionBackend], Core]] = {"ring": _ring}
"""`parallel.context.method` -> how attention crosses ranks."""


def attention_over(method: str, layout: Layout, mesh: Any, backend: AttentionBackend) -> Core:
    """The attention core of `method` on the mesh's context-parallel group."""
    return METHODS[method](layout, mesh.group("cp"), backend)
