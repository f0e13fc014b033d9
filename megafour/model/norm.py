"""RMSNorm and LayerNorm as layers of the parallel model: replicated weights that may see a sequence shard."""

from __future__ import annotations

from torch import Tensor, nn

from megafour.architecture.sublayer import NormSpec
from megafour.kernels.norm import layer_norm, rms_norm
from megafour.model.build import Build


class Norm(nn.Module):
    """Normalises the last dim; statistics in fp32 (fp64 in fp64 runs)."""

    def __init__(self, spec: NormSpec, build: Build) -> None:
        super().__init__()
        self.eps = spec.eps
        self.weight = build.parameter(spec.weight)
        self.bias = None if spec.bias is None else build.parameter(spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., size]` -> the same shape."""
        if self.bias is None:
            return rms_norm(x, self.weight, self.eps)
        return layer_norm(x, self.weight, self.bias, self.eps)
