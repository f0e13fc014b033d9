"""Floating-point operations of the model per token: what MFU divides by and the pipeline's partition balances.

Convention: a parameter that multiplies a token's activations costs 6 FLOPs a token (2 forward, 4 backward), so 6·N
with N every parameter but the looked-up embeddings (a tied embedding counts once, as the head). Attention's two
products over the sequence cost 12·L·H·S a token when every pair of tokens is counted and half of that, 6·L·H·S, when
only the causal half is, which is what is computed; H = heads × head size. A window of W tokens counts W·(2 - W/S) of
S in place of S. Recomputation is not counted, and packed documents are counted as one text: model FLOPs.
"""

from __future__ import annotations

from dataclasses import dataclass

from megafour.config.model_schema import ModelConfig


@dataclass(frozen=True)
class Flops:
    """Model FLOPs a token, forward and backward together, as whole numbers."""

    layer_linear: int
    """6 × the parameters of one layer."""
    attention: tuple[int, ...]
    """Each layer's products over the pairs of tokens that see each other: 6·H·S, the causal half, without a window."""
    head: int
    """6 × the parameters of the output projection and the last norm."""
    embedding: int
    """The lookup: no multiplication; counted as reading, adding and accumulating one row (3·hidden)."""

    @property
    def layers(self) -> list[int]:
        """Each decoder layer."""
        return [self.layer_linear + attention for attention in self.attention]

    @property
    def per_token(self) -> int:
        """The whole model, causal attention counted half; the lookup is left out, as everybody does."""
        return sum(self.layers) + self.head


def layer_parameters(model: ModelConfig) -> int:
    """Parameters of one decoder layer."""
    hidden, ffn = model.hidden_size, model.ffn_size
    query, kv = model.num_attention_heads * model.head_size, model.kv_heads * model.head_size
    up = 2 if model.gated else 1
    matrices = hidden * (query + 2 * kv) + query * hidden + (up + 1) * hidden * ffn
    biases = (query + 2 * kv) if model.qkv_bias else 0
    if model.linear_bias:
        biases += hidden + up * ffn + hidden
    norms = 2 * norm_parameters(model) + (2 * model.head_size if model.qk_norm else 0)
    return matrices + biases + norms


def model_parameters(model: ModelConfig, vocab_size: int) -> int:
    """Trained numbers of the whole model with `vocab_size` token ids, padding not counted."""
    embeddings = vocab_size * model.hidden_size * (1 if model.tie_embeddings else 2)
    if model.position == "learned":
        embeddings += (model.max_position_embeddings or 0) * model.hidden_size
    return model.num_layers * layer_parameters(model) + norm_parameters(model) + embeddings


def norm_parameters(model: ModelConfig) -> int:
    """Parameters of one norm over the hidden size: a gain, and with LayerNorm a bias."""
    return model.hidden_size * (2 if model.norm == "layernorm" else 1)


def model_flops(model: ModelConfig, seq_length: int, vocab_size: int | None = None) -> Flops:
    """FLOPs a token of `model` at `seq_length` tokens; `vocab_size` replaces the model's own where that is `auto`."""
    vocabulary = int(model.vocab_size) if vocab_size is None else vocab_size
    heads = model.num_attention_heads * model.head_size
    return Flops(
        layer_linear=6 * layer_parameters(model),
        attention=tuple(6 * heads * seen_keys(seq_length, model.window(i)) for i in range(model.num_layers)),
        head=6 * (model.hidden_size * vocabulary + norm_parameters(model)),
        embedding=3 * model.hidden_size,
    )


def seen_keys(seq_length: int, window: int | None = None) -> int:
    """Twice the mean number of keys that a query sees, the diagonal counted half: S without a window."""
    width = seq_length if window is None else min(window, seq_length)
    return round(width * (2 - width / seq_length))


def mfu(tokens_per_second: float, flops_per_token: float, peak_tflops: float | None, world: int) -> float | None:
    """Model FLOPs utilisation: the share of `world` devices' peak that the model's own FLOPs take; None without a peak.

    `tokens_per_second` is global, `peak_tflops` is one device's, in 10¹² FLOP/s.
    """
    if not peak_tflops:
        return None
    return tokens_per_second * flops_per_token / (peak_tflops * 1e12 * world)
