"""Self-attention described: fused q/k/v, the output projection, optional norms of queries and keys."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megafour.architecture.sublayer import Collective, Flops, LinearSpec, LocalHeads, NormSpec, Sublayer, column, row
from megafour.architecture.weights import ParameterSpec, Split, TensorParallel
from megafour.config.model_schema import ModelConfig


@dataclass(frozen=True)
class AttentionSpec(Sublayer):
    """Grouped-query self-attention (Ainslie et al. 2023) of one layer, heads split over tp."""

    layer: int
    heads: int
    """Query heads."""
    head_size: int
    window: int | None
    """Tokens that a query sees; None: all before it."""
    qkv: LinearSpec
    output: LinearSpec
    q_norm: NormSpec | None
    k_norm: NormSpec | None

    @classmethod
    def of(cls, model: ModelConfig, layer: int) -> AttentionSpec:
        """The attention of layer `layer`."""
        name, size, heads = f"layers.{layer}.attention", model.head_size, model.num_attention_heads
        # With more tp ranks than K/V heads a head lives on several: each sees the gradient of its own query heads.
        outputs = {f"{name}.w{letter}": (units * size, Split(0, units, replicas="kv"))
                   for letter, units in (("q", heads), ("k", model.kv_heads), ("v", model.kv_heads))}
        # Each rank normalises its own heads, so these gradients are partial with or without sequence parallelism.
        norms = [NormSpec(f"{name}.{which}_norm", size, "rmsnorm", model.norm_eps, "heads") if model.qk_norm else None
                 for which in "qk"]
        return cls(layer, heads, size, model.window(layer),
                   column(outputs, model.hidden_size, bias=model.qkv_bias, std=model.init_std),
                   row(f"{name}.wo", model.hidden_size, heads * size, heads, bias=model.linear_bias,
                       std=output_std(model)), *norms)

    def flops(self, seq_length: int) -> Flops:
        """Those of its parameters, and of the two products over the keys that each query sees."""
        return Flops(6 * self.count, 6 * self.heads * self.head_size * seen_keys(seq_length, self.window))

    def saved(self, at: TensorParallel, recompute: str) -> int:
        """Queries, keys, values and the output: the same where the backward computes attention again (`selective`)."""
        heads = self.local_heads(at)
        return 2 * (heads.query + heads.kv) * heads.size

    def collectives(self, at: TensorParallel, recompute: str) -> tuple[Collective, ...]:
        """Those of its projections."""
        return self.qkv.collectives(at, recompute) + self.output.collectives(at, recompute)

    def attentions(self, at: TensorParallel) -> tuple[LocalHeads, ...]:
        """One."""
        return (self.local_heads(at),)

    def local_heads(self, at: TensorParallel) -> LocalHeads:
        """The heads of one tensor-parallel rank."""
        q, k, _ = (weight.local_shape(at)[0] // self.head_size for weight in self.qkv.weight.weights)
        return LocalHeads(q, k, self.head_size, self.window)

    def parameters(self) -> tuple[ParameterSpec, ...]:
        """The projections', then the norms'."""
        return tuple(spec for part in (self.qkv, self.output, self.q_norm, self.k_norm) if part is not None
                     for spec in part.parameters())


def seen_keys(seq_length: int, window: int | None = None) -> int:
    """Twice the mean number of keys that a query sees, the diagonal counted half: S without a window."""
    width = seq_length if window is None else min(window, seq_length)
    return round(width * (2 - width / seq_length))


def output_std(model: ModelConfig) -> float:
    """Initial std of the projections that write into the residual: init_std / sqrt(2·layers) (Radford 2019)."""
    return model.init_std / math.sqrt(2 * model.num_layers)
