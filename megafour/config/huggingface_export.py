"""The Hugging Face `config.json` that stands for a `model` section: which family holds it, and under which keys."""

from typing import Any, NoReturn

from megafour.config.errors import ConfigError
from megafour.config.huggingface import FULL, SLIDING
from megafour.config.schema import ModelConfig

ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
                 "qwen3": "Qwen3ForCausalLM", "gpt2": "GPT2LMHeadModel"}
"""`model_type` -> the class of `transformers` that computes it."""


def family_of(model: ModelConfig) -> str:
    """The Hugging Face `model_type` that computes exactly this decoder.

    Raises:
        ConfigError: naming the key that no supported family has.
    """
    if model.position == "learned":
        return _gpt2_fits(model)
    if model.norm != "rmsnorm":
        _refuse("norm", model.norm, "families with position = rope have rmsnorm")
    if model.activation != "swiglu":
        _refuse("activation", model.activation, "families with position = rope have swiglu")
    if model.linear_bias and not model.qkv_bias:
        _refuse("linear_bias", True, "a family with biases in the MLP has them on wq, wk and wv too: qkv_bias")
    if model.qk_norm:
        if model.qkv_bias:
            _refuse("qkv_bias", True, "the family with qk_norm (qwen3) has no such biases")
        return "qwen3"
    if model.qkv_bias and not model.linear_bias:
        return "qwen2"
    if _windows(model) == {None}:
        return "llama"
    if len(_windows(model)) > 1:
        _refuse("attention_window", model.attention_window,
                "the families whose layers differ in it have qk_norm (qwen3) or qkv_bias (qwen2)")
    if model.qkv_bias:
        _refuse("qkv_bias", True, "the family with attention_window (mistral) has no biases")
    return "mistral"


def _windows(model: ModelConfig) -> set[int | None]:
    """The different windows of the layers; None: no window."""
    return {model.window(layer) for layer in range(model.num_layers)}


def _gpt2_fits(model: ModelConfig) -> str:
    """GPT-2 is the one family with learned positions."""
    needed = {"norm": "layernorm", "qkv_bias": True, "linear_bias": True, "qk_norm": False}
    for key, value in needed.items():
        if getattr(model, key) != value:
            _refuse(key, getattr(model, key), f"the family with learned positions (gpt2) has {key} = {value}")
    if _windows(model) != {None}:
        _refuse("attention_window", model.attention_window, "the family with learned positions (gpt2) has none")
    if model.gated:
        _refuse("activation", model.activation, "the family with learned positions (gpt2) has gelu or gelu_tanh")
    if model.kv_heads != model.num_attention_heads:
        _refuse("num_key_value_heads", model.kv_heads, "the family with learned positions (gpt2) has no grouped heads")
    if model.head_size * model.num_attention_heads != model.hidden_size:
        _refuse("head_dim", model.head_size, "the family with learned positions (gpt2) has hidden_size / heads")
    return "gpt2"


def _refuse(key: str, value: object, reason: str) -> NoReturn:
    text = str(value).lower() if isinstance(value, bool) else value
    raise ConfigError(f"model.{key} = {text} has no place in a Hugging Face model: {reason}")


def huggingface_config(model: ModelConfig, dtype: str, eos: int | list[int] | None,
                       other_ids: dict[str, Any] | None = None) -> dict[str, Any]:
    """The content of `config.json`; `read_huggingface` of it gives the same `model` section.

    Args:
        model: resolved; vocab_size is a number.
        dtype: `float32`, `bfloat16`, ...: type of the weights.
        eos: the end-of-document token, or several that end a text.
        other_ids: `bos_token_id`, `pad_token_id` where they are known.
    Raises:
        ConfigError: naming the key that no supported family has.
    """
    family = family_of(model)
    if not isinstance(model.vocab_size, int):
        _refuse("vocab_size", model.vocab_size, "it must be a number there")
    # Token ids are written even where they are unknown: the families' own defaults name tokens of other vocabularies.
    ids = {"bos_token_id": None, "eos_token_id": eos, "pad_token_id": None, **(other_ids or {})}
    shape = _gpt2(model) if family == "gpt2" else _rotary(model, family)
    return {"architectures": [ARCHITECTURES[family]], "model_type": family, **shape, **ids,
            "tie_word_embeddings": model.tie_embeddings, "initializer_range": model.init_std, "use_cache": True,
            "torch_dtype": dtype}


def _rotary(model: ModelConfig, family: str) -> dict[str, Any]:
    """Keys of Llama and its relatives."""
    values: dict[str, Any] = {
        "vocab_size": model.vocab_size, "hidden_size": model.hidden_size, "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers, "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.kv_heads, "head_dim": model.head_size, "hidden_act": "silu",
        "max_position_embeddings": model.max_position_embeddings, "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta, "rope_scaling": _scaling(model), "attention_dropout": model.attention_dropout,
    }
    if family == "llama":
        values.update(attention_bias=model.qkv_bias, mlp_bias=model.linear_bias)
    elif family == "mistral":
        values["sliding_window"] = model.window(0)
    else:
        if family == "qwen3":
            values["attention_bias"] = False
        values.update(_sliding(model))
    return values


def _sliding(model: ModelConfig) -> dict[str, Any]:
    """Qwen's keys of windows: one length, and the layers that have it.

    `max_window_layers` alone says which where the windowed layers are the last ones; else `layer_types` does, which
    releases of `transformers` before it do not read.
    """
    windows = [model.window(layer) for layer in range(model.num_layers)]
    lengths = _windows(model) - {None}
    if len(lengths) > 1:
        _refuse("attention_window", model.attention_window, "the families with windows (qwen2, qwen3) have one length")
    first = next((layer for layer, window in enumerate(windows) if window), model.num_layers)
    values: dict[str, Any] = {"use_sliding_window": bool(lengths), "sliding_window": next(iter(lengths), None),
              "max_window_layers": first}
    if any(window is None for window in windows[first:]):
        values["layer_types"] = [SLIDING if window else FULL for window in windows]
    return values


def _scaling(model: ModelConfig) -> dict[str, Any] | None:
    """`rope_scaling`; llama3's two numbers are written even where we leave them out, since readers ask for them."""
    if model.rope_scaling is None:
        return None
    given = {key: value for key, value in model.rope_scaling.model_dump().items() if value is not None}
    kind = given.pop("type")
    assumed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    return {"rope_type": kind, **assumed, **given}


def _gpt2(model: ModelConfig) -> dict[str, Any]:
    """Keys of GPT-2."""
    return {
        "vocab_size": model.vocab_size, "n_positions": model.max_position_embeddings, "n_embd": model.hidden_size,
        "n_layer": model.num_layers, "n_head": model.num_attention_heads, "n_inner": model.ffn_size,
        "activation_function": {"gelu_tanh": "gelu_new", "gelu": "gelu"}[model.activation],
        "layer_norm_epsilon": model.norm_eps, "resid_pdrop": model.hidden_dropout, "embd_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
    }
