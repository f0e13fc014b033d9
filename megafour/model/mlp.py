"""The feed-forward block: SwiGLU with a fused gate and up projection, or a plain GELU MLP."""

from __future__ import annotations

from torch import Tensor, nn

from megafour.kernels.activation import activation
from megafour.model.build import Build, Pass
from megafour.parallel.tensor.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_pieces,
    replicated_piece,
    row_piece,
)


class MLP(nn.Module):
    """`down(silu(gate(x)) * up(x))` (Shazeer 2020) or `down(gelu(up(x)))`, hidden features split over tp."""

    def __init__(self, layer: int, build: Build) -> None:
        super().__init__()
        cfg, tp = build.model, build.tp
        name = f"layers.{layer}.mlp"
        self.activate = activation(cfg.activation)
        outputs = {f"{name}.{w}": cfg.ffn_size for w in (("gate", "up") if cfg.gated else ("up",))}
        weights = column_pieces(outputs, cfg.hidden_size, tp, cfg.init_std)
        biases = column_pieces(outputs, cfg.hidden_size, tp, cfg.init_std, "bias") if cfg.linear_bias else []
        self.up = ColumnParallelLinear(cfg.hidden_size, weights, biases, tp, **build.placement)
        down = row_piece(f"{name}.down", cfg.hidden_size, cfg.ffn_size, tp, build.output_std)
        bias = replicated_piece(f"{name}.down.bias", cfg.hidden_size, tp, summed=build.sequence_parallel, init="zeros")
        self.down = RowParallelLinear(cfg.hidden_size, down, bias if cfg.linear_bias else None, tp, **build.placement)

    def forward(self, x: Tensor, step: Pass) -> Tensor:
        """`[s(/tp), b, h]` -> the same shape."""
        return self.down(self.activate(self.up(x)))
