"""Samples to micro-batches: labels are shifted on the whole sample, then a rank's positions are picked."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from megafour.parallel.context.layout import document_starts
from megafour.parallel.tensor.cross_entropy import IGNORE

PAD = -1  # in a sample: no token here; becomes token 0 with its labels ignored


@dataclass(frozen=True)
class MicroBatch:
    """What one rank of the context-parallel group holds of a micro-batch of b samples.

    tokens, labels: int64 [b, s_local], labels IGNORE where nothing is trained. positions: int64 [s_local], the global
    positions held, in the layout's order; with document ids int64 [b, s_local], restarting at 0 in each document.
    sample_ids: int64 [b], the sample's index in the global batch. samples: int64 [b], its index in the run.
    document_starts: int64 [b, seq] on the CPU, for every token of the whole samples the position at which its document
    begins, or None where a sample is one document.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    sample_ids: Tensor
    samples: Tensor
    document_starts: Tensor | None = None

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same micro-batch on another device; the mask is cut on the CPU, so what it follows from stays."""
        held = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "document_starts"}
        moved = {name: x.to(device, non_blocking=True) for name, x in held.items()}
        return replace(self, **moved)


def collate(
    rows: np.ndarray,
    sample_ids: Tensor,
    positions: Tensor,
    *,
    samples: Tensor | None = None,
    document_ids: np.ndarray | None = None,
) -> MicroBatch:
    """Cuts one rank's part out of whole samples.

    rows: integers [b, seq+1], PAD where there is no token. positions: int64 [s_local], global positions in [0, seq).
    document_ids: integers [b, seq+1] that change from document to document, or None. The label of position p is token
    p+1 of the whole sample: shifting after the cut would lose the label at every shard's end. A document's last token
    has none, since it does not see what its label would belong to.
    """
    whole = torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int64))
    tokens = whole[:, positions]
    labels = whole[:, positions + 1]
    labels = labels.masked_fill((labels < 0) | (tokens < 0), IGNORE)
    starts = None
    if document_ids is not None:
        ids = torch.from_numpy(np.ascontiguousarray(document_ids, dtype=np.int64))
        labels = labels.masked_fill(ids[:, positions] != ids[:, positions + 1], IGNORE)
        starts = document_starts(ids[:, :-1])
        positions = (torch.arange(starts.shape[1]) - starts)[:, positions]
    return MicroBatch(
        tokens.clamp_min(0), labels, positions, sample_ids, sample_ids if samples is None else samples, starts
    )
