"""The reference equals `transformers`' Llama, Qwen3 and GPT-2 in fp64: loss and every gradient."""

from __future__ import annotations

import pytest
import torch

from megafour.config.load import config_from
from megafour.config.rules import resolve
from megafour.data.batch import MicroBatch
from megafour.mesh import Mesh
from megafour.model.stage import build_stage, initialize_parameter
from megafour.parallel.pieces import named_pieces
from megafour.verify.reference import dense_attention, reference_loss
from tests.huggingface import doubled

transformers = pytest.importorskip("transformers")

VOCAB, SEQ, BATCH = 67, 24, 3
COMMON = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": VOCAB}
LLAMA = {**COMMON, "num_key_value_heads": 2, "ffn_hidden_size": 56}
GPT2 = {**COMMON, "norm": "layernorm", "activation": "gelu_tanh", "position": "learned", "qkv_bias": True,
        "linear_bias": True, "tie_embeddings": True, "max_position_embeddings": SEQ, "ffn_hidden_size": 128}
SCALING = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 16}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

LLAMA_NAMES = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
               "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj",
               "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj",
               "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm",
               "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj"}
GPT2_NAMES = {"attention_norm": "ln_1", "mlp_norm": "ln_2", "attention.wo": "attn.c_proj", "mlp.up": "mlp.c_fc",
              "mlp.down": "mlp.c_proj"}


def ours(model: dict):
    """(stage, loss, {logical name: gradient}) of one process in fp64."""
    config = resolve(config_from({"model": model, "data": {"seq_length": SEQ}, "parallel": {"dp": 1},
                                  "train": {"precision": "fp64", "global_batch_size": BATCH}}), 1, data=False)
    stage = build_stage(config, Mesh.single(), VOCAB, attention=dense_attention)
    for param in stage.parameters():
        initialize_parameter(param, 7)
    with torch.no_grad():  # zeros and ones would hide a swapped bias or norm
        generator = torch.Generator().manual_seed(1)
        for param in stage.parameters():
            if param.dim() == 1:
                param.add_(torch.empty(param.shape, dtype=param.dtype).normal_(0, 0.1, generator=generator))
    return stage


def batch():
    """Tokens and labels `[b, s]`, some labels not trained."""
    whole = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(3))
    labels = whole[:, 1:].clone()
    labels[1, 5:9] = -100
    return whole[:, :-1], labels


def llama_name(name: str) -> str:
    """Our logical name -> that of `LlamaForCausalLM`."""
    fixed = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight",
             "head.weight": "lm_head.weight"}
    if name in fixed:
        return fixed[name]
    _, layer, *middle, kind = name.split(".")
    return f"model.layers.{layer}.{LLAMA_NAMES['.'.join(middle)]}.{kind}"


def gpt2_slot(name: str, hidden: int) -> tuple[str, slice]:
    """Our logical name -> (name in `GPT2LMHeadModel`, its columns: q, k and v are fused there)."""
    fixed = {"embedding.weight": "transformer.wte.weight", "position_embedding.weight": "transformer.wpe.weight",
             "norm.weight": "transformer.ln_f.weight", "norm.bias": "transformer.ln_f.bias"}
    if name in fixed:
        return fixed[name], slice(None)
    _, layer, *middle, kind = name.split(".")
    if middle[-1] in ("wq", "wk", "wv"):
        i = ("wq", "wk", "wv").index(middle[-1])
        return f"transformer.h.{layer}.attn.c_attn.{kind}", slice(i * hidden, (i + 1) * hidden)
    return f"transformer.h.{layer}.{GPT2_NAMES['.'.join(middle)]}.{kind}", slice(None)


def view_in_gpt2(tensors: dict, name: str, ndim: int, hidden: int) -> torch.Tensor:
    """The slot of GPT-2's Conv1D storage, `[in, out]`, as our `[out, in]`."""
    slot, columns = gpt2_slot(name, hidden)
    x = tensors[slot][..., columns]
    return x.t() if ndim == 2 and ("c_" in slot) else x


def check(stage, model, slot) -> None:
    """Copy our weights over, run both, compare the loss and every gradient."""
    doubled(model)
    params = dict(model.named_parameters())
    with torch.no_grad():
        for param, piece in named_pieces(stage):
            slot({k: v.data for k, v in params.items()}, piece.name, len(piece.shape)).copy_(param[piece.rows])
    tokens, labels = batch()
    ids = torch.arange(len(tokens))
    loss = reference_loss(stage, MicroBatch(tokens, labels, stage.positions, ids, ids))
    loss.backward()
    logits = model(tokens).logits
    theirs = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    theirs = theirs / (labels != -100).sum()
    theirs.backward()
    assert abs(float((loss - theirs).detach())) <= 1e-9 * abs(float(theirs.detach()))
    grads = {k: v.grad for k, v in params.items()}
    floor = 1e-6 * max(float(g.abs().max()) for g in grads.values())
    for param, piece in named_pieces(stage):
        want = slot(grads, piece.name, len(piece.shape))
        got = param.grad[piece.rows]
        deviation = float((got - want).abs().max()) / max(float(want.abs().max()), floor)
        assert deviation <= 1e-9, (piece.name, deviation)


@pytest.mark.parametrize("extra", [{}, {"tie_embeddings": True}, {"qkv_bias": True, "linear_bias": False},
                                   {"rope_scaling": SCALING}, {"rope_scaling": YARN},
                                   {"qk_norm": True, "head_dim": 16}],
                         ids=["llama", "tied", "qwen2", "llama3-rope", "yarn", "qwen3"])
def test_equals_llama_family(extra: dict) -> None:
    stage = ours({**LLAMA, **extra})
    scaling = dict(extra.get("rope_scaling") or {})
    if scaling:
        scaling["rope_type"] = scaling.pop("type")
    common = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=56, num_hidden_layers=3, num_attention_heads=4,
                  num_key_value_heads=2, rms_norm_eps=1e-5, tie_word_embeddings=extra.get("tie_embeddings", False),
                  rope_parameters={"rope_theta": 10000.0, "rope_type": "default", **scaling},
                  max_position_embeddings=64, attn_implementation="sdpa")    # "eager" takes its softmax in fp32
    if extra.get("qk_norm"):
        config, cls = transformers.Qwen3Config(head_dim=16, **common), transformers.Qwen3ForCausalLM
    elif extra.get("qkv_bias"):
        config, cls = transformers.Qwen2Config(**common), transformers.Qwen2ForCausalLM
    else:
        config, cls = transformers.LlamaConfig(**common), transformers.LlamaForCausalLM
    torch.set_default_dtype(torch.float64)
    try:
        model = cls(config)
    finally:
        torch.set_default_dtype(torch.float32)
    check(stage, model, lambda tensors, name, ndim: tensors[llama_name(name)])


def test_equals_gpt2() -> None:
    stage = ours(GPT2)
    config = transformers.GPT2Config(vocab_size=VOCAB, n_positions=SEQ, n_embd=32, n_layer=3, n_head=4, resid_pdrop=0.0,
                                     embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager")
    model = transformers.GPT2LMHeadModel(config).double()
    check(stage, model, lambda tensors, name, ndim: view_in_gpt2(tensors, name, ndim, 32))
