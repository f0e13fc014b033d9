"""What every kind of sublayer says of itself, and the two kinds of which all others are made: linears and norms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megafour.architecture.weights import ParameterSpec, Split, TensorParallel, Weight


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one token, forward and backward together, in whole numbers."""

    linear: int
    """6 for each parameter that multiplies the token: 2 forward, 4 backward."""
    pairs: int = 0
    """Over the pairs of tokens that see each other; what recompute `selective` does again."""

    @property
    def total(self) -> int:
        """Both."""
        return self.linear + self.pairs

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.linear + other.linear, self.pairs + other.pairs)


class Sublayer:
    """A part of the model: what it holds, computes and keeps."""

    def parameters(self) -> tuple[ParameterSpec, ...]:
        """Its parameters, in the order in which its module registers them."""
        raise NotImplementedError

    @property
    def count(self) -> int:
        """Elements of its weights over all ranks."""
        return sum(weight.count for spec in self.parameters() for weight in spec.weights)

    def flops(self, seq_length: int) -> Flops:
        """Of one token of a sequence of `seq_length`, on all ranks together."""
        return Flops(6 * self.count)

    def saved(self, at: TensorParallel, recompute: str) -> int:
        """Elements of each token that a rank keeps for the backward, with fused attention, under a mode of
        `train.recompute`."""
        return 0


@dataclass(frozen=True)
class LinearSpec(Sublayer):
    """A linear layer `[out, in]` that tensor parallelism cuts: by output features (column) or input features (row)."""

    weight: ParameterSpec
    bias: ParameterSpec | None

    def parameters(self) -> tuple[ParameterSpec, ...]:
        """Weight and bias."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


def column(outputs: Mapping[str, tuple[int, Split]], in_features: int, *, bias: bool, std: float) -> LinearSpec:
    """Several logical weights fused by rows, each split over its output features (Shoeybi et al. 2019, section 3).

    Args:
        outputs: name -> (output features, their split).
        in_features: of all.
        bias: whether each has one.
        std: of their initial values.
    """
    matrices = [Weight(f"{name}.weight", (out, in_features), split, std=std) for name, (out, split) in outputs.items()]
    biases = [Weight(f"{name}.bias", (out,), split, init="zeros") for name, (out, split) in outputs.items()]
    return LinearSpec(ParameterSpec(tuple(matrices)), ParameterSpec(tuple(biases)) if bias else None)


def row(name: str, out_features: int, in_features: int, units: int, *, bias: bool, std: float) -> LinearSpec:
    """A weight split over `units` equal groups of its input features; its bias is added after the sum, by every rank
    to its share of the tokens."""
    matrix = Weight(f"{name}.weight", (out_features, in_features), Split(1, units), std=std)
    added = Weight(f"{name}.bias", (out_features,), init="zeros")
    return LinearSpec(ParameterSpec((matrix,)), ParameterSpec((added,)) if bias else None)


@dataclass(frozen=True)
class NormSpec(Sublayer):
    """RMSNorm, or LayerNorm with a bias, over the last dim; every tensor-parallel rank holds all of it."""

    name: str
    size: int
    kind: Literal["rmsnorm", "layernorm"]
    eps: float
    partial: Literal["sequence", "heads"] = "sequence"

    @property
    def weight(self) -> ParameterSpec:
        """The gain."""
        return ParameterSpec((Weight(f"{self.name}.weight", (self.size,), partial=self.partial, init="ones"),))

    @property
    def bias(self) -> ParameterSpec | None:
        """Of LayerNorm."""
        if self.kind == "rmsnorm":
            return None
        return ParameterSpec((Weight(f"{self.name}.bias", (self.size,), partial=self.partial, init="zeros"),))

    def parameters(self) -> tuple[ParameterSpec, ...]:
        """Gain and bias."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def saved(self, at: TensorParallel, recompute: str) -> int:
        """Input and output, of the rank's share of the tokens."""
        return 2 * at.residual(self.size)
