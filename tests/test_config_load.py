"""The gate of the configuration: what a YAML file or an override may say, and what a refusal names."""

import subprocess
import sys

import pytest

from megafour.config.errors import ConfigError
from megafour.config.load import config_from, load_config, to_yaml
from megafour.config.rules import resolve
from megafour.config.schema import Config


def loaded(tmp_path, text, *overrides):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load_config(str(path), list(overrides))


def refusal(tmp_path, text, *overrides):
    with pytest.raises(ConfigError) as error:
        loaded(tmp_path, text, *overrides)
    message = str(error.value)
    assert "\n" not in message
    return message


# A scalar has the type of its key, not the one that YAML 1.1 guesses.
@pytest.mark.parametrize(("text", "key", "value"), [
    ("optimizer: {lr: 1e-4}", "optimizer.lr", 0.0001),
    ("optimizer: {lr: 1.0e-4}", "optimizer.lr", 0.0001),
    ("optimizer: {lr: 1e4}", "optimizer.lr", 10000.0),
    ("optimizer: {lr: .5}", "optimizer.lr", 0.5),
    ("optimizer: {lr: 1}", "optimizer.lr", 1.0),
    ("train: {tokens: 1.5e9}", "train.tokens", 1_500_000_000),
    ("train: {steps: 1_000}", "train.steps", 1000),
    ("parallel: {sequence_parallel: off}", "parallel.sequence_parallel", False),
    ("parallel: {sequence_parallel: Yes}", "parallel.sequence_parallel", True),
    ("run: {name: off}", "run.name", "off"),
    ("run: {name: 010}", "run.name", "010"),
    ("run: {name: 1e3}", "run.name", "1e3"),
    ("run: {name: 2024-01-01}", "run.name", "2024-01-01"),
    ("model: {head_dim: ~}", "model.head_dim", None),
    ("model: {head_dim: }", "model.head_dim", None),
    ("model: {vocab_size: auto}", "model.vocab_size", "auto"),
    ("model: {vocab_size: 64}", "model.vocab_size", 64),
    ("checkpoint: {resume: 100}", "checkpoint.resume", 100),
    ("checkpoint: {resume: never}", "checkpoint.resume", "never"),
    ("train:\n  # steps: 3\n", "train.steps", 200),
    ("", "train.steps", 200),
])
def test_scalars_take_the_type_of_their_key(tmp_path, text, key, value):
    section, name = key.split(".")
    found = getattr(getattr(loaded(tmp_path, text), section), name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(("text", "words"), [
    ("optimizer: {lr: fast}", ["optimizer.lr", "fast", "a number"]),
    ('optimizer: {lr: "1e-4"}', ["optimizer.lr", "1e-4", "quotes"]),
    ("optimizer: {lr: .nan}", ["optimizer.lr", ".nan"]),
    ("optimizer: {lr: 0}", ["optimizer.lr", "greater than 0"]),
    ("optimizer: {betas: [0.9, 1.0]}", ["optimizer.betas[1]", "less than 1"]),
    ("optimizer: {betas: [0.9]}", ["optimizer.betas", "it must have at least 2 entries"]),
    ("optimizer: {betas: [0.9, 0.9, 0.9]}", ["optimizer.betas", "it must have at most 2 entries"]),
    ("optimizer: {betas: 0.9}", ["optimizer.betas", "a list"]),
    ("run: {seed: 010}", ["run.seed", "010", "octal", "write 10"]),
    ("run: {seed: 1.5}", ["run.seed", "1.5", "whole number"]),
    ("run: {seed: 1.5e0}", ["run.seed", "1.5e0", "whole number"]),
    ("run: {seed: 0x10}", ["run.seed", "0x10"]),
    ("run: {seed: -1}", ["run.seed", "-1"]),
    ("run: {seed: yes}", ["run.seed", "yes"]),
    ("run: {name: null}", ["run.name", "null", "text"]),
    ("run: {name: ''}", ["run.name", "it must have at least 1 character"]),
    ("parallel: {tp: 0}", ["parallel.tp", "0"]),
    ("parallel: {dp: 0}", ["parallel.dp", "greater than 0"]),
    ("parallel: {dp: all}", ["parallel.dp", "all", "auto"]),
    ("parallel: {sequence_parallel: 1}", ["parallel.sequence_parallel", "true or false"]),
    ("parallel: {zero_stage: 4}", ["parallel.zero_stage", "4"]),
    ("train: {precision: bfloat16}", ["train.precision", "bfloat16", "did you mean bf16"]),
    ("train: 5", ["train", "5", "a mapping"]),
    ("train: [1]", ["train", "[1]", "a mapping"]),
    ("model: {attention_dropout: 1.0}", ["model.attention_dropout", "less than 1"]),
    ("model: {rope_scaling: {type: ntk}}", ["model.rope_scaling.type", "ntk", "yarn"]),
    ("data: {train: data/corpus}", ["data.train", "data/corpus", "a list (mappings with path, weight)"]),
    ("data: {train: [{weight: 1.0}]}", ["data.train[0].path", "required"]),
    ("data: {train: [{path: a}, {path: b, weight: -1}]}", ["data.train[1].weight = -1.0", "greater than or equal"]),
    ("data: {valid: {web: [{path: a, weight: -1}]}}", ["data.valid.web[0].weight = -1.0"]),
    ("data: {valid: {web: [{path: a, wieght: 1}]}}", ["data.valid.web[0].wieght", "weight"]),
    ("logging: {wandb: off}", ["logging.wandb", "null switches it off"]),
    ("- 1", ["a mapping of sections"]),
    ("train: {steps: !!int 3}", ["train.steps", "tag"]),
    ("train: {steps: 3", ["not valid YAML"]),
    ("train: {steps: 3}\n---\ntrain: {steps: 4}", ["not valid YAML"]),
    ("train: &a [*a]", ["train[0]", "contains itself"]),
    ("? [1]\n: 2", ["a key must be text"]),
])
def test_wrong_values_are_refused_by_name(tmp_path, text, words):
    message = refusal(tmp_path, text)
    assert str(tmp_path / "run.yaml") in message
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(("text", "key", "hint"), [
    ("optimiser: {lr: 1}", "optimiser", "did you mean optimizer?"),
    ("optimizer: {learningrate: 1}", "optimizer.learningrate", "optimizer.lr"),
    ("train: {micro_batch: 1}", "train.micro_batch", "train.micro_batch_size"),
    ("train: {lr: 1}", "train.lr", "another section: optimizer.lr"),
    ("lr: 1", "lr", "another section: optimizer.lr"),
    ("tp: 2", "tp", "parallel.tp"),
    ("training: {steps: 1}", "training", "did you mean train?"),
    ("model: {n_layer: 1}", "model.n_layer", "Hugging Face's name; here it is model.num_layers"),
    ("model: {intermediate-size: 1}", "model.intermediate-size", "model.ffn_hidden_size"),
    ("model: {num_query_groups: 1}", "model.num_query_groups",
     "Megatron-LM's name; here it is model.num_key_value_heads"),
    ("parallel: {tensor_parallel_degree: 1}", "parallel.tensor_parallel_degree",
     "torchtitan's name; here it is parallel.tp"),
    ("tensor_model_parallel_size: 2", "tensor_model_parallel_size", "parallel.tp"),
    ("train: {batch_accumulation_per_replica: 1}", "train.batch_accumulation_per_replica", "nanotron's name"),
    ("parallel: {context: {ring: 2}}", "parallel.context.ring", "inner_ring"),
    ("model: {rope_scaling: {rope_type: yarn}}", "model.rope_scaling.rope_type", "model.rope_scaling.type"),
    ("checkpoint: {interval: 5}", "checkpoint.interval", "checkpoint.every"),
    ("model: {moe: {experts: 8}}", "model.moe", "not in this version"),
    ("model: {mla: null}", "model.mla", "not in this version"),
    ("train: {fp8: true}", "train.fp8", "not in this version"),
    ("model: {num_local_experts: 8}", "model.num_local_experts", "not in this version"),
    ("data: {zzz: 1}", "data.zzz", "the keys of data are train, valid"),
    ("Train: {steps: 1}", "Train", "did you mean train?"),
    ("'<<': {steps: 1}", "<<", "the keys of the top level"),
    ("<<: {steps: 1}", "steps", "another section: train.steps"),
])
def test_unknown_keys_get_the_nearest_valid_one(tmp_path, text, key, hint):
    message = refusal(tmp_path, text)
    assert f": {key} = " in message and hint in message, message


def test_a_repeated_key_is_refused_at_every_depth(tmp_path):
    message = refusal(tmp_path, "train:\n  steps: 1\n  steps: 2\n")
    assert "run.yaml:3: train.steps = 2 is a repeated key" in message and "line 2" in message
    assert "repeated key" in refusal(tmp_path, "train: {steps: 1}\nrun: {seed: 1}\ntrain: {steps: 1}")
    assert "data.train[0].path" in refusal(tmp_path, "data: {train: [{path: a, path: b}]}")
    assert "repeated key" in refusal(tmp_path, "run: {seed: 1}", "data.train=[{path: a, path: b}]")


def test_the_line_of_the_file_is_named(tmp_path):
    assert "run.yaml:3: train.stepz" in refusal(tmp_path, "train:\n  micro_batch_size: 1\n  stepz: 4\n")


def test_environment_variables_expand(tmp_path, monkeypatch):
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.setenv("BATCH", "32")
    monkeypatch.delenv("NOWHERE", raising=False)
    text = 'run: {dir: "${SCRATCH}/runs/{name}"}\ntrain: {global_batch_size: "${BATCH}"}\ndata:\n  seq_length: ${BATCH}'
    config = loaded(tmp_path, text, "data.train=[{path: '${SCRATCH}/corpus'}]")
    assert config.data.seq_length == 32
    assert config.run.dir == "/scratch/me/runs/{name}" and config.train.global_batch_size == 32
    assert config.data.train[0].path == "/scratch/me/corpus"
    message = refusal(tmp_path, "run: {dir: '${NOWHERE}/x'}")
    assert "run.dir" in message and "NOWHERE is not set" in message


def test_overrides_pass_the_same_gate(tmp_path):
    text = "train: {steps: 5, micro_batch_size: 2}\nparallel: {pipeline: {schedule: gpipe}}\ndata: {train: [{path: a}]}"
    config = loaded(tmp_path, text, "train.steps=7", "train.steps=8", "parallel.pipeline={partition: [1, 2]}",
                    "data.train=[{path: b, weight: 2}, {path: c}]", "data.valid.web=[{path: d}]",
                    "train={grad_clip: 0}")
    assert config.train.steps == 8 and config.train.micro_batch_size == 2 and config.train.grad_clip == 0
    assert config.parallel.pipeline.schedule == "gpipe" and config.parallel.pipeline.partition == [1, 2]
    assert [(s.path, s.weight) for s in config.data.train] == [("b", 2.0), ("c", 1.0)]
    assert config.data.valid["web"][0].path == "d"


@pytest.mark.parametrize(("override", "value"), [
    ("run.name=exp #2", "exp #2"), ("run.name=#2", "#2"), ("run.name=a: b", "a: b"), ("run.name=[x", "[x"),
    ("run.name=*x", "*x"), ("run.name=- a", "- a"), ("run.name=| a", "| a"), ("run.name=@a", "@a"),
    ("run.name={a}", "{a}"), ("run.name= a ", " a "), ("run.name=a=b", "a=b"), ("run.name=1e3", "1e3"),
    ("run.name=off", "off"), ("run.name='1e3'", "1e3"), ('run.name="a #2"', "a #2"), ("run.name='it''s'", "it's"),
    ('run.name="a" b', '"a" b'), ("run.name='a' #2", "'a' #2"), ('run.name="a', '"a'), ("run.name='null'", "null"),
    ("checkpoint.init_from=null", None), ("checkpoint.init_from=~", None), ("checkpoint.init_from=", None),
    ("checkpoint.init_from=a #2", "a #2"), ("checkpoint.resume=100", 100), ("checkpoint.resume=a #2", "a #2"),
    ("logging.wandb=team: x", "team: x"), ("data.split=98,1,1", "98,1,1"),
])
def test_an_override_of_a_text_key_is_that_text(override, value):
    """`'run.name=exp #2'` read as YAML is `exp`: the run would go on with another experiment's folder."""
    section, key = override.split("=")[0].split(".")
    assert getattr(getattr(load_config(None, [override]), section), key) == value


@pytest.mark.parametrize("override", ["train.steps=3 #2", "train.steps=#2", "data.train=[{path: a}] # b",
                                      "model.vocab_size=auto #2", "train={steps: 3} # x", "model.head_dim= # none"])
def test_a_comment_in_an_override_is_refused_not_dropped(override):
    with pytest.raises(ConfigError, match="is a comment to YAML and would be dropped"):
        load_config(None, [override])
    assert load_config(None, ["data.train=[{path: 'a #b'}, {path: c#d}]"]).data.train[0].path == "a #b"


@pytest.mark.parametrize(("text", "found"), [
    ("data: {train: [&a {path: a, weight: 2}, {<<: *a, path: b}]}", [("a", 2.0), ("b", 2.0)]),
    ("data: {train: [&a {path: a, weight: 2}, {path: b, <<: *a}]}", [("a", 2.0), ("b", 2.0)]),
    ("data: {train: [&a {path: a}, &b {path: b, weight: 2}, {<<: [*a, *b]}]}", [("a", 1.0), ("b", 2.0), ("a", 2.0)]),
    ("data: {train: [{<<: [{path: a}, {path: b, weight: 3}]}]}", [("a", 3.0)]),
    ("data: {train: [{<<: {<<: {path: a, weight: 3}, path: b}}]}", [("b", 3.0)]),
    ("data: {<<: {train: [{path: a}]}}", [("a", 1.0)]),
    ("<<: {data: {train: [{path: a}]}}", [("a", 1.0)]),
])
def test_merge_keys_mean_what_yaml_says(tmp_path, text, found):
    assert [(source.path, source.weight) for source in loaded(tmp_path, text).data.train] == found


@pytest.mark.parametrize(("text", "words"), [
    ("train:\n  <<: 3", "run.yaml:2: train.<< = 3 is not valid: it must be a mapping"),
    ("train:\n  <<: [{steps: 1}, a]", "run.yaml:2: train.<< = a is not valid"),
    ("train:\n  <<: {steps: 1}\n  <<: {steps: 2}", "run.yaml:3: train.<< is a repeated key; merge several"),
    ("train: &a\n  <<: *a", "train.<<: an alias that contains itself"),
    ("train:\n  <<:\n    steps: 1\n    steps: 2", "run.yaml:4: train.steps = 2 is a repeated key"),
    ("train:\n  micro_batch_size: 1\n  <<: {stepz: 1}", "run.yaml:3: train.stepz = 1"),
    ("train:\n  <<:\n    steps: x\n  tokens: 1", "run.yaml:3: train.steps = x is not valid"),
    ("[" * 5000, "nested too deeply"),
    ("train: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(f"k{i}: &b{i} [{','.join([f'*b{i - 1}' if i else '*a'] * 9)}]\n"
                                                 for i in range(9)), "more than 100000 values"),
    ('run: {name: "\\UFFFFFFFF"}', "not valid YAML"),
    ('run: {name: "a\\0b"}', "run.name = "),
    ('run: {dir: "a\\0b"}', "must not hold a null character"),
    ('run: {name: "\\ud800"}', "run.name"),
])
def test_yaml_that_means_nothing_here_is_refused_in_a_line(tmp_path, text, words):
    assert words in refusal(tmp_path, text)


PATHS = {"run.dir": "{}", "checkpoint.dir": "{}", "checkpoint.resume": "{}", "checkpoint.init_from": "{}",
         "data.train": "[{{path: {}}}]", "data.valid": "{{held: [{{path: {}}}]}}",
         "data.tokenizer": "{{kind: huggingface, path: {}}}", "parallel.pipeline.schedule": "{}.csv"}


@pytest.mark.parametrize("key", PATHS)
def test_a_home_folder_is_expanded_in_every_path(tmp_path, monkeypatch, key):
    monkeypatch.setenv("HOME", str(tmp_path))
    in_file = ": {".join([*key.split(".")[:-1], f"{key.split('.')[-1]}: "]) + PATHS[key].format("~/a")
    config = loaded(tmp_path, in_file + "}" * key.count("."))
    assert config == load_config(None, [f"{key}={PATHS[key].format('~/a')}"])
    assert config == load_config(None, [f"{key}={PATHS[key].format(f'{tmp_path}/a')}"])
    assert f"{tmp_path}/a" in to_yaml(config) and "~" not in to_yaml(config)
    message = refusal(tmp_path, "", f"{key}={PATHS[key].format('~nosuchuser/a')}")
    assert "names the home folder of nosuchuser: there is no such user; write ./~nosuchuser" in message
    assert f"./~{'/a'}" in to_yaml(load_config(None, [f"{key}={PATHS[key].format('./~/a')}"]))


def test_a_home_folder_is_expanded_in_a_preset_and_not_in_a_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert f"{tmp_path}/config.json" in refusal(tmp_path, "", "model.preset=~/")
    assert "no such user" in refusal(tmp_path, "", "model.preset=~nosuchuser/a")
    config = resolve(load_config(None, ["run.name=~a", "run.dir={name}", "checkpoint.dir={name}/c"]), 1, data=False)
    assert (config.run.dir, config.checkpoint.dir) == ("./~a", "./~a/c")


def test_a_nullable_mapping_is_replaced_whole(tmp_path):
    text = "model: {rope_scaling: {type: llama3, factor: 8, low_freq_factor: 1, original_max_position_embeddings: 8}}"
    scaling = loaded(tmp_path, text, "model.rope_scaling={type: linear, factor: 2}").model.rope_scaling
    assert scaling is not None and scaling.low_freq_factor is None and scaling.type == "linear"
    assert loaded(tmp_path, text, "model.rope_scaling=null").model.rope_scaling is None


@pytest.mark.parametrize(("override", "hint"), [
    ("train.steps", "section.key=value"),
    ("=3", "section.key=value"),
    ("steps=3", "train.steps"),
    ("train.stepz=3", "did you mean train.steps?"),
    ("train.steps.x=3", "train.steps is one value"),
    ("data.train.0.path=a", "data.train is one value"),
    ("train.steps=abc", "must be a whole number"),
    ("train={stepz: 3}", "did you mean train.steps?"),
    ("train=3", "a mapping"),
    ("data.train=[{path: a", "not valid YAML"),
    ("run.name=", "null is not allowed"),
    ("run.name=null", "null is not allowed"),
])
def test_wrong_overrides_are_refused(tmp_path, override, hint):
    message = refusal(tmp_path, "train: {steps: 1}", override)
    assert hint in message and override in message, message


def test_a_wrong_section_stays_wrong_under_an_override(tmp_path):
    assert "train = 5" in refusal(tmp_path, "train: 5", "train.steps=3")


def test_missing_and_unreadable_files(tmp_path):
    with pytest.raises(ConfigError, match="no.yaml: cannot be read"):
        load_config(str(tmp_path / "no.yaml"))
    (tmp_path / "bad.yaml").write_bytes(b"\xff\xfe\x00a")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_config(str(tmp_path / "bad.yaml"))


@pytest.mark.parametrize("overrides", [
    [],
    ["model.preset=llama3-405b", "run.name='1e3'", "parallel.dp=8"],
    ["model.preset=gpt2-124m", "train.tokens=1e6", "data.split='98,2'", "run.name='off'", "checkpoint.resume='100'"],
    ["data.valid={a: [{path: x, weight: 0.1}], 'on': [{path: 'null'}]}", "data.skip_samples=[1]", "run.name='ü: #x'"],
])
def test_yaml_round_trip(tmp_path, overrides):
    config = load_config(None, overrides)
    assert loaded(tmp_path, to_yaml(config)) == config
    resolved = resolve(config, 8, data=False)
    again = loaded(tmp_path, to_yaml(resolved))
    assert again == resolved and resolve(again, 8, data=False) == resolved


def test_python_values_pass_the_same_gate():
    config = config_from({"optimizer": {"lr": 1}, "train": {"steps": 3}, "model": {"vocab_size": 64}})
    assert config.optimizer.lr == 1.0 and config.train.steps == 3
    with pytest.raises(ConfigError, match="train.steps = \"3\""):
        config_from({"train": {"steps": "3"}})
    with pytest.raises(ConfigError, match="train.steps = true"):
        config_from({"train": {"steps": True}})


def test_a_config_does_not_change():
    config = Config()
    with pytest.raises(ValueError, match="frozen"):
        config.train.steps = 3  # type: ignore[misc]
    assert config.replace({"train.steps": 3, "parallel.pipeline.schedule": "gpipe"}).train.steps == 3
    assert config.train.steps == 200


def test_loading_imports_no_torch():
    code = ("import sys; from megafour.config.load import load_config; from megafour.config.rules import resolve; "
            "from megafour.cost.describe import describe; "
            "print(describe(resolve(load_config(None), 1, data=False))); assert 'torch' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
