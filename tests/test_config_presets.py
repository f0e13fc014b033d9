"""Presets: names, keys set beside them, and Hugging Face configs read or refused by name."""

import json

import pytest

from megafour.config.errors import ConfigError
from megafour.config.huggingface import read_huggingface
from megafour.config.load import load_config, to_yaml
from megafour.config.presets import PRESETS
from megafour.config.rules import resolve

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 64,
         "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": 100, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 5e5,
         "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "torch_dtype": "bfloat16"}
NO_BIAS = {key: value for key, value in LLAMA.items() if "bias" not in key}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 32,
        "activation_function": "gelu_new", "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.0}


FULL, SLIDING = "full_attention", "sliding_attention"


def written(tmp_path, values):
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path


def test_keys_beside_a_preset_override_it():
    model = load_config(None, ["model.preset=llama3-8b", "model.num_layers=2", "model.vocab_size=auto"]).model
    assert (model.num_layers, model.vocab_size, model.hidden_size, model.preset) == (2, "auto", 4096, "llama3-8b")


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_resolves(preset):
    config = resolve(load_config(None, [f"model.preset={preset}"]), 1, data=False)
    assert config.model.preset == preset


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ConfigError, match="model.preset = llama3-7b: .*did you mean llama3-70b?.*tiny-gpt2"):
        load_config(None, ["model.preset=llama3-7b"])


def test_a_hugging_face_folder_and_its_file(tmp_path):
    folder = written(tmp_path, LLAMA)
    config = load_config(None, [f"model.preset={folder}", "model.num_layers=4"])
    by_file = load_config(None, [f"model.preset={folder}/config.json", "model.num_layers=4"])
    assert by_file.model == config.model.model_copy(update={"preset": f"{folder}/config.json"})
    model = config.model
    assert (model.num_layers, model.ffn_hidden_size, model.norm_eps, model.rope_theta) == (4, 128, 1e-6, 5e5)
    resolved = resolve(config, 1, data=False)
    assert resolved.model.preset is None  # the resolved file stands alone
    (tmp_path / "run.yaml").write_text(to_yaml(resolved))
    (folder / "config.json").unlink()
    assert load_config(str(tmp_path / "run.yaml")) == resolved


@pytest.mark.parametrize(("values", "expected"), [
    ({**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                "original_max_position_embeddings": 8192}},
     {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                       "original_max_position_embeddings": 8192}}),
    ({**LLAMA, "rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
     {"rope_theta": 1e6}),
    ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2}}, {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    ({**LLAMA, "attention_bias": True, "mlp_bias": True}, {"qkv_bias": True, "linear_bias": True}),
    ({**LLAMA, "model_type": "mistral", "sliding_window": None}, {"qk_norm": False, "attention_window": None}),
    ({**LLAMA, "model_type": "mistral", "sliding_window": 128}, {"attention_window": 128}),
    ({**LLAMA, "model_type": "mistral"}, {"attention_window": 4096}),    # the library's default
    ({**NO_BIAS, "model_type": "qwen3", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0},
     {"attention_window": 64}),
    ({**NO_BIAS, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3},
     {"attention_window": None}),
    ({**NO_BIAS, "model_type": "qwen2", "sliding_window": 64}, {"attention_window": None}),
    ({**LLAMA, "model_type": "qwen3", "head_dim": 32, "use_sliding_window": False, "sliding_window": 4096,
      "max_window_layers": 28}, {"qk_norm": True, "head_dim": 32, "qkv_bias": False}),
    ({**NO_BIAS, "model_type": "qwen2", "use_sliding_window": False},
     {"qkv_bias": True, "linear_bias": False}),
    ({**NO_BIAS, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
     {"attention_window": [None, 64, 64]}),
    ({**NO_BIAS, "model_type": "qwen3", "use_sliding_window": True, "sliding_window": 64,
      "layer_types": [FULL, SLIDING, FULL]}, {"attention_window": [None, 64]}),
    ({**LLAMA, "rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 0.7}}, {"rope_scaling": {
        "type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}}),
    ({**LLAMA, "rope_scaling": {"type": "yarn", "factor": None, "original_max_position_embeddings": 64, "mscale": 1.0,
                                "mscale_all_dim": 1.0}}, {"rope_scaling": {
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.0}}),
    ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
     {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    (GPT2, {"norm": "layernorm", "activation": "gelu_tanh", "position": "learned", "hidden_dropout": 0.1,
            "tie_embeddings": True, "ffn_hidden_size": 256, "linear_bias": True, "qkv_bias": True}),
])
def test_families(tmp_path, values, expected):
    found = read_huggingface(written(tmp_path, values))
    assert {key: found.get(key) for key in expected} == expected
    load_config(None, [f"model.preset={tmp_path}"])


@pytest.mark.parametrize(("values", "word"), [
    ({**LLAMA, "model_type": "mixtral"}, 'model_type = "mixtral"'),
    ({**LLAMA, "hidden_act": "relu"}, 'hidden_act = "relu"'),
    ({**LLAMA, "sliding_window": 128}, "sliding_window = 128"),
    ({**NO_BIAS, "model_type": "qwen3", "layer_types": [FULL, SLIDING, FULL]}, "there is no window"),
    ({**NO_BIAS, "model_type": "qwen3", "layer_types": [FULL, FULL]}, "it has 2 entries, and num_hidden_layers is 3"),
    ({**LLAMA, "layer_types": [FULL, SLIDING, FULL]}, "llama computes all layers alike"),
    ({**LLAMA, "model_type": "mistral", "use_sliding_window": False}, "with a window of 4096 tokens"),
    ({**NO_BIAS, "model_type": "qwen3", "mlp_bias": True, "attention_bias": True}, "mlp_bias = true"),
    ({**LLAMA, "rope_interleaved": True}, "rope_interleaved = true"),
    ({**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type"),
    ({**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "slope": 1.0}}, "rope_scaling.slope"),
    ({**LLAMA, "attention_bias": True}, "attention_bias = true"),
    ({**LLAMA, "num_local_experts": 8}, "num_local_experts = 8"),
    ({**LLAMA, "quantization_config": {"bits": 4}}, "quantization_config"),
    ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "hidden_size is missing"),
    ({**GPT2, "embd_pdrop": 0.2}, "embd_pdrop = 0.2"),
    ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = true"),
    ({**GPT2, "activation_function": "relu"}, "activation_function"),
])
def test_what_cannot_be_computed_alike_is_refused_by_name(tmp_path, values, word):
    with pytest.raises(ConfigError) as error:
        load_config(None, [f"model.preset={written(tmp_path, values)}"])
    assert word in str(error.value) and "model.preset = " in str(error.value), str(error.value)


@pytest.mark.parametrize("text", ["{", "[1]", '{"model_type": ' + "[" * 100_000, "\ufeff{}"])
def test_a_broken_json_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="cannot be read as JSON|holds no JSON object"):
        read_huggingface(tmp_path)


def test_transformers_own_configs_are_read(tmp_path):
    """The defaults that the library writes hold nothing unknown."""
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 100}
    kinds = {"llama": ("LlamaConfig", small), "qwen2": ("Qwen2Config", small), "qwen3": ("Qwen3Config", small),
             "mistral": ("MistralConfig", {**small, "sliding_window": None}),
             "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100})}
    for kind, (name, values) in kinds.items():
        folder = tmp_path / kind
        getattr(transformers, name)(**values).save_pretrained(folder)
        assert load_config(None, [f"model.preset={folder}"]).model.hidden_size == 64
