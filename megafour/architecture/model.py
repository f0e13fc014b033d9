"""The whole model described: which sublayers each layer has, and what one pipeline stage holds of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from megafour.architecture.attention import AttentionSpec
from megafour.architecture.ends import EmbeddingSpec, HeadSpec
from megafour.architecture.mlp import MLPSpec
from megafour.architecture.sublayer import Collective, Flops, LocalHeads, NormSpec, Sublayer
from megafour.architecture.weights import ParameterSpec, TensorParallel
from megafour.config.model_schema import ModelConfig
from megafour.config.schema import Config

KINDS: dict[str, Callable[[ModelConfig, int], Sublayer | None]] = {
    "attention": AttentionSpec.of,
    "mlp": MLPSpec.of,
}
"""Kind -> its description in a layer, by the config and the layer's index; None where that layer has none. In the order
in which a layer runs them. Each has a norm before it and adds to the residual stream: x + kind(norm(x))."""


@dataclass(frozen=True)
class BranchSpec:
    """One branch of a layer: `x + body(norm(x))`."""

    kind: str
    norm: NormSpec
    body: Sublayer


@dataclass(frozen=True)
class LayerSpec(Sublayer):
    """One pre-norm block."""

    index: int
    hidden: int
    """Width of the residual stream."""
    branches: tuple[BranchSpec, ...]

    @property
    def sublayers(self) -> list[Sublayer]:
        """In the order in which they run."""
        return [part for branch in self.branches for part in (branch.norm, branch.body)]

    def parameters(self) -> tuple[ParameterSpec, ...]:
        """Of all sublayers, in their order."""
        return tuple(spec for part in self.sublayers for spec in part.parameters())

    def flops(self, seq_length: int) -> Flops:
        """Of all sublayers."""
        return sum((part.flops(seq_length) for part in self.sublayers), Flops(0))

    def saved(self, at: TensorParallel, recompute: str) -> int:
        """Of all sublayers; of a layer that is computed again as a whole (`full`) its input."""
        if recompute == "full":
            return at.residual(self.hidden)
        return sum(part.saved(at, recompute) for part in self.sublayers)

    def collectives(self, at: TensorParallel, recompute: str) -> tuple[Collective, ...]:
        """Of all sublayers."""
        return tuple(made for part in self.sublayers for made in part.collectives(at, recompute))

    def attentions(self, at: TensorParallel) -> tuple[LocalHeads, ...]:
        """Of all sublayers."""
        return tuple(heads for part in self.sublayers for heads in part.attentions(at))


@dataclass(frozen=True)
class Part:
    """What one pipeline stage holds of the stack."""

    layers: range
    """Global numbers."""
    first: bool = True
    """With the embedding."""
    last: bool = True
    """With the head."""


@dataclass(frozen=True)
class Architecture:
    """A model by its config section and the size of its vocabulary."""

    model: ModelConfig
    vocab_size: int

    @cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """By index."""
        return tuple(self._layer(index) for index in range(self.model.num_layers))

    def _layer(self, index: int) -> LayerSpec:
        model, found = self.model, []
        for kind, describe in KINDS.items():
            body = describe(model, index)
            if body is not None:
                norm = NormSpec(f"layers.{index}.{kind}_norm", model.hidden_size, model.norm, model.norm_eps)
                found.append(BranchSpec(kind, norm, body))
        return LayerSpec(index, model.hidden_size, tuple(found))

    def embedding(self, *, apart: bool = False) -> EmbeddingSpec:
        """The embedding; `apart`: its rank does not hold the head."""
        return EmbeddingSpec.of(self.model, self.vocab_size, apart=apart)

    def head(self, *, apart: bool = False) -> HeadSpec:
        """The head; `apart`: its rank does not hold the embedding."""
        return HeadSpec.of(self.model, self.vocab_size, apart=apart)

    def units(self, parts: Sequence[Part]) -> Iterator[tuple[int, tuple[ParameterSpec, ...]]]:
        """(virtual stage, parameters) of each embedding, layer and head of a rank that holds `parts`, in the order in
        which its modules register them."""
        apart = not (any(p.first for p in parts) and any(p.last for p in parts))
        for chunk, part in enumerate(parts):
            if part.first:
                yield chunk, self.embedding(apart=apart).parameters()
            for index in part.layers:
                yield chunk, self.layers[index].parameters()
            if part.last:
                yield chunk, self.head(apart=apart).parameters()

    @property
    def count(self) -> int:
        """Trained numbers of the whole model, padding not counted."""
        return sum(math.prod(shape) for shape in self.shapes().values())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every logical tensor by name, in the order of registration."""
        return {weight.name: weight.shape for _, held in self.units([Part(range(len(self.layers)))])
                for spec in held for weight in spec.weights}


def logical_shapes(config: Config, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Every logical tensor's shape by name: what any mesh of this model holds together."""
    return Architecture(config.model, vocab_size).shapes()
