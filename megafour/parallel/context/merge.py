"""Joining two partial attentions over different keys, stably."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Fold a partial attention into the accumulators, in place.

    out, part: `[b, n, heads, d]`; lse, part_lse: `[b, heads, n]`. out <- out - σ(lse' - lse)(out - out'),
    lse <- lse - log σ(lse - lse'): unlike log(1 + exp(lse' - lse)) it cannot overflow.
    """
    weight = (part_lse - lse).sigmoid().transpose(1, 2).unsqueeze(-1)
    out.sub_(weight * (out - part))
    lse.sub_(F.logsigmoid(lse - part_lse))
