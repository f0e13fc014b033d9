"""What a local parameter holds of the logical weights: the one record behind init, sync, norms and checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn


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

    def view(self, local: Tensor) -> Tensor:
        """The rectangle within the local parameter (or a tensor of its shape), a view."""
        return local[self.row : self.row + self.size[0]]

    def flat_range(self, local_shape: tuple[int, ...]) -> tuple[int, int]:
        """[start, stop) of this rectangle in the flattened local parameter."""
        width = 1
        for n in local_shape[1:]:
            width *= n
        return self.row * width, (self.row + self.size[0]) * width


def set_pieces(param: nn.Parameter, pieces: Iterable[Piece]) -> nn.Parameter:
    """Attach its record to a parameter and return it."""
    param.pieces = tuple(p for p in pieces if 0 not in p.size)  # type: ignore[attr-defined]
    return param


def pieces_of(param: nn.Parameter) -> tuple[Piece, ...]:
    """The record attached by `set_pieces`."""
    return param.pieces  # type: ignore[attr-defined, no-any-return]


def named_pieces(module: nn.Module) -> Iterator[tuple[nn.Parameter, Piece]]:
    """Every (local parameter, piece) of a stage, in registration order; a tied parameter once."""
    for param in module.parameters():
        for piece in pieces_of(param):
            yield param, piece
