"""Which global positions of a sequence each context-parallel rank holds, and in which order: a bijection."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Positions, RoPE, labels, masks and the loss follow from it.

    It depends on cp, not on how cp splits into ring × ulysses. Zigzag: of 2·cp chunks rank r holds r and 2·cp-1-r, an
    early and a late one, so that causal attention costs all ranks alike.
    """

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

    def chunks(self, rank: int) -> list[range]:
        """The runs of consecutive global positions on `rank`, in local order."""
        if self.cp == 1:
            return [range(self.seq_length)]
        size = self.seq_length // (2 * self.cp)
        return [range(i * size, (i + 1) * size) for i in (rank, 2 * self.cp - 1 - rank)]

    def positions(self, rank: int) -> Tensor:
        """Global positions on `rank` in local order, int64 `[seq/cp]`."""
        return torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in self.chunks(rank)])


def document_positions(document_ids: Tensor) -> Tensor:
    """Position of each token within its own document, from whole sequences: int64 `[..., seq]` -> the same shape.

    Pick a rank's columns afterwards: a document may begin on another rank.
    """
    index = torch.arange(document_ids.shape[-1], device=document_ids.device).expand(document_ids.shape)
    first = torch.ones_like(document_ids, dtype=torch.bool)
    first[..., 1:] = document_ids[..., 1:] != document_ids[..., :-1]
    return index - torch.where(first, index, 0).cummax(-1).values
