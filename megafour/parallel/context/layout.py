"""Which global positions of a sequence each context-parallel rank holds, and in which order: a bijection."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Positions, RoPE, labels, masks and the loss follow from it; it depends on cp, not on how cp splits into
    ring × ulysses."""

    seq_length: int
    cp: int
    kind: str = "zigzag"

    def __post_init__(self) -> None:
        if self.kind != "zigzag":
            raise ValueError(f"parallel.context.layout={self.kind}: one of zigzag")
        if self.cp > 1 and self.seq_length % (2 * self.cp):
            raise ValueError(f"data.seq_length {self.seq_length} % (2 · cp {self.cp}) != 0")

    @property
    def local_length(self) -> int:
        """Tokens on each rank, seq / cp."""
        return self.seq_length // self.cp

    def positions(self, rank: int) -> Tensor:
        """Global positions on `rank` in local order, int64 `[seq/cp]`.

        Zigzag: chunks r and 2·cp-1-r of 2·cp, an early and a late one, so that causal attention costs all ranks alike.
        """
        if self.cp == 1:
            return torch.arange(self.seq_length)
        chunk = self.seq_length // (2 * self.cp)
        starts = (rank * chunk, (2 * self.cp - 1 - rank) * chunk)
        return torch.cat([torch.arange(start, start + chunk) for start in starts])
