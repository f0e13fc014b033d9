"""The `model` section from a Hugging Face `config.json` (llama, mistral, qwen2, qwen3, gpt2)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from megafour.config.errors import ConfigError
from megafour.config.huggingface_fields import (
    GPT2Fields,
    Keys,
    Kind,
    LlamaFields,
    MistralFields,
    Qwen2Fields,
    Qwen3Fields,
    RopeFields,
    RotaryFields,
    shown,
)
from megafour.config.huggingface_unknown import drop_unknown
from megafour.config.json_file import read_object
from megafour.config.notes import say_note

_ROTARY: dict[str, type[RotaryFields]] = {
    "llama": LlamaFields, "mistral": MistralFields, "qwen2": Qwen2Fields, "qwen3": Qwen3Fields,
}
FULL: Kind = "full_attention"
SLIDING: Kind = "sliding_attention"
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
}
"""Keys of `model.rope_scaling` that count for each kind."""
_CONTEXT = "original_max_position_embeddings"


def read_huggingface(path: Path) -> dict[str, Any]:
    """The keys of the `model` section that a Hugging Face configuration stands for.

    Keys that are not known and change nothing give one line on standard error.

    Args:
        path: the folder, or its `config.json`.
    Raises:
        ConfigError: for an unknown family, a value of another type, and every key or value that this framework would
            not compute alike.
    """
    file, config = _read(path)
    family = config.get("model_type")
    keys = Keys(file)
    if family in tuple(_ROTARY):
        fields, others = keys.read(_ROTARY[family], config)
        values = _rotary(keys, fields, family)
    elif family == "gpt2":
        found, others = keys.read(GPT2Fields, config)
        values = _gpt2(keys, found)
    else:
        known = ", ".join((*_ROTARY, "gpt2"))
        raise ConfigError(f"{file}: model_type = {shown(family)} is not supported by this version: it reads {known}")
    drop_unknown(keys, others, str(family))
    _say_length(keys, others, values["max_position_embeddings"])
    return {key: value for key, value in values.items() if value is not None}


def huggingface_family(path: Path) -> str:
    """The `model_type` of a Hugging Face folder or config.json."""
    return str(_read(path)[1].get("model_type"))


def _read(path: Path) -> tuple[Path, dict[str, Any]]:
    """The file, and what it holds."""
    file = path / "config.json" if path.is_dir() else path
    return file, read_object(file, ConfigError)


def _say_length(keys: Keys, others: dict[str, Any], positions: int) -> None:
    """Early Llamas name their length by a key that `transformers` does not read, and so keep its default."""
    named = others.get("max_sequence_length")
    if named is not None and named != positions:
        say_note(f"{keys.file}: max_sequence_length = {shown(named)} is ignored, as transformers does; "
                 f"max_position_embeddings is {positions}")


def _rotary(keys: Keys, f: RotaryFields, family: str) -> dict[str, Any]:
    """Llama and its relatives: RMSNorm, SwiGLU, RoPE, grouped queries."""
    qkv_bias, linear_bias = _biases(keys, f, family)
    theta, scaling = _rope(keys, f)
    return {
        "num_layers": f.num_hidden_layers,
        "hidden_size": f.hidden_size,
        "num_attention_heads": f.num_attention_heads,
        "num_key_value_heads": f.num_key_value_heads or f.num_attention_heads,
        "head_dim": f.head_dim or None,
        "ffn_hidden_size": f.intermediate_size,
        "vocab_size": f.vocab_size,
        "max_position_embeddings": f.max_position_embeddings,
        "norm": "rmsnorm",
        "norm_eps": f.rms_norm_eps,
        "activation": "swiglu",
        "position": "rope",
        "rope_theta": theta,
        "rope_scaling": scaling,
        "qk_norm": family == "qwen3",
        "qkv_bias": qkv_bias,
        "linear_bias": linear_bias,
        "tie_embeddings": f.tie_word_embeddings,
        "attention_window": _window(keys, f, family),
        "attention_dropout": f.attention_dropout or 0.0,
        "init_std": f.initializer_range,
    }


def _biases(keys: Keys, f: RotaryFields, family: str) -> tuple[bool, bool]:
    """(qkv_bias, linear_bias); the latter covers the output projection and the MLP together."""
    if family == "qwen2":
        if f.attention_bias is False:
            keys.refuse("attention_bias", False, "qwen2 always has biases on its queries, keys and values")
        if f.mlp_bias:
            keys.refuse("mlp_bias", True, "qwen2 has no biases in its MLP")
        return True, False
    attention, mlp = bool(f.attention_bias), bool(f.mlp_bias)
    if family == "llama" and attention == mlp:
        return attention, mlp
    if mlp or attention:
        key = "mlp_bias" if mlp else "attention_bias"
        keys.refuse(key, True, f"{family} is read with biases on all of its linear layers or on none"
                    if family == "llama" else f"{family} is read without biases")
    return False, False


def _window(keys: Keys, f: RotaryFields, family: str) -> int | list[int | None] | None:
    """Tokens that a query sees, itself included; None: all before it; a list where the layers differ.

    Llama has no window and Mistral one in every layer, whatever the other keys say: values that contradict that are
    refused. Qwen's counts with `use_sliding_window`, in the layers that `layer_types` names.
    """
    layers = f.num_hidden_layers
    if isinstance(f, Qwen2Fields):
        window = f.sliding_window if f.use_sliding_window else None
        kinds: list[Kind] | None = f.layer_types
        if kinds is None:
            kinds = [SLIDING if window and i >= f.max_window_layers else FULL for i in range(layers)]
        _check_layer_types(keys, kinds, layers)
        if window is None and SLIDING in kinds:
            keys.refuse("layer_types", kinds, f"it names {SLIDING}, and there is no window: it takes "
                                              "use_sliding_window = true and a sliding_window")
        return _pattern([window if kind == SLIDING else None for kind in kinds])
    window = f.sliding_window if family == "mistral" else None
    if family == "llama" and f.sliding_window is not None and f.use_sliding_window is not False:
        keys.refuse("sliding_window", f.sliding_window, "llama has no attention window")
    if f.use_sliding_window is not None and f.use_sliding_window is not (window is not None):
        keys.refuse("use_sliding_window", f.use_sliding_window, f"{family} does not read it, and would compute "
                    f"{'without a window' if window is None else f'with a window of {window} tokens'}")
    if window is not None and f.max_window_layers is not None and f.max_window_layers > 0:
        keys.refuse("max_window_layers", f.max_window_layers, f"{family} has its window in every layer")
    if f.layer_types is not None:
        _check_layer_types(keys, f.layer_types, layers)
        if set(f.layer_types) != {FULL if window is None else SLIDING}:
            keys.refuse("layer_types", f.layer_types, f"{family} computes all layers alike")
    return window


def _check_layer_types(keys: Keys, kinds: list[Any], layers: int) -> None:
    if len(kinds) != layers:
        keys.refuse("layer_types", kinds, f"it has {len(kinds)} entries, and num_hidden_layers is {layers}")


def _pattern(windows: list[int | None]) -> int | list[int | None] | None:
    """The shortest list whose repetition gives the windows of all layers; one value where they are equal."""
    for period in range(1, len(windows) + 1):
        if all(window == windows[i % period] for i, window in enumerate(windows)):
            break
    return windows[:period] if period > 1 else windows[0]


def _rope(keys: Keys, f: RotaryFields) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling), from the older keys `rope_theta` and `rope_scaling` or the newer `rope_parameters`.

    As `transformers` has it: a `rope_scaling` that is not empty replaces `rope_parameters`, and a theta or an original
    length inside them goes before the model's, but for an original length beside them, which goes before all.
    """
    source = "rope_scaling" if f.rope_scaling else "rope_parameters"
    raw = f.rope_scaling or f.rope_parameters or {}
    rope, others = keys.read(RopeFields, raw, f"{source}.")
    kind = rope.rope_type or rope.type or "default"
    if kind not in _ROPE_KEYS:
        keys.refuse(f"{source}.{'rope_type' if rope.rope_type else 'type'}", kind,
                    f"this version reads {', '.join(_ROPE_KEYS)}")
    if others.get("attn_factor") is not None:     # some engines read it, transformers does not
        say_note(f"{keys.file}: {source}.attn_factor = {shown(others.pop('attn_factor'))} is ignored, as "
                 "transformers does")
    for key, value in others.items():
        off = value is None or (key == "partial_rotary_factor" and type(value) is not bool and value == 1) or (
            key == "truncate" and value is True)
        if not off:
            keys.refuse(f"{source}.{key}", value, f"the key is not known for rotary embeddings of type {kind}")
    theta = raw.get("rope_theta", f.rope_theta)
    if theta is None:
        keys.refuse("rope_theta", None, "it must be a number")
    if kind == "default":
        return float(theta), None
    return float(theta), {"type": kind, **_scaling(keys, f, rope, kind, source, "factor" in raw)}


def _scaling(keys: Keys, f: RotaryFields, rope: RopeFields, kind: str, source: str, given: bool) -> dict[str, Any]:
    """The numbers of one kind of scaling; keys of other kinds have no effect there and are left out."""
    context = f.original_max_position_embeddings or rope.original_max_position_embeddings or f.max_position_embeddings
    values = {**rope.model_dump(), _CONTEXT: context}
    if kind == "yarn" and given and rope.factor is None:
        values["factor"] = f.max_position_embeddings / context
    if kind == "yarn" and rope.attention_factor is None and rope.mscale and rope.mscale_all_dim:
        values["attention_factor"] = (_mscale(values["factor"], rope.mscale)
                                      / _mscale(values["factor"], rope.mscale_all_dim))
    for key in ("factor", *(("low_freq_factor", "high_freq_factor") if kind == "llama3" else ())):
        if values[key] is None:
            raise ConfigError(f"{keys.file}: {source}.{key} is missing")
    return {key: values[key] for key in _ROPE_KEYS[kind] if values[key] is not None}


def _mscale(factor: float, mscale: float) -> float:
    """YaRN's factor on cosines and sines (arXiv:2309.00071, section 3.4), with DeepSeek's weight on its slope."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _gpt2(keys: Keys, f: GPT2Fields) -> dict[str, Any]:
    """GPT-2: LayerNorm, tanh-GELU, learned positions, biases, dropout."""
    for key, alias in (("n_layer", "num_hidden_layers"), ("n_embd", "hidden_size"), ("n_head", "num_attention_heads"),
                       ("n_positions", "max_position_embeddings")):
        if getattr(f, alias) not in (None, getattr(f, key)):
            keys.refuse(alias, getattr(f, alias), f"it is another name of {key}, which is {getattr(f, key)}")
    for key, needed in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False),
                        ("reorder_and_upcast_attn", False), ("add_cross_attention", False)):
        if getattr(f, key) is not needed:
            keys.refuse(key, getattr(f, key), f"this version computes {shown(needed)}")
    if f.resid_pdrop != f.embd_pdrop:
        keys.refuse("embd_pdrop", f.embd_pdrop, f"resid_pdrop is {f.resid_pdrop:g}, and model.hidden_dropout is one "
                                                "probability for both")
    return {
        "num_layers": f.n_layer,
        "hidden_size": f.n_embd,
        "num_attention_heads": f.n_head,
        "ffn_hidden_size": f.n_inner or 4 * f.n_embd,
        "vocab_size": f.vocab_size,
        "max_position_embeddings": f.n_positions,
        "norm": "layernorm",
        "norm_eps": f.layer_norm_epsilon,
        "activation": "gelu" if f.activation_function == "gelu" else "gelu_tanh",
        "position": "learned",
        "qkv_bias": True,
        "linear_bias": True,
        "tie_embeddings": f.tie_word_embeddings,
        "attention_dropout": f.attn_pdrop,
        "hidden_dropout": f.resid_pdrop,
        "init_std": f.initializer_range,
    }
