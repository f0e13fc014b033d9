"""The `model` section from a Hugging Face `config.json` (llama, mistral, qwen2, qwen3, gpt2)."""

import json
from pathlib import Path
from typing import Any

from megafour.config.errors import ConfigError
from megafour.config.json_file import read_object

# Keys that say nothing about the shape of the decoder: bookkeeping, generation, token ids.
_IGNORED = frozenset(
    "architectures model_type transformers_version torch_dtype dtype use_cache bos_token_id eos_token_id pad_token_id "
    "unk_token_id sep_token_id _name_or_path name_or_path pretraining_tp output_attentions output_hidden_states "
    "return_dict is_decoder is_encoder_decoder torchscript task_specific_params id2label label2id "
    "gradient_checkpointing auto_map attn_implementation _attn_implementation _attn_implementation_autoset "
    "is_llama_config transformers.js_config summary_activation summary_first_dropout "
    "summary_proj_to_labels summary_type summary_use_proj n_ctx chunk_size_feed_forward problem_type "
    "num_labels use_bfloat16 keys_to_ignore_at_inference license".split()
)
_ROTARY = ("llama", "mistral", "qwen2", "qwen3")
_ABSENT: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": None, "max_position_embeddings": 2048, "sliding_window": None, "head_dim": None},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096, "head_dim": None},
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096, "head_dim": None},
    "qwen3": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096, "head_dim": 128},
}
"""What a key that is absent means to `transformers`, where the families differ."""
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
    file, config = _read(path)
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


def huggingface_family(path: Path) -> str:
    """The `model_type` of a Hugging Face folder or config.json."""
    return str(_read(path)[1].get("model_type"))


def _read(path: Path) -> tuple[Path, dict[str, Any]]:
    """The file, and what it holds."""
    file = path / "config.json" if path.is_dir() else path
    return file, read_object(file, ConfigError)


class _Keys:
    """The file's keys, each taken once, so that what nobody took is refused by name."""

    def __init__(self, config: dict[str, Any], file: Path) -> None:
        self.left = {key: value for key, value in config.items() if key not in _IGNORED}
        self.file = file

    def take(self, key: str, default: Any = None) -> Any:
        value = self.left.pop(key, default)
        return default if value is None else value

    def or_absent(self, key: str, absent: Any) -> Any:
        """The value, null included; `absent` only where the key is not there."""
        return self.left.pop(key, absent)

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
    absent = _ABSENT[family]
    keys.only("hidden_act", "silu")
    keys.only("rope_interleaved", False)
    heads, layers = keys.need("num_attention_heads"), keys.need("num_hidden_layers")
    qkv_bias, linear_bias = _biases(keys, family)
    positions = keys.take("max_position_embeddings", absent["max_position_embeddings"])
    theta, scaling = _rope(keys, positions)
    return {
        "num_layers": layers,
        "hidden_size": keys.need("hidden_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.or_absent("num_key_value_heads", absent["num_key_value_heads"]) or heads,
        "head_dim": keys.take("head_dim", absent["head_dim"]),
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
        "qkv_bias": qkv_bias,
        "linear_bias": linear_bias,
        "tie_embeddings": keys.take("tie_word_embeddings", False),
        "attention_window": _window(keys, family, layers),
        "attention_dropout": float(keys.take("attention_dropout", 0.0)),
        "init_std": float(keys.take("initializer_range", 0.02)),
    }


def _biases(keys: _Keys, family: str) -> tuple[bool, bool]:
    """(qkv_bias, linear_bias); the latter covers the output projection and the MLP together."""
    attention = keys.take("attention_bias", family == "qwen2")
    if family == "qwen2":
        if attention is not True:
            keys.refuse("attention_bias", attention)
        return True, False
    mlp = keys.take("mlp_bias", False)
    if attention != mlp:
        keys.refuse("mlp_bias" if mlp else "attention_bias", True)
    if mlp and family != "llama":
        keys.refuse("mlp_bias", mlp)    # such a model has none: the key would have no effect there
    return bool(attention), bool(mlp)


def _window(keys: _Keys, family: str, layers: int) -> int | None:
    """Tokens that a query sees, itself included; None: all before it.

    Mistral's window is on in every layer. Qwen's counts only with `use_sliding_window`, from layer `max_window_layers`
    on or where `layer_types` says so: a window in a part of the layers is refused.
    """
    window = keys.or_absent("sliding_window", _ABSENT[family]["sliding_window"])
    used = bool(keys.take("use_sliding_window", family == "mistral"))
    first = keys.take("max_window_layers", 0 if family == "mistral" else 28)
    kinds = keys.take("layer_types")
    if family == "llama" and window is not None:
        keys.refuse("sliding_window", window)
    window = window if used else None
    sliding = "sliding_attention"
    named = kinds or [sliding if window is not None and i >= first else "full_attention" for i in range(layers)]
    wanted = {sliding} if window is not None else {"full_attention"}
    if window is not None and set(named) == {"full_attention"} and family != "mistral":
        return None
    if set(named) != wanted:
        keys.refuse("layer_types", kinds) if kinds else keys.refuse("max_window_layers", first)
    return window


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
