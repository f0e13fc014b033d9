"""The feed-forward block: SwiGLU with a fused gate and up projection, or a plain GELU MLP."""

from __future__ import annotations

from torch import Tensor, nn

from megafour.architecture.mlp import MLPSpec
from megafour.kernels.activation import activation
from megafour.model.build import Build, Pass
from megafour.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear


class MLP(nn.Module):
    """`down(silu(gate(x)) * up(x))` (Shazeer 2020) or `down(gelu(up(x)))`, hidden features split over tp."""

    def __init__(self, spec: MLPSpec, build: Build) -> None:
        super().__init__()
        self.activate = activation(spec.activation)
        self.up = ColumnParallelLinear(spec.up, build.tp, **build.placement)
        self.down = RowParallelLinear(spec.down, build.tp, **build.placement)

    def forward(self, x: Tensor, step: Pass) -> Tensor:
        """`[s(/tp), b, h]` -> the same shape."""
        return self.down(self.activate(self.up(x)))
