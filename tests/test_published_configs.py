"""Published Hugging Face configs are read; any JSON value in any of their keys gives a model or one line."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megafour.config.errors import ConfigError
from megafour.config.huggingface import read_huggingface
from megafour.config.huggingface_fields import (
    GPT2Fields,
    LlamaFields,
    MistralFields,
    Qwen2Fields,
    Qwen3Fields,
    RopeFields,
)
from megafour.config.huggingface_unknown import HARMLESS, says_forward
from megafour.config.load import config_from, load_config
from megafour.config.rules import resolve
from tests.huggingface import deviation_of, logits_of, our_logits, save_config
from tests.published_configs import ALL, GPT2, LLAMA, MISTRAL, NOTES, QWEN2, QWEN3, REFUSED

FAMILIES = {"llama": LlamaFields, "mistral": MistralFields, "qwen2": Qwen2Fields, "qwen3": Qwen3Fields,
            "gpt2": GPT2Fields}
ONE = {"llama": LLAMA["meta-llama/Llama-3.2-1B"], "mistral": MISTRAL["mistralai/Mistral-7B-v0.1"],
       "qwen2": QWEN2["Qwen/Qwen2.5-0.5B"], "qwen3": QWEN3["Qwen/Qwen3-0.6B"],
       "gpt2": GPT2["gpt2, saved with the names of today"]}


def written(folder, values):
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("name", ALL)
def test_a_published_config_is_read(tmp_path, capsys, name):
    model = read_huggingface(written(tmp_path, ALL[name]))
    said = capsys.readouterr().err.splitlines()
    assert len(said) == (name in NOTES) and all(text.endswith(NOTES[name]) for text in said), said
    resolved = resolve(config_from({"model": model, "data": {"seq_length": 512}}), 1, data=False).model
    config = ALL[name]
    assert resolved.num_layers == config.get("num_hidden_layers", config.get("n_layer"))
    assert resolved.rope_theta == config.get("rope_theta", config.get("rope_parameters", {}).get("rope_theta", 10000))


@pytest.mark.parametrize("name", [
    "huggyllama/llama-13b", "lmsys/longchat-7b-16k", "unsloth/Llama-3.2-1B", "mistralai/Mistral-7B-v0.1",
    "mistralai/Mistral-Nemo-Base-2407", "Qwen/Qwen2.5-Math-1.5B",
    "Qwen/Qwen2.5-7B-Instruct, for long texts as its card says",
    "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", "openai-community/gpt2-xl"])
def test_a_shrunk_published_model_equals_transformers(tmp_path, name):
    """Two layers, narrow, every other key of the published file as it is; fp64."""
    small = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 56, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 67, "n_layer": 2, "n_embd": 32, "n_head": 4, "head_dim": 16,
             "sliding_window": 7, "max_window_layers": 2, "bos_token_id": None, "eos_token_id": None,
             "pad_token_id": None}
    config = {key: small[key] if key in small and value is not None else value for key, value in ALL[name].items()}
    want = logits_of(save_config(config, tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config))   # not as transformers writes it
    assert deviation_of(our_logits(tmp_path), want) <= 1e-9


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_computed_otherwise_is_refused(tmp_path, name):
    config, word = REFUSED[name]
    with pytest.raises(ConfigError) as error:
        read_huggingface(written(tmp_path, config))
    assert word in str(error.value) and "config.json: " in str(error.value), str(error.value)


@pytest.mark.parametrize(("family", "values", "words"), [
    ("llama", {"num_hidden_layers": "16"}, 'num_hidden_layers = "16" is not supported: it must be a whole number'),
    ("llama", {"num_hidden_layers": 16.0}, "num_hidden_layers = 16.0 is not supported: it must be a whole number"),
    ("llama", {"num_hidden_layers": True}, "num_hidden_layers = true is not supported: it must be a whole number"),
    ("llama", {"num_hidden_layers": 0}, "num_hidden_layers = 0 is not supported: it must be greater than 0"),
    ("llama", {"num_key_value_heads": {}}, "num_key_value_heads = {} is not supported: it must be a whole"),
    ("llama", {"rms_norm_eps": ""}, 'rms_norm_eps = "" is not supported: it must be a number'),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps = NaN is not supported: it must be"),
    ("llama", {"rope_theta": True}, "rope_theta = true is not supported: it must be a number"),
    ("llama", {"rope_theta": None, "rope_scaling": None}, "rope_theta = null is not supported: it must be a number"),
    ("llama", {"rope_scaling": "linear"}, 'rope_scaling = "linear" is not supported: it must be a mapping or null'),
    ("llama", {"rope_scaling": {"type": "linear", "factor": [2]}}, "rope_scaling.factor = [2] is not supported"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": float("inf")}}, "rope_scaling.factor = Infinity"),
    ("llama", {"rope_scaling": {"type": 3, "factor": 2.0}}, "rope_scaling.type = 3 is not supported: it must be text"),
    ("llama", {"rope_scaling": {"type": "llama3", "factor": 2.0, "low_freq_factor": 1}}, "high_freq_factor is missing"),
    ("llama", {"tie_word_embeddings": None}, "tie_word_embeddings = null is not supported: it must be true or false"),
    ("llama", {"model_type": {}}, "model_type = {} is not supported"),
    ("mistral", {"num_key_value_heads": None}, "num_key_value_heads = null is not supported: it must be a whole"),
    ("qwen3", {"layer_types": "full_attention"}, 'layer_types = "full_attention" is not supported: it must be a list'),
    ("qwen3", {"layer_types": ["full"] * 28}, "layer_types = "),
    ("qwen3", {"head_dim": None}, "head_dim = null is not supported"),
    ("gpt2", {"resid_pdrop": 1.5}, "resid_pdrop = 1.5 is not supported: it must be less than 1"),
    ("gpt2", {"hidden_size": 5}, "hidden_size = 5 is not supported: it is another name of n_embd, which is 768"),
])
def test_a_value_of_another_type_is_named(tmp_path, family, values, words):
    with pytest.raises(ConfigError) as error:
        read_huggingface(written(tmp_path, {**ONE[family], **values}))
    assert words in str(error.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_null_is_taken_only_where_transformers_takes_it(tmp_path, family):
    transformers = pytest.importorskip("transformers")
    fields = FAMILIES[family].model_fields
    config_class = transformers.CONFIG_MAPPING[family]
    for key in sorted(fields.keys() & config_class().to_dict().keys()):
        try:
            read_huggingface(written(tmp_path, {**ONE[family], key: None}))
        except ConfigError:
            continue
        config_class(**{key: None})     # raises where null is refused


@pytest.mark.parametrize(("family", "values", "kept"), [
    ("llama", {"max_sequence_length": 4096, "max_position_embeddings": 2048}, "max_position_embeddings is 2048"),
    ("llama", {"zz_note": "x", "trained_by": 3}, "pass: zz_note, trained_by"),
    ("gpt2", {"a b\n": 1}, r'pass: "a b\n"'),
])
def test_what_is_ignored_is_said_in_one_line(tmp_path, capsys, family, values, kept):
    for _ in range(2):      # a config is read more than once
        read_huggingface(written(tmp_path, {**ONE[family], **values}))
    said = capsys.readouterr().err
    assert said.startswith("note: ") and said.endswith(f"{kept}\n") and said.count("\n") == 1, said


def test_harmless_keys_are_no_key_of_a_reader():
    assert not any(HARMLESS & fields.model_fields.keys() for fields in (*FAMILIES.values(), RopeFields))


def test_the_names_of_what_is_read_point_to_the_forward_pass():
    """The stems that refuse an unknown key recognise every known one that counts."""
    known = {key for fields in (*FAMILIES.values(), RopeFields) for key in fields.model_fields}
    assert {key for key in known if not says_forward(key)} == {"type", "initializer_range"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-3, 40) | st.sampled_from([10**400, -(2**63), 2**63])
    | st.floats() | st.text(max_size=8) | st.sampled_from(["full_attention", "sliding_attention", "yarn", "llama3",
                                                           "linear", "default", "silu", "16", "\ud800", "${HOME}"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.text(max_size=4) | st.sampled_from(sorted(RopeFields.model_fields)), inner, max_size=4), max_leaves=6)
EXAMPLES = 150
SCALINGS = [{"type": "linear", "factor": 2.0}, {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_theta": 1e4},
            {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
             "mscale_all_dim": 1.0, "attention_factor": None, "original_max_position_embeddings": 2048}]


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_any_json_value_in_any_key_gives_a_model_or_one_line(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp()
    family = data.draw(st.sampled_from(sorted(FAMILIES)))
    config = {**ONE[family]}
    names = [*FAMILIES[family].model_fields, *config, "quantization_config", "zz"]
    for _ in range(data.draw(st.integers(1, 2))):
        if family != "gpt2" and data.draw(st.booleans()):
            where = data.draw(st.sampled_from(["rope_scaling", "rope_parameters"]))
            scaling = {**data.draw(st.sampled_from(SCALINGS))}
            scaling[data.draw(st.sampled_from(sorted(RopeFields.model_fields)))] = data.draw(JSON)
            config.update({"rope_scaling": None, where: scaling})
        elif family != "gpt2" and data.draw(st.integers(0, 9)) == 0:
            config["layer_types"] = data.draw(st.lists(st.sampled_from(["full_attention", "sliding_attention"]) | JSON,
                                                       min_size=16, max_size=28))
        else:
            config[data.draw(st.sampled_from(names))] = data.draw(JSON)
    written(folder, config)
    try:
        model = load_config(None, [f"model.preset={folder}", "data.seq_length=8"]).model
        resolve(config_from({"model": read_huggingface(folder), "data": {"seq_length": 8}}), 1, data=False)
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert model.num_layers == config.get("num_hidden_layers", config.get("n_layer"))
