"""The keys of a Hugging Face `config.json` that are read, each with its type, its default and what null means.

Types are as strict as those of our own keys: no text for a number, no `true` for 1, no 16.0 for 16, no NaN. An integer
is a number too, since writers of JSON drop `.0`. Defaults are those of `transformers` for a key that is absent; null
is taken only where `transformers` takes it.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megafour.config.base import Positive, Rate
from megafour.config.errors import ConfigError
from megafour.config.types import in_words

Whole = Annotated[int, Field(gt=0, lt=2**63)]
"""A whole number, at least 1."""
Layers = Annotated[int, Field(gt=0, lt=100_000)]
"""A number of layers; lists have one entry for each."""
Kind = Literal["full_attention", "sliding_attention"]
Found = TypeVar("Found", bound="Fields")


class Fields(BaseModel):
    """The declared keys of one JSON object."""

    model_config = ConfigDict(strict=True, frozen=True, protected_namespaces=())


class RotaryFields(Fields):
    """What Llama and its relatives share. Keys of one family that another ignores are declared in both, so that a value
    that only seems to count can be refused."""

    num_hidden_layers: Layers
    hidden_size: Whole
    num_attention_heads: Whole
    intermediate_size: Whole
    vocab_size: Whole
    num_key_value_heads: Whole | None = None
    head_dim: Whole | None = None
    max_position_embeddings: Whole
    hidden_act: Literal["silu", "swish"] = "silu"
    rms_norm_eps: Positive = 1.0e-6
    initializer_range: Positive = 0.02
    attention_dropout: Rate | None = 0.0
    tie_word_embeddings: bool = False
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    rope_theta: Positive | None = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    original_max_position_embeddings: Whole | None = None
    sliding_window: Whole | None = None
    use_sliding_window: bool | None = None
    max_window_layers: int | None = None
    layer_types: list[Kind] | None = None


class LlamaFields(RotaryFields):
    """`LlamaConfig`; it ignores every key of windows."""

    max_position_embeddings: Whole = 2048
    attention_bias: bool = False
    mlp_bias: bool = False


class MistralFields(RotaryFields):
    """`MistralConfig`: one window in all layers."""

    num_key_value_heads: Whole = 8
    max_position_embeddings: Whole = 131072
    attention_dropout: Rate = 0.0
    sliding_window: Whole | None = 4096


class Qwen2Fields(RotaryFields):
    """`Qwen2Config`: a window only with `use_sliding_window`, in the layers that `layer_types` names, else from layer
    `max_window_layers` on. Its head_dim may be absent, not null."""

    num_key_value_heads: Whole | None = 32
    head_dim: Whole = 0     # absent; a default is not validated
    max_position_embeddings: Whole = 32768
    attention_dropout: Rate = 0.0
    sliding_window: Whole | None = 4096
    use_sliding_window: bool = False
    max_window_layers: int = 28


class Qwen3Fields(Qwen2Fields):
    """`Qwen3Config`."""

    head_dim: Whole = 128
    attention_bias: bool = False


class RopeFields(Fields):
    """Keys of `rope_scaling` and `rope_parameters`. `type` is the older name of `rope_type`."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
    factor: Positive | None = None
    original_max_position_embeddings: Whole | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    attention_factor: Positive | None = None
    mscale: Positive | None = None
    mscale_all_dim: Positive | None = None


class GPT2Fields(Fields):
    """`GPT2Config`. The second names of four keys are those under which it takes them too."""

    n_layer: Whole
    n_embd: Whole
    n_head: Whole
    vocab_size: Whole
    n_positions: Whole = 1024
    num_hidden_layers: Whole | None = None
    hidden_size: Whole | None = None
    num_attention_heads: Whole | None = None
    max_position_embeddings: Whole | None = None
    n_inner: Whole | None = None
    activation_function: Literal["gelu_new", "gelu_pytorch_tanh", "gelu"] = "gelu_new"
    layer_norm_epsilon: Positive = 1.0e-5
    initializer_range: Positive = 0.02
    resid_pdrop: Rate = 0.1
    embd_pdrop: Rate = 0.1
    attn_pdrop: Rate = 0.1
    tie_word_embeddings: bool = True
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    reorder_and_upcast_attn: bool = False
    add_cross_attention: bool = False


class Keys:
    """Messages on the keys of one file."""

    def __init__(self, file: object) -> None:
        self.file = file

    def read(self, fields: type[Found], values: dict[str, Any], prefix: str = "") -> tuple[Found, dict[str, Any]]:
        """(the declared keys, the others).

        Args:
            fields: the class that declares them.
            values: a JSON object.
            prefix: `rope_scaling.` for what lies in that key.
        Raises:
            ConfigError: naming the first key that is missing or whose value is of another type.
        """
        declared = {key: value for key, value in values.items() if key in fields.model_fields}
        try:
            found = fields.model_validate(declared)
        except ValidationError as error:
            detail = error.errors()[0]
            key = str(detail["loc"][0])
            if detail["type"] == "missing":
                raise ConfigError(f"{self.file}: {prefix}{key} is missing") from None
            self.refuse(prefix + key, values[key], self._needed(fields, detail))
        return found, {key: value for key, value in values.items() if key not in declared}

    @staticmethod
    def _needed(fields: type[Fields], detail: Any) -> str:
        """What a value must be: its type in words, or the bound that it breaks."""
        kind = str(detail["type"])
        if kind in ("greater_than", "greater_than_equal", "less_than", "finite_number"):
            return str(detail["msg"]).replace("Input should be", "it must be")
        annotation = fields.model_fields[str(detail["loc"][0])].annotation
        words = "a mapping or null" if "dict" in str(annotation) else in_words(annotation)
        return f"it must be {words}"

    def refuse(self, key: str, value: Any, reason: str) -> NoReturn:
        """Raise ConfigError: `FILE: KEY = VALUE is not supported: REASON`."""
        raise ConfigError(f"{self.file}: {key} = {shown(value)} is not supported: {reason}")


def shown(value: Any, limit: int = 80) -> str:
    """A value as JSON, cut where it is long."""
    try:
        text = json.dumps(value)
    except RecursionError:      # it could be read, from a shallower call
        text = "a value nested too deep to show"
    return text if len(text) <= limit else f"{text[:limit - 1]}…"
