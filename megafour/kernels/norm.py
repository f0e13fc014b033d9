"""RMSNorm (Zhang, Sennrich 2019) and LayerNorm over the last dim, statistics in fp32 (fp64 in fp64 runs)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight; `[..., n]` -> the same shape."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) · weight + bias; `[..., n]` -> the same shape."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)
