"""RMSNorm and LayerNorm as layers of the parallel model: replicated weights that may see a sequence shard."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from megafour.kernels.norm import layer_norm, rms_norm
from megafour.model.build import Build
from megafour.parallel.pieces import set_pieces
from megafour.parallel.tensor.linear import replicated_piece


class Norm(nn.Module):
    """Normalises the last dim; statistics in fp32 (fp64 in fp64 runs)."""

    def __init__(self, name: str, size: int, build: Build, *, summed: bool | None = None,
                 kind: str | None = None) -> None:
        super().__init__()
        summed = build.sequence_parallel if summed is None else summed
        self.eps = build.model.norm_eps
        empty = partial(torch.empty, size, dtype=build.dtype, device=build.weights)
        self.weight = set_pieces(nn.Parameter(empty()), [
            replicated_piece(f"{name}.weight", size, build.tp, summed=summed, init="ones")])
        self.bias = set_pieces(nn.Parameter(empty()), [
            replicated_piece(f"{name}.bias", size, build.tp, summed=summed, init="zeros")]) if (
            (kind or build.model.norm) == "layernorm") else None

    def forward(self, x: Tensor) -> Tensor:
        """`[..., size]` -> the same shape."""
        if self.bias is None:
            return rms_norm(x, self.weight, self.eps)
        return layer_norm(x, self.weight, self.bias, self.eps)
