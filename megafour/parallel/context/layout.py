"""Which global positions of a sequence each context-parallel rank holds, and in which order: a bijection."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LAYOUTS = ("zigzag", "contiguous", "striped")


@dataclass(frozen=True)
class Layout:
    """Positions, RoPE, labels, masks and the loss follow from it. A rank's positions are in ascending order.

    It depends on cp, not on how cp splits into ring × ulysses. Zigzag: of 2·cp chunks rank r holds r and 2·cp-1-r, an
    early and a late one, so that causal attention costs all ranks alike. Striped (Brandon et al. 2023): token t lives
    on rank t mod cp. Contiguous: rank r holds chunk r of cp.
    """

    seq_length: int
    cp: int
    kind: str = "zigzag"

    def __post_init__(self) -> None:
        if self.kind not in LAYOUTS:
            raise ValueError(f"parallel.context.layout={self.kind}: one of {', '.join(LAYOUTS)}")
        if self.cp > 1 and self.seq_length % self.unit:
            unit = f"(2 · cp {self.cp})" if self.kind == "zigzag" else f"cp {self.cp}"
            raise ValueError(f"data.seq_length {self.seq_length} % {unit} != 0")

    @property
    def unit(self) -> int:
        """What the sequence must be a multiple of where cp > 1."""
        return (2 if self.kind == "zigzag" else 1) * self.cp

    @property
    def local_length(self) -> int:
        """Tokens on each rank, seq / cp."""
        return self.seq_length // self.cp

    def positions(self, rank: int) -> Tensor:
        """Global positions on `rank` in local order, int64 `[seq/cp]`, ascending."""
        if self.kind == "striped":
            return torch.arange(rank, self.seq_length, self.cp)
        if self.kind == "contiguous" or self.cp == 1:
            return torch.arange(rank * self.local_length, (rank + 1) * self.local_length)
        size = self.seq_length // self.unit
        return torch.cat([torch.arange(i * size, (i + 1) * size) for i in (rank, 2 * self.cp - 1 - rank)])

    def shared_positions(self, first: int, ranks: int) -> Tensor:
        """What the `ranks` adjacent ranks from `first` hold together, in their order: int64 `[ranks · seq/cp]`."""
        return torch.cat([self.positions(first + i) for i in range(ranks)])


def document_starts(document_ids: Tensor) -> Tensor:
    """Where each token's document begins, from whole sequences: int64 `[..., seq]` -> the same shape."""
    index = torch.arange(document_ids.shape[-1], device=document_ids.device).expand(document_ids.shape)
    first = torch.ones_like(document_ids, dtype=torch.bool)
    first[..., 1:] = document_ids[..., 1:] != document_ids[..., :-1]
    return torch.where(first, index, 0).cummax(-1).values
