"""Joining two partial attentions over different keys, stably."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Fold a partial attention into the accumulators, in place; all fp32 (fp64 in fp64 runs).

    out, part: `[b, n, heads, d]`; lse, part_lse: `[b, heads, n]`. out <- out - σ(lse' - lse)(out - out'),
    lse <- lse - log σ(lse - lse'), the latter as logaddexp: unlike log(1 + exp(lse' - lse)) neither can overflow, and
    a row that saw no key on one side or both (log-sum-exp -inf) makes no NaN.
    """
    weight = (part_lse - lse).sigmoid_().masked_fill_(part_lse == float("-inf"), 0.0)
    out.lerp_(part, weight.transpose(1, 2).unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)
