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


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind that a sublayer makes for each micro-batch, forward and backward together."""

    primitive: str
    """`all_reduce`, `all_gather`, `reduce_scatter` or `all_to_all`."""
    calls: int
    elements: int
    """Of each token of the rank's micro-batch, in all calls together: of the gathered tensor of an all-gather, of the
    summed one of a reduction. Sequence parallelism cuts none of it."""
    wide: bool = False
    """In the type of sums (fp32, or fp64), not in that of activations."""
    axis: str = "tp"


@dataclass(frozen=True)
class LocalHeads:
    """One attention over the sequence as a tensor-parallel rank computes it."""

    query: int
    kv: int
    size: int
    window: int | None
    """Tokens that a query sees; None: all before it."""


class Sublayer:
    """A part of the model: what it holds, computes, keeps and communicates."""

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

    def collectives(self, at: TensorParallel, recompute: str) -> tuple[Collective, ...]:
        """What a rank communicates for each micro-batch, but for the exchange of keys and values."""
        return ()

    def attentions(self, at: TensorParallel) -> tuple[LocalHeads, ...]:
        """Attentions whose keys and values context parallelism exchanges, by its method."""
        return ()


@dataclass(frozen=True)
class LinearSpec(Sublayer):
    """A linear layer `[out, in]` that tensor parallelism cuts: by output features (column) or input features (row)."""

    kind: Literal["column", "row"]
    weight: ParameterSpec
    bias: ParameterSpec | None

    def parameters(self) -> tuple[ParameterSpec, ...]:
        """Weight and bias."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def collectives(self, at: TensorParallel, recompute: str) -> tuple[Collective, ...]:
        """Those at its outer edge: of a column's input, of a row's output.

        Without sequence parallelism (Shoeybi et al. 2019, figure 3) a row sums its output in the forward, a column its
        input's gradient in the backward: with two of each, a block makes 4 all-reduces of the whole activation A,
        (2(tp-1)/tp)·4·A. With it (Korthikanti et al. 2022, section 4.2.2) an all-reduce becomes a reduce-scatter and an
        all-gather. Forward: a column gathers, a row scatters. Backward: a row gathers its output's gradient, a column
        scatters its input's gradient and gathers its input anew, since only the shard was kept: 6 all-gathers and 4
        reduce-scatters of a block, ((tp-1)/tp)·10·A: a quarter more than without, and 1/tp of the memory.
        Recompute `full` makes those of the forward twice.
        """
        forward, (out, into) = 2 if recompute == "full" else 1, self.weight.weights[0].shape
        if self.kind == "column":
            if not at.sequence_parallel:
                return (Collective("all_reduce", 1, into),)
            return (Collective("all_gather", forward + 1, (forward + 1) * into), Collective("reduce_scatter", 1, into))
        if not at.sequence_parallel:
            return (Collective("all_reduce", forward, forward * out),)
        return Collective("reduce_scatter", forward, forward * out), Collective("all_gather", 1, out)


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
    return LinearSpec("column", ParameterSpec(tuple(matrices)), ParameterSpec(tuple(biases)) if bias else None)


def row(name: str, out_features: int, in_features: int, units: int, *, bias: bool, std: float) -> LinearSpec:
    """A weight split over `units` equal groups of its input features; its bias is added after the sum, by every rank
    to its share of the tokens."""
    matrix = Weight(f"{name}.weight", (out_features, in_features), Split(1, units), std=std)
    added = Weight(f"{name}.bias", (out_features,), init="zeros")
    return LinearSpec("row", ParameterSpec((matrix,)), ParameterSpec((added,)) if bias else None)


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
