"""The feed-forward block described: a fused gate and up projection, or up alone, and down."""

from __future__ import annotations

from dataclasses import dataclass

from megafour.architecture.attention import output_std
from megafour.architecture.sublayer import Collective, LinearSpec, Sublayer, column, row
from megafour.architecture.weights import ParameterSpec, Split, TensorParallel
from megafour.config.model_schema import ModelConfig


@dataclass(frozen=True)
class MLPSpec(Sublayer):
    """`down(silu(gate(x)) * up(x))` (Shazeer 2020) or `down(gelu(up(x)))`, hidden features split over tp."""

    width: int
    activation: str
    up: LinearSpec
    down: LinearSpec

    @classmethod
    def of(cls, model: ModelConfig, layer: int) -> MLPSpec:
        """The MLP of layer `layer`."""
        name, ffn = f"layers.{layer}.mlp", model.ffn_size
        outputs = {f"{name}.{which}": (ffn, Split(0, ffn)) for which in (("gate", "up") if model.gated else ("up",))}
        return cls(ffn, model.activation,
                   column(outputs, model.hidden_size, bias=model.linear_bias, std=model.init_std),
                   row(f"{name}.down", model.hidden_size, ffn, ffn, bias=model.linear_bias, std=output_std(model)))

    def parameters(self) -> tuple[ParameterSpec, ...]:
        """Of up (with the gate) and down."""
        return self.up.parameters() + self.down.parameters()

    def saved(self, at: TensorParallel, recompute: str) -> int:
        """Outputs of gate and up, and what comes into down."""
        matrices = len(self.up.weight.weights) + 1
        return matrices * self.width // at.size

    def collectives(self, at: TensorParallel, recompute: str) -> tuple[Collective, ...]:
        """Those of its matrices."""
        return self.up.collectives(at, recompute) + self.down.collectives(at, recompute)
