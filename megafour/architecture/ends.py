"""Both ends of the model described: the embedding, and the head with the last norm."""

from __future__ import annotations

from dataclasses import dataclass

from megafour.architecture.sublayer import NormSpec, Sublayer
from megafour.architecture.weights import ParameterSpec, Split, Weight
from megafour.config.model_schema import ModelConfig


def vocabulary(name: str, words: int, hidden: int, std: float, *, copied: bool = False, counted: bool = True) -> Weight:
    """A `[vocab, hidden]` weight split over its words, rounded up.

    The rows of padding are never looked up, never make a logit, never saved.
    """
    return Weight(name, (words, hidden), Split(0, words, padded=True), std=std, copied=copied, counted=counted)


@dataclass(frozen=True)
class EmbeddingSpec(Sublayer):
    """The token embedding and, for learned positions, the position embedding."""

    token: ParameterSpec
    position: ParameterSpec | None

    @classmethod
    def of(cls, model: ModelConfig, vocab_size: int, *, apart: bool) -> EmbeddingSpec:
        """`apart`: a tied head is on another rank, with a copy of its own; else it reads this weight."""
        token = vocabulary("embedding.weight", vocab_size, model.hidden_size, model.init_std,
                           copied=model.tie_embeddings and apart)
        position = None
        if model.position == "learned":
            shape = (int(model.max_position_embeddings or 0), model.hidden_size)
            position = ParameterSpec((Weight("position_embedding.weight", shape, std=model.init_std),),
                                     read_by_backward=False)
        shared = model.tie_embeddings and not apart
        return cls(ParameterSpec((token,), uses=2 if shared else 1, read_by_backward=False), position)

    def parameters(self) -> tuple[ParameterSpec, ...]:
        """Positions, then tokens."""
        return (self.token,) if self.position is None else (self.position, self.token)


@dataclass(frozen=True)
class HeadSpec(Sublayer):
    """The last norm and the output projection."""

    norm: NormSpec
    output: ParameterSpec | None
    """None: it reads the embedding's weight, which this rank holds."""

    @classmethod
    def of(cls, model: ModelConfig, vocab_size: int, *, apart: bool) -> HeadSpec:
        """`apart`: a tied embedding is on another rank. Of the two copies that one counts."""
        norm, tied = NormSpec("norm", model.hidden_size, model.norm, model.norm_eps), model.tie_embeddings
        if tied and not apart:
            return cls(norm, None)
        weight = vocabulary("embedding.weight" if tied else "head.weight", vocab_size, model.hidden_size,
                            model.init_std, copied=tied, counted=not tied)
        return cls(norm, ParameterSpec((weight,), read_by_backward=False))

    def parameters(self) -> tuple[ParameterSpec, ...]:
        """The norm's, then the projection."""
        return self.norm.parameters() + ((self.output,) if self.output is not None else ())
