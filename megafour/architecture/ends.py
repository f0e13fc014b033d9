"""Both ends of the model described: the embedding, and the head with the last norm."""

from __future__ import annotations

from dataclasses import dataclass

from megafour.architecture.sublayer import Collective, Flops, NormSpec, Sublayer
from megafour.architecture.weights import ParameterSpec, Split, TensorParallel, Weight
from megafour.config.model_schema import ModelConfig


def vocabulary(name: str, words: int, hidden: int, std: float, *, copied: bool = False, counted: bool = True) -> Weight:
    """A `[vocab, hidden]` weight split over its words, rounded up.

    The rows of padding are never looked up, never make a logit, never saved.
    """
    return Weight(name, (words, hidden), Split(0, words, padded=True), std=std, copied=copied, counted=counted)


@dataclass(frozen=True)
class EmbeddingSpec(Sublayer):
    """The token embedding and, for learned positions, the position embedding."""

    hidden: int
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
        uses = 2 if model.tie_embeddings and not apart else 1
        return cls(model.hidden_size, ParameterSpec((token,), uses, read_by_backward=False), position)

    def parameters(self) -> tuple[ParameterSpec, ...]:
        """Positions, then tokens."""
        return (self.token,) if self.position is None else (self.position, self.token)

    def flops(self, seq_length: int) -> Flops:
        """A look-up multiplies nothing; counted is that it reads, adds and accumulates one row."""
        return Flops(3 * self.hidden)

    def collectives(self, at: TensorParallel, recompute: str) -> tuple[Collective, ...]:
        """Each rank knows its own rows, so the vectors are summed; under sequence parallelism they are scattered, and
        their gradient is gathered in the backward."""
        if not at.sequence_parallel:
            return (Collective("all_reduce", 1, self.hidden),)
        return Collective("reduce_scatter", 1, self.hidden), Collective("all_gather", 1, self.hidden)


@dataclass(frozen=True)
class HeadSpec(Sublayer):
    """The last norm and the output projection."""

    words: int
    norm: NormSpec
    output: ParameterSpec | None
    """None: it reads the embedding's weight, which this rank holds."""

    @classmethod
    def of(cls, model: ModelConfig, vocab_size: int, *, apart: bool) -> HeadSpec:
        """`apart`: a tied embedding is on another rank. Of the two copies that one counts."""
        norm, tied = NormSpec("norm", model.hidden_size, model.norm, model.norm_eps), model.tie_embeddings
        if tied and not apart:
            return cls(vocab_size, norm, None)
        weight = vocabulary("embedding.weight" if tied else "head.weight", vocab_size, model.hidden_size,
                            model.init_std, copied=tied, counted=not tied)
        return cls(vocab_size, norm, ParameterSpec((weight,), read_by_backward=False))

    def parameters(self) -> tuple[ParameterSpec, ...]:
        """The norm's, then the projection."""
        return self.norm.parameters() + ((self.output,) if self.output is not None else ())

    def flops(self, seq_length: int) -> Flops:
        """Those of the norm and of the projection, also where that is tied."""
        return Flops(6 * (self.norm.count + self.words * self.norm.size))

    def collectives(self, at: TensorParallel, recompute: str, chunks: int = 1) -> tuple[Collective, ...]:
        """The cross-entropy, in `chunks` of tokens: the maximum (one number a token), then the sum of exponentials and
        the label's logit (two); the input is gathered under sequence parallelism and its gradient scattered, else the
        gradient is summed."""
        loss, hidden = Collective("all_reduce", 2 * chunks, 3, wide=True), self.norm.size
        if not at.sequence_parallel:
            return loss, Collective("all_reduce", 1, hidden)
        return loss, Collective("all_gather", 1, hidden), Collective("reduce_scatter", 1, hidden)
