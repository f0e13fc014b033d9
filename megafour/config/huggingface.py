"""The `model` section from a Hugging Face `config.json` (llama, mistral, qwen2, qwen3, gpt2)."""

import json
from pathlib import Path
from typing import Any

from megafour.config.errors import ConfigError

# Keys that say nothing about the shape of the decoder: bookkeeping, generation, token ids.
_IGNORED = frozenset(
    "architectures model_type transformers_version torch_dtype dtype use_cache bos_token_id eos_token_id pad_token_id "
    "unk_token_id sep_token_id _name_or_path name_or_path pretraining_tp output_attentions output_hidden_states "
    "return_dict is_decoder is_encoder_decoder torchscript task_specific_params id2label label2id "
    "gradient_checkpointing auto_map attn_implementation _attn_implementation _attn_implementation_autoset "
    "is_llama_config rope_interleaved transformers.js_config summary_activation summary_first_dropout "
    "summary_proj_to_labels summary_type summary_use_proj n_ctx chunk_size_feed_forward problem_type "
    "num_labels quantization_config_none use_bfloat16 keys_to_ignore_at_inference license".split()
)
_ROTARY = ("llama", "mistral", "qwen2", "qwen3")
_ROPE_SCALING = (
    "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
    "attention_factor",
)


def read_huggingface(path: Path) -> dict[str, Any]:
    """The keys of the `model` section that a Hugging Face configuration stands for.

    Args:
        path: the folder, or its `config.json`.
    Raises:
        ConfigError: for an unknown family, and for every key or value that this framework would not compute alike.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{file}: is not a mapping")
    family = config.get("model_type")
    keys = _Keys(config, file)
    if family in _ROTARY:
        values = _rotary(keys, str(family))
    elif family == "gpt2":
        values = _gpt2(keys)
    else:
        known = ", ".join((*_ROTARY, "gpt2"))
        raise ConfigError(f"{file}: model_type = {family!r} is not supported by this version: it reads {known}")
    keys.finish()
    return {key: value for key, value in values.items() if value is not None}


class _Keys:
    """The file's keys, each taken once, so that what nobody took is refused by name."""

    def __init__(self, config: dict[str, Any], file: Path) -> None:
        self.left = {key: value for key, value in config.items() if key not in _IGNORED}
        self.file = file

    def take(self, key: str, default: Any = None) -> Any:
        value = self.left.pop(key, default)
        return default if value is None else value

    def need(self, key: str) -> Any:
        if self.left.get(key) is None:
            raise ConfigError(f"{self.file}: {key} is missing")
        return self.left.pop(key)

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse any value but the allowed ones; the key may be absent."""
        value = self.left.pop(key, allowed[0])
        if value not in allowed:
            self.refuse(key, value)

    def refuse(self, key: str, value: Any) -> None:
        raise ConfigError(f"{self.file}: {key} = {json.dumps(value)} is not supported by this version")

    def finish(self) -> None:
        if self.left:
            key, value = next(iter(self.left.items()))
            raise ConfigError(f"{self.file}: {key} = {json.dumps(value)} is not known for this model_type")


def _rotary(keys: _Keys, family: str) -> dict[str, Any]:
    """Llama and its relatives: RMSNorm, SwiGLU, RoPE, grouped queries."""
    keys.only("hidden_act", "silu")
    _no_window(keys)
    heads, hidden = keys.need("num_attention_heads"), keys.need("hidden_size")
    attention_bias = keys.take("attention_bias", family == "qwen2")
    mlp_bias = keys.take("mlp_bias", False)
    if family == "qwen2":
        if attention_bias is not True:
            keys.refuse("attention_bias", attention_bias)
        output_bias = False
    else:
        output_bias = attention_bias
    if output_bias != mlp_bias:
        # linear_bias covers the output projection and the MLP together.
        keys.refuse("mlp_bias" if mlp_bias else "attention_bias", True)
    positions = keys.take("max_position_embeddings", 2048 if family == "llama" else 32768)
    theta, scaling = _rope(keys, positions)
    return {
        "num_layers": keys.need("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.take("num_key_value_heads", heads),
        "head_dim": keys.take("head_dim", 128 if family == "qwen3" else None),
        "ffn_hidden_size": keys.need("intermediate_size"),
        "vocab_size": keys.need("vocab_size"),
        "max_position_embeddings": positions,
        "norm": "rmsnorm",
        "norm_eps": float(keys.take("rms_norm_eps", 1.0e-6)),
        "activation": "swiglu",
        "position": "rope",
        "rope_theta": theta,
        "rope_scaling": scaling,
        "qk_norm": family == "qwen3",
        "qkv_bias": bool(attention_bias),
        "linear_bias": bool(output_bias),
        "tie_embeddings": keys.take("tie_word_embeddings", False),
        "attention_dropout": float(keys.take("attention_dropout", 0.0)),
        "init_std": float(keys.take("initializer_range", 0.02)),
    }


def _no_window(keys: _Keys) -> None:
    """Refuse a sliding window in use; Qwen configs carry one that `use_sliding_window: false` switches off."""
    used = keys.take("use_sliding_window", None)
    window, _ = keys.take("sliding_window"), keys.take("max_window_layers")
    if window is not None and used is not False:
        keys.refuse("sliding_window", window)
    layer_types = keys.take("layer_types", [])
    if any(kind != "full_attention" for kind in layer_types):
        keys.refuse("layer_types", layer_types)


def _rope(keys: _Keys, positions: int) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling), from the older keys `rope_theta`, `rope_scaling` or the newer `rope_parameters`."""
    theta = keys.take("rope_theta", 10000.0)
    scaling = dict(keys.take("rope_parameters", {}) or keys.take("rope_scaling", {}))
    keys.left.pop("rope_scaling", None)
    theta = scaling.pop("rope_theta", theta)
    kind = scaling.pop("rope_type", None) or scaling.pop("type", "default")
    scaling.pop("type", None)
    if kind == "default":
        return float(theta), None
    if kind not in ("linear", "llama3", "yarn"):
        keys.refuse("rope_scaling.rope_type", kind)
    unknown = [key for key, value in scaling.items() if key not in _ROPE_SCALING and value is not None]
    if unknown:
        keys.refuse(f"rope_scaling.{unknown[0]}", scaling[unknown[0]])
    if scaling.get("factor") is None:
        raise ConfigError(f"{keys.file}: rope_scaling.factor is missing")
    if kind != "linear":
        scaling.setdefault("original_max_position_embeddings", positions)
    numbers = {key: value if key.startswith("original") else float(value) for key, value in scaling.items() if value}
    return float(theta), {"type": kind, **numbers}


def _gpt2(keys: _Keys) -> dict[str, Any]:
    """GPT-2: LayerNorm, tanh-GELU, learned positions, biases, dropout."""
    activation = keys.take("activation_function", "gelu_new")
    names = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
    if activation not in names:
        keys.refuse("activation_function", activation)
    keys.only("scale_attn_weights", True)
    keys.only("scale_attn_by_inverse_layer_idx", False)
    keys.only("reorder_and_upcast_attn", False)
    keys.only("add_cross_attention", False)
    hidden = keys.need("n_embd")
    residual, embedding = float(keys.take("resid_pdrop", 0.1)), float(keys.take("embd_pdrop", 0.1))
    if residual != embedding:
        # hidden_dropout is one probability for both sites.
        keys.refuse("embd_pdrop", embedding)
    return {
        "num_layers": keys.need("n_layer"),
        "hidden_size": hidden,
        "num_attention_heads": keys.need("n_head"),
        "ffn_hidden_size": keys.take("n_inner", 4 * hidden),
        "vocab_size": keys.need("vocab_size"),
        "max_position_embeddings": keys.take("n_positions", 1024),
        "norm": "layernorm",
        "norm_eps": float(keys.take("layer_norm_epsilon", 1.0e-5)),
        "activation": names[activation],
        "position": "learned",
        "qkv_bias": True,
        "linear_bias": True,
        "tie_embeddings": keys.take("tie_word_embeddings", True),
        "attention_dropout": float(keys.take("attn_pdrop", 0.1)),
        "hidden_dropout": residual,
        "init_std": float(keys.take("initializer_range", 0.02)),
    }
