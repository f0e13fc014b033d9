"""Published `config.json` files as facts: what each model's file holds beside what its whole family writes.

Shapes and keys are those of the models' own files; ids of tokens and versions, which change nothing, are written once
a family. Names without an owner describe a kind of file, not one repository.
"""

from __future__ import annotations

from typing import Any


def _rotary(layers: int, hidden: int, ffn: int, heads: int, kv: int | None, vocab: int, positions: int | None,
            **more: Any) -> dict[str, Any]:
    shape = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": heads,
             "num_key_value_heads": kv, "vocab_size": vocab, "max_position_embeddings": positions}
    return {**{key: value for key, value in shape.items() if value is not None}, **more}


_COMMON = {"bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02, "torch_dtype": "bfloat16",
           "transformers_version": "4.40.0", "use_cache": True}
_LLAMA = {**_COMMON, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
          "tie_word_embeddings": False, "rms_norm_eps": 1e-5}
_LLAMA2 = {**_LLAMA, "pretraining_tp": 1, "rope_scaling": None}
_LLAMA3 = {**_LLAMA2, "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "rope_theta": 500000.0,
           "vocab_size": 128256, "eos_token_id": [128001, 128008, 128009]}


def _stretch(factor: float) -> dict[str, Any]:
    return {"rope_scaling": {"factor": factor, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                             "original_max_position_embeddings": 8192, "rope_type": "llama3"}}


_UNSLOTH = {"unsloth_fixed": True, "_name_or_path": "a/mirror", "pad_token_id": 128004}
_SMOL = {**_LLAMA, "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "rope_interleaved": False,
         "is_llama_config": True, "tie_word_embeddings": True,
         "transformers.js_config": {"kv_cache_dtype": {"q4": "fp32"}}}
LLAMA: dict[str, dict[str, Any]] = {
    # The first conversions name their length by max_sequence_length, which transformers does not read.
    "huggyllama/llama-7b": {**_LLAMA, **_rotary(32, 4096, 11008, 32, None, 32000, 2048), "max_sequence_length": 2048,
                            "pad_token_id": 0, "rms_norm_eps": 1e-6},
    "decapoda-research/llama-7b-hf": {**_LLAMA, **_rotary(32, 4096, 11008, 32, None, 32000, None), "bos_token_id": 0,
                                      "max_sequence_length": 2048, "pad_token_id": -1, "rms_norm_eps": 1e-6},
    "huggyllama/llama-13b": {**_LLAMA, **_rotary(40, 5120, 13824, 40, None, 32000, None), "max_sequence_length": 2048,
                             "rms_norm_eps": 1e-6},
    "huggyllama/llama-65b": {**_LLAMA, **_rotary(80, 8192, 22016, 64, None, 32000, None), "max_sequence_length": 2048},
    "meta-llama/Llama-2-7b": {**_LLAMA2, **_rotary(32, 4096, 11008, 32, 32, 32000, 4096)},
    "meta-llama/Llama-2-13b": {**_LLAMA2, **_rotary(40, 5120, 13824, 40, 40, 32000, 4096)},
    "meta-llama/Llama-2-70b": {**_LLAMA2, **_rotary(80, 8192, 28672, 64, 8, 32000, 4096)},
    "lmsys/longchat-7b-16k": {**_LLAMA, **_rotary(32, 4096, 11008, 32, None, 32000, 16384),
                              "rope_scaling": {"factor": 8, "type": "linear"}},
    "codellama/CodeLlama-7b": {**_LLAMA2, **_rotary(32, 4096, 11008, 32, 32, 32016, 16384), "rope_theta": 1000000},
    "meta-llama/Meta-Llama-3-8B": {**_LLAMA3, **_rotary(32, 4096, 14336, 32, 8, 128256, 8192)},
    "meta-llama/Meta-Llama-3-70B": {**_LLAMA3, **_rotary(80, 8192, 28672, 64, 8, 128256, 8192)},
    "meta-llama/Llama-3.1-8B": {**_LLAMA3, **_rotary(32, 4096, 14336, 32, 8, 128256, 131072), **_stretch(8.0)},
    "meta-llama/Llama-3.1-405B": {**_LLAMA3, **_rotary(126, 16384, 53248, 128, 8, 128256, 131072), **_stretch(8.0)},
    "meta-llama/Llama-3.2-1B": {**_LLAMA3, **_rotary(16, 2048, 8192, 32, 8, 128256, 131072), **_stretch(32.0),
                                "head_dim": 64, "tie_word_embeddings": True},
    "meta-llama/Llama-3.2-3B": {**_LLAMA3, **_rotary(28, 3072, 8192, 24, 8, 128256, 131072), **_stretch(32.0),
                                "head_dim": 128, "tie_word_embeddings": True},
    "meta-llama/Llama-3.3-70B": {**_LLAMA3, **_rotary(80, 8192, 28672, 64, 8, 128256, 131072), **_stretch(8.0)},
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": {**_LLAMA3, **_rotary(32, 4096, 14336, 32, 8, 128256, 131072),
                                                 **_stretch(8.0), "eos_token_id": 128001},
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": {**_LLAMA3, **_rotary(80, 8192, 28672, 64, 8, 128256, 131072),
                                                  **_stretch(8.0)},
    "unsloth/Llama-3.2-1B": {**_LLAMA3, **_rotary(16, 2048, 8192, 32, 8, 128256, 131072), **_stretch(32.0), **_UNSLOTH,
                             "head_dim": 64, "tie_word_embeddings": True},
    "unsloth/Meta-Llama-3.1-8B": {**_LLAMA3, **_rotary(32, 4096, 14336, 32, 8, 128256, 131072), **_stretch(8.0),
                                  **_UNSLOTH, "unsloth_version": "2024.9",
                                  "tokenizer_class": "PreTrainedTokenizerFast"},
    "TinyLlama/TinyLlama-1.1B": {**_LLAMA2, **_rotary(22, 2048, 5632, 32, 4, 32000, 2048), "attention_bias": False,
                                 "rope_theta": 10000.0},
    "HuggingFaceTB/SmolLM-135M": {**_SMOL, **_rotary(30, 576, 1536, 9, 3, 49152, 2048), "rope_theta": 10000.0},
    "HuggingFaceTB/SmolLM2-135M": {**_SMOL, **_rotary(30, 576, 1536, 9, 3, 49152, 8192), "rope_theta": 100000,
                                   "initializer_range": 0.041666666666666664},
    "HuggingFaceTB/SmolLM2-1.7B": {**_SMOL, **_rotary(24, 2048, 8192, 32, 32, 49152, 8192), "rope_theta": 130000},
    "deepseek-ai/deepseek-coder-6.7b": {**_LLAMA2, **_rotary(32, 4096, 11008, 32, 32, 32256, 16384),
                                        "rms_norm_eps": 1e-6, "rope_theta": 100000,
                                        "rope_scaling": {"factor": 4.0, "type": "linear"}},
    "01-ai/Yi-6B": {**_LLAMA2, **_rotary(32, 4096, 11008, 32, 4, 64000, 4096), "pad_token_id": 0,
                    "rope_theta": 5000000.0},
}

_MISTRAL = {**_COMMON, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "hidden_act": "silu",
            "tie_word_embeddings": False, "rms_norm_eps": 1e-5}
_SEVEN = _rotary(32, 4096, 14336, 32, 8, 32000, 32768)
_NEMO = {**_rotary(40, 5120, 14336, 32, 8, 131072, 131072), "head_dim": 128, "attention_dropout": 0.0,
         "sliding_window": None, "rope_theta": 1000000.0}
_SMALL3 = {**_rotary(40, 5120, 32768, 32, 8, 131072, 32768), "head_dim": 128, "attention_dropout": 0.0,
           "sliding_window": None, "rope_theta": 100000000.0}
MISTRAL: dict[str, dict[str, Any]] = {
    "mistralai/Mistral-7B-v0.1": {**_MISTRAL, **_SEVEN, "sliding_window": 4096, "rope_theta": 10000.0},
    "mistralai/Mistral-7B-Instruct-v0.1": {**_MISTRAL, **_SEVEN, "sliding_window": 4096, "rope_theta": 10000.0},
    "mistralai/Mistral-7B-Instruct-v0.2": {**_MISTRAL, **_SEVEN, "sliding_window": None, "rope_theta": 1000000.0,
                                           "attention_dropout": 0.0},
    "mistralai/Mistral-7B-v0.3": {**_MISTRAL, **_SEVEN, "vocab_size": 32768, "sliding_window": None,
                                  "rope_theta": 1000000.0, "attention_dropout": 0.0},
    "mistralai/Mistral-Nemo-Base-2407": {**_MISTRAL, **_NEMO},
    "mistralai/Mistral-Nemo-Instruct-2407": {**_MISTRAL, **_NEMO, "max_position_embeddings": 1024000},
    "mistralai/Mistral-Small-Instruct-2409": {**_MISTRAL, **_rotary(56, 6144, 16384, 48, 8, 32768, 32768),
                                              "head_dim": 128, "sliding_window": None, "rope_theta": 1000000.0},
    "mistralai/Mistral-Small-24B-Base-2501": {**_MISTRAL, **_SMALL3},
    "mistralai/Mistral-Large-Instruct-2407": {**_MISTRAL, **_rotary(88, 12288, 28672, 96, 8, 32768, 131072),
                                              "head_dim": 128, "sliding_window": None, "rope_theta": 1000000.0},
    "mistralai/Codestral-22B-v0.1": {**_MISTRAL, **_rotary(56, 6144, 16384, 48, 8, 32768, 32768), "head_dim": 128,
                                     "sliding_window": None, "rope_theta": 1000000.0},
    "mistralai/Mathstral-7B-v0.1": {**_MISTRAL, **_SEVEN, "vocab_size": 32768, "head_dim": 128, "sliding_window": None,
                                    "rope_theta": 1000000.0},
    "HuggingFaceH4/zephyr-7b-beta": {**_MISTRAL, **_SEVEN, "pad_token_id": 2, "sliding_window": 4096,
                                     "rope_theta": 10000.0},
    "teknium/OpenHermes-2.5-Mistral-7B": {**_MISTRAL, **_SEVEN, "vocab_size": 32002, "sliding_window": 4096,
                                          "rope_theta": 10000.0},
    "unsloth/mistral-7b-v0.3": {**_MISTRAL, **_SEVEN, "vocab_size": 32768, "sliding_window": None, "head_dim": 128,
                                "rope_theta": 1000000.0, "unsloth_fixed": True, "unsloth_version": "2024.9"},
    "NousResearch/Yarn-Mistral-7b-128k, its settings in the keys of today": {
        **_MISTRAL, **_SEVEN, "max_position_embeddings": 131072, "sliding_window": 131072, "rope_theta": 10000.0,
        "rope_scaling": {"factor": 16.0, "original_max_position_embeddings": 8192, "type": "yarn"}},
}

_QWEN2 = {**_COMMON, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu",
          "attention_dropout": 0.0, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "use_sliding_window": False,
          "tie_word_embeddings": False}


def _qwen2(shape: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Window keys as they are written there: the window's length and first layer although it is off."""
    return {**_QWEN2, **shape, "sliding_window": shape["max_position_embeddings"],
            "max_window_layers": shape["num_hidden_layers"], **more}


_05, _15, _3 = (_rotary(24, 896, 4864, 14, 2, 151936, 32768), _rotary(28, 1536, 8960, 12, 2, 151936, 131072),
                _rotary(36, 2048, 11008, 16, 2, 151936, 32768))
_7, _14 = _rotary(28, 3584, 18944, 28, 4, 152064, 131072), _rotary(48, 5120, 13824, 40, 8, 152064, 131072)
_32, _72 = _rotary(64, 5120, 27648, 40, 8, 152064, 131072), _rotary(80, 8192, 29568, 64, 8, 152064, 131072)
_BASE = {"use_mrope": False}
_TIED = {"tie_word_embeddings": True}
QWEN2: dict[str, dict[str, Any]] = {
    "Qwen/Qwen1.5-0.5B": _qwen2(_rotary(24, 1024, 2816, 16, 16, 151936, 32768), max_window_layers=21, **_TIED),
    "Qwen/Qwen2-0.5B": _qwen2(_05, max_position_embeddings=131072, sliding_window=131072, **_TIED),
    "Qwen/Qwen2-7B": _qwen2(_7, vocab_size=152064, max_window_layers=28),
    "Qwen/Qwen2-72B": _qwen2(_72, rms_norm_eps=1e-5),
    "Qwen/Qwen2.5-0.5B": _qwen2(_05, **_BASE, **_TIED),
    "Qwen/Qwen2.5-1.5B": _qwen2(_15, **_BASE, **_TIED),
    "Qwen/Qwen2.5-3B": _qwen2(_3, **_BASE, **_TIED),
    "Qwen/Qwen2.5-7B": _qwen2(_7, **_BASE),
    "Qwen/Qwen2.5-14B": _qwen2(_14, rms_norm_eps=1e-5, **_BASE),
    "Qwen/Qwen2.5-32B": _qwen2(_32, rms_norm_eps=1e-5, **_BASE),
    "Qwen/Qwen2.5-72B": _qwen2(_72, rms_norm_eps=1e-5, **_BASE),
    "Qwen/Qwen2.5-7B-Instruct": _qwen2(_7, max_position_embeddings=32768),
    "Qwen/Qwen2.5-Coder-7B": _qwen2(_7, max_position_embeddings=32768, **_BASE),
    "Qwen/Qwen2.5-Coder-32B-Instruct": _qwen2(_32, max_position_embeddings=32768, max_window_layers=70),
    "Qwen/Qwen2.5-Math-1.5B": _qwen2(_15, max_position_embeddings=4096, sliding_window=4096, max_window_layers=21,
                                     rope_theta=10000, **_BASE, **_TIED),
    "Qwen/Qwen2.5-Math-7B": _qwen2(_7, max_position_embeddings=4096, sliding_window=4096, rope_theta=10000, **_BASE),
    "Qwen/QwQ-32B": _qwen2(_32, max_position_embeddings=40960, sliding_window=32768, rms_norm_eps=1e-5),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": _qwen2(_15, max_window_layers=21, sliding_window=4096,
                                                        rope_theta=10000, **_BASE),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": _qwen2(_7, sliding_window=4096, rope_theta=10000, **_BASE),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": _qwen2(_32, rms_norm_eps=1e-5),
    "Qwen/Qwen2.5-7B-Instruct, for long texts as its card says": _qwen2(
        _7, max_position_embeddings=32768,
        rope_scaling={"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}),
    "unsloth/Qwen2.5-7B": _qwen2(_7, unsloth_fixed=True, pad_token_id=151665, sliding_window=None, **_BASE),
}

_QWEN3 = {**_QWEN2, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "attention_bias": False,
          "head_dim": 128, "rope_scaling": None, "sliding_window": None}


def _qwen3(layers: int, hidden: int, ffn: int, heads: int, kv: int = 8, positions: int = 40960,
           **more: Any) -> dict[str, Any]:
    return {**_QWEN3, **_rotary(layers, hidden, ffn, heads, kv, 151936, positions), "max_window_layers": layers, **more}


QWEN3: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-0.6B": _qwen3(28, 1024, 3072, 16, **_TIED),
    "Qwen/Qwen3-1.7B": _qwen3(28, 2048, 6144, 16, **_TIED),
    "Qwen/Qwen3-4B": _qwen3(36, 2560, 9728, 32, **_TIED),
    "Qwen/Qwen3-8B": _qwen3(36, 4096, 12288, 32),
    "Qwen/Qwen3-14B": _qwen3(40, 5120, 17408, 40),
    "Qwen/Qwen3-32B": _qwen3(64, 5120, 25600, 64),
    "Qwen/Qwen3-0.6B-Base": _qwen3(28, 1024, 3072, 16, positions=32768, **_TIED),
    "Qwen/Qwen3-1.7B-Base": _qwen3(28, 2048, 6144, 16, positions=32768, **_TIED),
    "Qwen/Qwen3-4B-Base": _qwen3(36, 2560, 9728, 32, positions=32768, **_TIED),
    "Qwen/Qwen3-8B-Base": _qwen3(36, 4096, 12288, 32, positions=32768),
    "Qwen/Qwen3-14B-Base": _qwen3(40, 5120, 17408, 40, positions=32768),
    "Qwen/Qwen3-4B-Instruct-2507": _qwen3(36, 2560, 9728, 32, positions=262144, rope_theta=5000000, **_TIED),
    "Qwen/Qwen3-4B-Thinking-2507": _qwen3(36, 2560, 9728, 32, positions=262144, rope_theta=5000000, **_TIED),
    "Qwen/Qwen3-Embedding-0.6B": _qwen3(28, 1024, 3072, 16, positions=32768, vocab_size=151669, **_TIED),
    "Qwen/Qwen3-8B, for long texts as its card says": _qwen3(
        36, 4096, 12288, 32,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}),
    "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B": _qwen3(
        36, 4096, 12288, 32, positions=131072,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768,
                      "attn_factor": 0.8782488562869419}),
    "unsloth/Qwen3-8B": _qwen3(36, 4096, 12288, 32, unsloth_fixed=True, pad_token_id=151654),
    "Qwen/Qwen3-0.6B, as transformers 5 saves it": {
        **{key: value for key, value in _qwen3(28, 1024, 3072, 16, **_TIED).items() if not key.startswith("rope_")},
        "layer_types": ["full_attention"] * 28, "dtype": "bfloat16", "pad_token_id": None,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}},
}

_GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new",
         "attn_pdrop": 0.1, "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
         "layer_norm_epsilon": 1e-05, "n_ctx": 1024, "n_positions": 1024, "resid_pdrop": 0.1, "vocab_size": 50257,
         "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
         "summary_type": "cls_index", "summary_use_proj": True,
         "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}}
_OLD = {"n_special": 0, "predict_special_tokens": True}


def _gpt2(layers: int, hidden: int, heads: int, **more: Any) -> dict[str, Any]:
    return {**_GPT2, "n_layer": layers, "n_embd": hidden, "n_head": heads, **more}


_OF_TODAY = {"n_inner": None, "reorder_and_upcast_attn": False, "scale_attn_by_inverse_layer_idx": False,
             "scale_attn_weights": True, "use_cache": True, "transformers_version": "4.11.0"}
GPT2: dict[str, dict[str, Any]] = {
    "openai-community/gpt2": _gpt2(12, 768, 12),
    "openai-community/gpt2-medium": _gpt2(24, 1024, 16, **_OLD),
    "openai-community/gpt2-large": _gpt2(36, 1280, 20),
    "openai-community/gpt2-xl": _gpt2(48, 1600, 25, output_past=True),
    "distilbert/distilgpt2": _gpt2(6, 768, 12, _num_labels=1, id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0}),
    "microsoft/DialoGPT-small": _gpt2(12, 768, 12, task_specific_params={"conversational": {"max_length": 1000}}),
    "microsoft/DialoGPT-medium": _gpt2(24, 1024, 16),
    "microsoft/DialoGPT-large": _gpt2(36, 1280, 20),
    "sshleifer/tiny-gpt2": _gpt2(2, 2, 2),
    "gpt2 tuned on reviews": _gpt2(12, 768, 12, **_OLD, _num_labels=1),
    "gpt2, saved with the names of today": _gpt2(12, 768, 12, **_OF_TODAY, gradient_checkpointing=False),
    "gpt2 without dropout": _gpt2(12, 768, 12, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0),
    "gpt2 that kept its script's settings": _gpt2(12, 768, 12, gradient_checkpointing=False, line_by_line=True),
    "gpt2 in German": _gpt2(12, 768, 12, **_OF_TODAY, vocab_size=50265),
    "gpt2 in Chinese": _gpt2(12, 768, 12, vocab_size=21128, output_past=True, tokenizer_class="BertTokenizer",
                              gradient_checkpointing=False),
    "gpt2 of the first releases": _gpt2(12, 768, 12, n_special=0, predict_special_tokens=True, num_labels=1),
}

ALL = {**LLAMA, **MISTRAL, **QWEN2, **QWEN3, **GPT2}
NOTES = {
    "gpt2 that kept its script's settings": "about the forward pass: line_by_line",
    "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B":
        "rope_scaling.attn_factor = 0.8782488562869419 is ignored, as transformers does",
}
"""How the line on a config ends; of all others none is expected."""

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Mixtral-8x7B": ({**_MISTRAL, **_SEVEN, "model_type": "mixtral", "num_local_experts": 8}, "mixtral"),
    "Gemma-2B": ({**_LLAMA, **_rotary(18, 2048, 16384, 8, 1, 256000, 8192), "model_type": "gemma"}, "gemma"),
    "Phi-3-mini": ({**_LLAMA, **_rotary(32, 3072, 8192, 32, 32, 32064, 4096), "model_type": "phi3"}, "phi3"),
    "DeepSeek-V3": ({**_LLAMA, **_rotary(61, 7168, 18432, 128, 128, 129280, 163840), "model_type": "deepseek_v3"},
                    "deepseek_v3"),
    "Qwen1.5-MoE": ({**_qwen2(_05), "model_type": "qwen2_moe", "num_experts": 60}, "qwen2_moe"),
    "Qwen2-VL, as a text model": ({**_qwen2(_7), "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
                                  "rope_scaling.type"),
    "Qwen2.5-7B-GPTQ": ({**_qwen2(_7), "quantization_config": {"bits": 4, "quant_method": "gptq"}},
                        "quantization_config"),
    "unsloth's 4-bit Llama": ({**LLAMA["unsloth/Llama-3.2-1B"], "quantization_config": {"load_in_4bit": True}},
                              "quantization_config"),
    "Llama-4-Scout": ({**_LLAMA, "model_type": "llama4"}, "llama4"),
    "use_mrope": ({**_qwen2(_7), "use_mrope": True}, "use_mrope = true"),
    "Phi-2's rotary part": ({**LLAMA["TinyLlama/TinyLlama-1.1B"], "partial_rotary_factor": 0.4},
                            "partial_rotary_factor = 0.4"),
    "Granite's multipliers": ({**LLAMA["TinyLlama/TinyLlama-1.1B"], "embedding_multiplier": 12.0},
                              "embedding_multiplier = 12.0"),
    "Gemma's soft caps": ({**LLAMA["TinyLlama/TinyLlama-1.1B"], "attn_logit_softcapping": 50.0},
                          "attn_logit_softcapping = 50.0"),
    "dynamic NTK": ({**LLAMA["TinyLlama/TinyLlama-1.1B"], "rope_scaling": {"type": "dynamic", "factor": 2.0}},
                    "rope_scaling.type"),
    "layers that differ": ({**QWEN3["Qwen/Qwen3-8B"], "per_layer_config": {"3": {"hidden_size": 8}}},
                           "per_layer_config"),
}
