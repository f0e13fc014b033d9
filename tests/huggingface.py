"""Tiny random `transformers` models of each family, and what our decoder makes of their folders."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from megafour.inference.generate import next_token_logits
from megafour.inference.load import load_model

VOCAB = 67
SMALL = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=56, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, rms_norm_eps=1e-6, max_position_embeddings=64, bos_token_id=None, eos_token_id=5,
             pad_token_id=None)
PLAIN = {"rope_theta": 1e4, "rope_type": "default"}
LLAMA3 = {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}
YARN = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**SMALL, "rope_parameters": PLAIN}),
    "smollm": ("Llama", {**SMALL, "tie_word_embeddings": True, "rope_parameters": {**PLAIN, "rope_theta": 1e5}}),
    "llama-bias": ("Llama", {**SMALL, "attention_bias": True, "mlp_bias": True, "rope_parameters": PLAIN}),
    "llama3-rope": ("Llama", {**SMALL, "rope_parameters": LLAMA3}),
    "yarn": ("Llama", {**SMALL, "rope_parameters": YARN}),
    "linear": ("Llama", {**SMALL, "rope_parameters": {**PLAIN, "rope_type": "linear", "factor": 2.0}}),
    "mistral": ("Mistral", {**SMALL, "sliding_window": None, "head_dim": 16, "rope_parameters": PLAIN}),
    "mistral-window": ("Mistral", {**SMALL, "sliding_window": 7, "rope_parameters": PLAIN}),
    "qwen3-window": ("Qwen3", {**SMALL, "head_dim": 16, "use_sliding_window": True, "sliding_window": 5,
                               "max_window_layers": 0, "rope_parameters": PLAIN}),
    "qwen2-later-window": ("Qwen2", {**SMALL, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1,
                                     "rope_parameters": PLAIN}),
    "qwen3-mixed-window": ("Qwen3", {**SMALL, "head_dim": 16, "use_sliding_window": True, "sliding_window": 5,
                                     "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                                     "rope_parameters": PLAIN}),
    "qwen2": ("Qwen2", {**SMALL, "rope_parameters": {**PLAIN, "rope_theta": 1e6}}),
    "qwen3": ("Qwen3", {**SMALL, "head_dim": 16, "tie_word_embeddings": True, "rope_parameters": PLAIN}),
    "gpt2": ("GPT2", dict(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=3, n_head=4, bos_token_id=None,
                          eos_token_id=5)),
    "gpt2-gelu": ("GPT2", dict(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=2, n_inner=48,
                               activation_function="gelu", tie_word_embeddings=False)),
}


def keep_double(self: Any, x: torch.Tensor) -> torch.Tensor:
    """transformers' RMSNorm without its cast to fp32, which holds in fp64 models too and costs eight digits."""
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def doubled(model: Any) -> Any:
    """The model with norms that keep fp64, in evaluation mode."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = keep_double.__get__(module)
    return model.eval()


def save_model(kind: str, folder: Path, dtype: torch.dtype = torch.float64, **how: Any) -> Any:
    """Write a random model of a kind, biases and norms spread out; returns it."""
    import transformers

    name, values = MODELS[kind]
    torch.manual_seed(3)
    suffix = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    config = getattr(transformers, f"{name}Config")(**values, attn_implementation="sdpa")
    model = getattr(transformers, f"{name}{suffix}")(config).to(dtype)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.empty_like(param).normal_(0, 0.1 if param.dim() == 1 else 0.05))
    model.save_pretrained(folder, **how)
    return model


def save_config(config: dict[str, Any], folder: Path) -> Any:
    """Write a random fp64 model of a `config.json`'s content, as `transformers` makes it of that; returns it."""
    import transformers

    made = transformers.CONFIG_MAPPING[config["model_type"]](**copy.deepcopy(config))
    made._attn_implementation = "sdpa"
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(made).double()
    model.save_pretrained(folder)
    return doubled(model)


def open_model(folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    """A folder as `transformers` loads it; a tensor that it misses or does not know fails the test."""
    import transformers

    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", output_loading_info=True)
    assert not any(found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), found
    return doubled(model)


def tokens(vocab: int = VOCAB, count: int = 24) -> torch.Tensor:
    """Random token ids `[count]`."""
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(4))


@torch.no_grad()
def logits_of(model: Any, vocab: int = VOCAB) -> torch.Tensor:
    """What `transformers` predicts after 1, 9 and 24 tokens, `[3, vocab]`."""
    whole = model(tokens(vocab)[None]).logits[0]
    return whole[[0, 8, 23]]


def our_logits(path: Path, precision: str = "fp64", vocab: int = VOCAB) -> torch.Tensor:
    """What our decoder predicts after 1, 9 and 24 tokens, `[3, vocab]`; any kind of `--checkpoint`."""
    stage, _, _ = load_model(path, precision)
    return torch.stack([next_token_logits(stage, tokens(vocab)[:n]) for n in (1, 9, 24)])


def deviation_of(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return float((a - b).abs().max()) / float(b.abs().max())
