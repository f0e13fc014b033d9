"""The `model` section: the shape of the decoder."""

from typing import Annotated, Literal

from pydantic import Field

from megafour.config.base import Count, Location, Positive, Rate, Section


class RopeScaling(Section):
    """How rotary frequencies are stretched for long sequences; the key names are those of Hugging Face configs."""

    type: Literal["linear", "llama3", "yarn"] = "linear"
    """`linear` divides positions by `factor`; `llama3` (Llama 3.1) and `yarn` (arXiv:2309.00071) stretch low
    frequencies only."""

    factor: Positive = 1.0
    """The stretch: new context length over the original one."""

    original_max_position_embeddings: Count | None = None
    """`llama3`, `yarn`: context length, in tokens, of the unscaled frequencies. Required by both."""

    low_freq_factor: Positive | None = None
    """`llama3`: wavelengths longer than original length / this are stretched fully. Null: 1."""

    high_freq_factor: Positive | None = None
    """`llama3`: wavelengths shorter than original length / this are kept. Null: 4."""

    beta_fast: Positive | None = None
    """`yarn`: dimensions that turn more often than this over the original length are kept. Null: 32."""

    beta_slow: Positive | None = None
    """`yarn`: dimensions that turn less often than this over the original length are stretched fully. Null: 1."""

    attention_factor: Positive | None = None
    """`yarn`: factor on the cosines and sines. Null: 0.1 · ln(factor) + 1."""


class ModelConfig(Section):
    """The decoder: its size, its family and its regularisation."""

    preset: Location | None = None
    """Take the shape of a known model: a preset's name, or the path of a Hugging Face folder or of its `config.json`.
    Keys set beside it override it."""

    num_layers: Count = 8
    """Transformer blocks in the whole model."""

    hidden_size: Count = 256
    """Width of the residual stream."""

    num_attention_heads: Count = 8
    """Query heads."""

    num_key_value_heads: Count | None = None
    """Key/value heads for grouped-query attention. Null: as many as query heads."""

    head_dim: Count | None = None
    """Width of one head. Null: hidden_size / num_attention_heads."""

    ffn_hidden_size: Count | None = None
    """Width inside the MLP. Null: 4 · hidden_size without a gate; with one 8/3 · hidden_size, rounded up to a multiple
    of 64."""

    vocab_size: Literal["auto"] | Count = "auto"
    """Number of token ids, without the padding of tensor parallelism. `auto`: the tokenizer's, or the dataset's."""

    max_position_embeddings: Count | None = None
    """Longest sequence. For learned positions the number of trained positions. Null: data.seq_length."""

    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Normalisation before attention, before the MLP and before the head. `layernorm` has a bias."""

    norm_eps: Positive = 1.0e-5
    """Added to the variance inside every norm."""

    activation: Literal["swiglu", "geglu", "gelu", "gelu_tanh"] = "swiglu"
    """The MLP. `swiglu` and `geglu` have a gate (three matrices); `gelu` (exact) and `gelu_tanh` (GPT-2's
    approximation) have none (two matrices)."""

    position: Literal["rope", "learned"] = "rope"
    """`rope` rotates queries and keys; `learned` adds a trained vector for each position to the embedding."""

    rope_theta: Positive = 10000.0
    """Base of the rotary frequencies."""

    rope_scaling: RopeScaling | None = None
    """Stretching of the rotary frequencies. Null: none."""

    qk_norm: bool = False
    """RMSNorm over the head dimension of every query and key head, before RoPE (Qwen3)."""

    qkv_bias: bool = False
    """Biases on wq, wk and wv."""

    linear_bias: bool = False
    """Biases on the attention's output projection and on the MLP's matrices."""

    tie_embeddings: bool = False
    """The head uses the embedding's weight."""

    attention_window: Count | Annotated[list[Count | None], Field(min_length=1)] | None = None
    """Tokens that a query sees, itself included. Null: all before it. A list is a pattern over the layers, repeated:
    `[1024, 1024, null]`."""

    attention_dropout: Rate = 0.0
    """Probability that an attention weight is dropped. Above 0 attention runs on the plain blockwise backend."""

    hidden_dropout: Rate = 0.0
    """Probability that an element is dropped after the embedding and after each attention and MLP output."""

    init_std: Positive = 0.02
    """Standard deviation of initial weights; output projections get init_std / sqrt(2 · num_layers)."""

    @property
    def head_size(self) -> int:
        """Width of one head: head_dim, or hidden_size // num_attention_heads."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.num_key_value_heads or self.num_attention_heads

    def window(self, layer: int) -> int | None:
        """Tokens that a query of this layer sees; None: all before it."""
        pattern = self.attention_window
        return pattern[layer % len(pattern)] if isinstance(pattern, list) else pattern

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate matrix."""
        return self.activation in ("swiglu", "geglu")

    @property
    def ffn_size(self) -> int:
        """Width inside the MLP: ffn_hidden_size, or its default for the activation."""
        if self.ffn_hidden_size:
            return self.ffn_hidden_size
        if not self.gated:
            return 4 * self.hidden_size
        return -(-8 * self.hidden_size // (3 * 64)) * 64
