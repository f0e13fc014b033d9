"""Shapes of known models by name, or from a Hugging Face configuration."""

import difflib
from pathlib import Path
from typing import Any

from megafour.config.errors import ConfigError
from megafour.config.huggingface import read_huggingface

_LLAMA: dict[str, Any] = {
    "norm": "rmsnorm", "norm_eps": 1.0e-5, "activation": "swiglu", "position": "rope", "rope_theta": 500000.0,
}
_LLAMA_31_SCALING: dict[str, Any] = {
    "type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_GPT2: dict[str, Any] = {
    "norm": "layernorm", "norm_eps": 1.0e-5, "activation": "gelu_tanh", "position": "learned", "qkv_bias": True,
    "linear_bias": True, "tie_embeddings": True,
}

PRESETS: dict[str, dict[str, Any]] = {
    # Radford et al. 2019. Dropout stays 0: attention dropout leaves the fast kernels, and large corpora need none.
    "gpt2-124m": {
        **_GPT2, "num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "ffn_hidden_size": 3072,
        "vocab_size": 50257, "max_position_embeddings": 1024,
    },
    # arXiv:2407.21783; 8B and 70B as Llama 3 (8,192 tokens), 405B as Llama 3.1 (131,072 tokens).
    "llama3-8b": {
        **_LLAMA, "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "ffn_hidden_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
    },
    "llama3-70b": {
        **_LLAMA, "num_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8,
        "ffn_hidden_size": 28672, "vocab_size": 128256, "max_position_embeddings": 8192,
    },
    "llama3-405b": {
        **_LLAMA, "num_layers": 126, "hidden_size": 16384, "num_attention_heads": 128, "num_key_value_heads": 8,
        "ffn_hidden_size": 53248, "vocab_size": 128256, "max_position_embeddings": 131072,
        "rope_scaling": _LLAMA_31_SCALING,
    },
    # arXiv:2505.09388
    "qwen3-0.6b": {
        **_LLAMA, "num_layers": 28, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "ffn_hidden_size": 3072, "vocab_size": 151936, "max_position_embeddings": 40960,
        "norm_eps": 1.0e-6, "rope_theta": 1000000.0, "qk_norm": True, "tie_embeddings": True,
    },
    # arXiv:2502.02737
    "smollm2-135m": {
        **_LLAMA, "num_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3,
        "ffn_hidden_size": 1536, "vocab_size": 49152, "max_position_embeddings": 8192, "rope_theta": 100000.0,
        "tie_embeddings": True, "init_std": 0.041666666666666664,
    },
    # For tests and first steps: the same families at a size that a laptop trains in seconds.
    "tiny-llama": {
        **_LLAMA, "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "ffn_hidden_size": 192, "rope_theta": 10000.0,
    },
    "tiny-gpt2": {**_GPT2, "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 256},
}


def preset_values(preset: str) -> dict[str, Any]:
    """The keys of the `model` section that a preset sets.

    Args:
        preset: a name of `PRESETS`, or the path of a Hugging Face folder or of its `config.json`.
    Raises:
        ConfigError: for an unknown name, or for something in the Hugging Face config that cannot be trained here.
    """
    if preset in PRESETS:
        return dict(PRESETS[preset])
    path = Path(preset)
    if path.is_dir() or path.is_file():
        return read_huggingface(path)
    near = difflib.get_close_matches(preset.lower(), PRESETS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(f"neither a preset nor a folder that exists; {hint}presets: {', '.join(PRESETS)}")
