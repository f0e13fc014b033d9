"""What a local parameter holds of the logical weights: the one record behind init, sync, norms and checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """A rectangle of one logical tensor, held as rows of a (possibly fused) local parameter."""

    name: str
    """Global logical name, `layers.17.attention.wq.weight`."""
    shape: tuple[int, ...]
    """Shape of the whole logical tensor (true vocabulary, no padding)."""
    offset: tuple[int, ...]
    """Where this rectangle starts in the logical tensor."""
    size: tuple[int, ...]
    """Its extents."""
    row: int = 0
    """First row (dim 0) of the local parameter that holds it."""
    reduce: str | None = None
    """Group over which its gradient must be summed after the data-parallel reduction (`tp`, `kv`, `embedding`)."""
    counted: bool = True
    """Whether this rank's copy counts in norms and is written to checkpoints: each logical element exactly once."""
    init: str = "normal"
    """How it starts: `normal` (std), `ones`, `zeros`."""
    std: float = 0.02
    """Standard deviation of a `normal` start."""

    @property
    def rows(self) -> slice:
        """The rectangle's rows of the local parameter, or of a tensor of its shape."""
        return slice(self.row, self.row + self.size[0])

    def flat_range(self, local_shape: tuple[int, ...]) -> tuple[int, int]:
        """[start, stop) of this rectangle in the flattened local parameter."""
        width = math.prod(local_shape[1:])
        return self.row * width, (self.row + self.size[0]) * width
