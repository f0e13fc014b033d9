"""Rules between keys: a refusal shows its equation in numbers and the key to turn; auto values are filled in."""

import pytest

from megafour.architecture.model import Architecture
from megafour.config.errors import ConfigError
from megafour.config.load import load_config
from megafour.config.rules import resolve
from megafour.cost.describe import describe, mesh_name

M0 = ["model.num_layers=4", "model.hidden_size=32", "model.num_attention_heads=4", "model.num_key_value_heads=2",
      "model.ffn_hidden_size=64", "model.vocab_size=64", "data.seq_length=16", "train.global_batch_size=8",
      "data.train=[{path: corpus}]"]
YARN = "model.rope_scaling={type: yarn, factor: 2, original_max_position_embeddings: 8}"
LLAMA3 = YARN.replace("yarn", "llama3")


def resolved(world, *overrides):
    return resolve(load_config(None, [*M0, *overrides]), world)


@pytest.mark.parametrize(("world", "overrides", "words"), [
    # Sizes that do not divide
    (6, ["parallel.tp=4"], ["world", "6 ranks", "parallel.tp 4", "= 4"]),
    (8, ["parallel.dp=2", "parallel.tp=2"], ["8 ranks", "parallel.dp 2", "= 4", "parallel.dp=auto"]),
    (4, ["train.global_batch_size=6"], ["train.global_batch_size 6", "parallel.dp 4", "= 4", "4 or 8"]),
    (1, ["train.micro_batch_size=3"], ["global_batch_size 8", "train.micro_batch_size 3", "6 or 9"]),
    (4, ["train.global_batch_size=2"], ["set train.global_batch_size to 4"]),
    (2, ["parallel.tp=2", "model.num_attention_heads=3", "model.num_key_value_heads=3", "model.head_dim=8"],
     ["model.num_attention_heads 3", "parallel.tp 2"]),
    (2, ["parallel.cp=2", "data.seq_length=18"], ["data.seq_length 18", "2 · parallel.cp 2 = 4", "16 or 20"]),
    (4, ["parallel.cp=2", "parallel.tp=2", "data.seq_length=20", "parallel.sequence_parallel=true",
         "model.hidden_size=32", "data.seq_length=12"], None),
    (8, ["parallel.cp=2", "parallel.tp=4", "data.seq_length=20"],
     ["20 / parallel.cp 2 = 10", "parallel.tp 4", "parallel.sequence_parallel=false"]),
    (8, ["parallel.cp=2", "parallel.tp=4", "data.seq_length=20", "parallel.sequence_parallel=false"], None),
    # Cases that must train
    (2, ["parallel.pp=2", "model.num_layers=5"], None),
    (4, ["parallel.pp=4", "train.global_batch_size=2"], None),
    (4, ["parallel.tp=4"], None),
    # Heads
    (1, ["model.num_key_value_heads=3"], ["num_attention_heads 4", "num_key_value_heads 3"]),
    (2, ["parallel.tp=2", "model.num_attention_heads=6", "model.num_key_value_heads=3", "model.head_dim=8"],
     ["model.num_key_value_heads 3", "parallel.tp 2"]),
    (1, ["model.hidden_size=30"], ["model.hidden_size 30", "model.num_attention_heads 4", "model.head_dim"]),
    (1, ["model.head_dim=7"], ["rope", "7", "even"]),
    (1, ["model.head_dim=7", "model.position=learned"], None),
    (4, ["parallel.tp=4", "model.ffn_hidden_size=66"], ["model.ffn_hidden_size 66", "parallel.tp 4"]),
    # How a sequence is split
    (2, ["parallel.cp=2", "parallel.context.layout=striped", "data.seq_length=18"], None),
    (2, ["parallel.cp=2", "parallel.context.layout=contiguous", "data.seq_length=17"],
     ["contiguous", "data.seq_length 17", "parallel.cp 2 = 2", "16 or 18"]),
    (2, ["parallel.cp=2", "parallel.context.ulysses=2"],
     ["parallel.context.ulysses = 2 contradicts", "method = ring", "method=usp"]),
    (4, ["parallel.cp=4", "parallel.context={method: ulysses, ulysses: 2}"],
     ["parallel.context.ulysses = 2 contradicts", "parallel.cp 4", "method=usp"]),
    (4, ["parallel.cp=4", "parallel.context={method: usp, ulysses: 3}"],
     ["parallel.cp 4", "parallel.context.ulysses 3"]),
    (8, ["parallel.cp=4", "parallel.tp=2", "parallel.context.method=ulysses"],
     ["model.num_attention_heads 4", "parallel.tp 2 · parallel.context.ulysses 4 = 8", "method usp"]),
    (4, ["parallel.cp=4", "parallel.context.method=ulysses"], None),    # 2 K/V heads on 4 ranks: repeated
    (4, ["parallel.cp=4", "parallel.context={method: usp, ulysses: 2}"], None),
    (4, ["parallel.cp=4", "parallel.context.inner_ring=2"], ["parallel.context.inner_ring = 2", "double_ring"]),
    (4, ["parallel.cp=4", "parallel.context.method=double_ring"], ["needs parallel.context.inner_ring"]),
    (4, ["parallel.cp=4", "parallel.context={method: double_ring, inner_ring: 3}"],
     ["parallel.cp 4", "parallel.context.inner_ring 3"]),
    (1, ["model.attention_window=[4, null]", "data.document_mask=true"], None),
    # Layers
    (8, ["parallel.pp=8"], ["parallel.pp 8", "model.num_layers 4"]),
    (2, ["parallel.pp=2", "parallel.pipeline.partition=[1, 2]"], ["1 + 2 = 3", "model.num_layers 4"]),
    (2, ["parallel.pp=2", "parallel.pipeline.partition=[1, 2, 1]"],
     ["3 entries", "there are 2 stages (parallel.pp 2)"]),
    (2, ["parallel.pp=2", "parallel.pipeline.partition=[4, 0]"], ["stage 1", "0 layers"]),
    (2, ["parallel.pp=2", "parallel.pipeline.partition=[3, 1]"], None),
    (2, ["parallel.pp=2", "parallel.pipeline.schedule=zb_w"], ["zb_w is not a schedule", "did you mean zb_v?"]),
    (2, ["parallel.pp=2", "parallel.pipeline.schedule=zb_h1", "parallel.pipeline.virtual_stages=2"],
     ["one stage a rank", "virtual_stages is 2", "interleaved_1f1b"]),
    (2, ["parallel.pp=2", "parallel.pipeline.schedule=v_min", "parallel.pipeline.virtual_stages=1"],
     ["two stages a rank", "virtual_stages is 1"]),
    (2, ["parallel.pp=2", "parallel.pipeline={schedule: interleaved_1f1b, virtual_stages: 3}"],
     ["parallel.pp 2 · 3 stages a rank = 6", "model.num_layers 4"]),
    (2, ["parallel.pp=2", "parallel.pipeline={schedule: zb_v, partition: [2, 2]}"],
     ["2 entries", "2 · 2 stages a rank = 4"]),
    (2, ["parallel.pp=2", "parallel.pipeline={schedule: zb_v, partition: [1, 1, 1, 1]}"], None),
    # Order of ranks
    (1, ["parallel.order=pp-inner"], None),
    (1, ["parallel.order=ulysses-ring-tp-pp-dp"], None),
    (1, ["parallel.order=tp-cp-dp-pp"], ["parallel.order = tp-cp-dp-pp", "tp-ulysses-ring-dp-pp"]),
    # Positions
    (1, ["model.position=learned", "model.max_position_embeddings=8"],
     ["data.seq_length 16 > model.max_position_embeddings 8"]),
    (1, ["model.max_position_embeddings=8"], None),
    (1, ["model.position=learned", "model.rope_scaling={factor: 2}"], ["model.rope_scaling", "learned"]),
    (1, ["model.rope_scaling={type: yarn, factor: 2}"], ["original_max_position_embeddings"]),
    (1, ["model.rope_scaling={type: linear, factor: 2, beta_fast: 3}"], ["beta_fast", "no effect"]),
    (1, ["model.rope_scaling={type: llama3, factor: 2, original_max_position_embeddings: 8, high_freq_factor: 0.5}"],
     ["low_freq_factor 1", "high_freq_factor 0.5"]),
    (1, ["model.rope_scaling={type: llama3, factor: 2, original_max_position_embeddings: 8, low_freq_factor: 4}"],
     ["low_freq_factor 4 ≥", "high_freq_factor 4"]),
    (1, ["model.rope_scaling={factor: 0.5}"], ["factor 0.5 < 1"]),
    (1, ["model.rope_scaling={factor: 1.0e39}"], ["factor 1e+39 > 2^127", "fp32"]),
    (1, ["model.rope_theta=1.0e39"], ["model.rope_theta 1e+39 > 2^127", "fp32"]),
    (1, ["model.rope_theta=1.0", YARN], ["ln(model.rope_theta)", "model.rope_theta 1 gives 0"]),
    (1, ["model.rope_theta=0.5", YARN], ["model.rope_theta 0.5 < 1"]),
    (1, ["model.rope_theta=1.0e-50"], ["model.rope_theta 1e-50 < 1", "grow with the dimension"]),
    (1, ["model.rope_theta=0.99", LLAMA3], ["model.rope_theta 0.99 < 1"]),
    (1, [YARN.replace("}", ", beta_fast: 1.0e308}")], ["model.rope_scaling.beta_fast 1e+308 > 2^127", "lower it"]),
    (1, [YARN.replace("}", ", beta_slow: 1.0e-300}")], ["model.rope_scaling.beta_slow 1e-300 < 2^-126", "raise it"]),
    (1, [YARN.replace("}", ", attention_factor: 1.0e300}")], ["attention_factor 1e+300 > 2^127"]),
    (1, [YARN.replace("}", ", attention_factor: 1.0e-300}")], ["attention_factor 1e-300 < 2^-126"]),
    (1, [LLAMA3.replace("}", ", low_freq_factor: 1.0e-300}")], ["low_freq_factor 1e-300 < 2^-126"]),
    (1, [LLAMA3.replace("}", ", high_freq_factor: 1.0e308}")], ["high_freq_factor 1e+308 > 2^127"]),
    (1, ["model.rope_theta=1.0"], None),
    (1, [YARN.replace("}", ", beta_fast: 1, beta_slow: 2}")], ["beta_fast 1 < model.rope_scaling.beta_slow 2", "swap"]),
    (1, [YARN.replace("}", ", beta_slow: 33}")], ["beta_fast 32 < model.rope_scaling.beta_slow 33"]),
    (1, [YARN.replace("}", ", beta_fast: 2, beta_slow: 2}")], None),
    (1, ["model.max_position_embeddings=4", YARN], None),       # a run on shorter sequences changes no frequency
    (1, [YARN.replace(": 8}", ": 800}")], None),
    # Length and learning rate
    (1, ["train.tokens=100", "train.steps=3"], ["train.steps = 3", "train.tokens = 100"]),
    (1, ["train.steps=null"], ["train.steps or train.tokens"]),
    (1, ["train.steps=5", "lr_schedule.warmup_steps=5"], ["lr_schedule.warmup_steps 5", "train.steps 5"]),
    (1, ["lr_schedule.warmup_steps=9", "lr_schedule.decay_steps=9"], ["warmup_steps 9", "decay_steps 9"]),
    (1, ["lr_schedule={name: wsd, warmup_steps: 150, decay_steps: 60}"], ["150", "60", "= 210", "train.steps 200"]),
    (1, ["optimizer.lr=1e-4", "lr_schedule.min_lr=2e-4"], ["lr_schedule.min_lr 0.0002", "optimizer.lr 0.0001"]),
    # Data
    (1, ["data.train=[]"], ["data.train is empty"]),
    (1, ["data.train=[{path: a, weight: 0}]"], ["data.train", "add up to 0"]),
    (1, ["data.valid={web: []}"], ["data.valid.web is empty"]),
    (1, ["data.valid={web: [{path: a, weight: 1}, {path: b, weight: 2}]}"], ["data.valid.web", "equal", "1, 2"]),
    (1, ["data.valid={web: [{path: a, weight: 2}, {path: b, weight: 2}]}"], None),
    (1, ["train.steps=9", "logging.profile=10"], ["logging.profile = 10", "train.steps is 9"]),
    (1, ["train.steps=10", "logging.profile=10"], None),
    (1, ["data.split='98,2'", "eval.every=10"], None),
    (1, ["data.split='1,2,3,4'"], ["data.split = 1,2,3,4", "98,1,1"]),
    (1, ["data.split=most"], ["data.split = most"]),
    (1, ["data.split='0,1'"], ["share of train"]),
    (1, ["data.split='nan,1'"], ["data.split = nan,1", "98,1,1"]),
    (1, ["data.split='98,inf'"], ["data.split = 98,inf", "98,1,1"]),
    (1, ["data.split='98,2'", "data.valid={valid: [{path: a}]}"], ["data.split", "data.valid.valid"]),
    (1, ["eval.every=10"], ["eval.every = 10", "data.valid or data.split"]),
    (1, ["data.tokenizer={kind: tiktoken}"], ["data.tokenizer.path"]),
    (1, ["data.tokenizer={kind: bytes, path: a}"], ["data.tokenizer.path", "no effect"]),
    (1, ["checkpoint.init_optimizer=true"], ["checkpoint.init_from"]),
    # ZeRO in parts of the ranks
    (4, ["parallel.zero_size=3"], ["parallel.dp 4 · parallel.cp 1 = 4", "parallel.zero_size 3", "1, 2, 4 or null"]),
    (8, ["parallel.zero_size=8", "parallel.tp=2"], ["parallel.dp 4", "parallel.zero_size 8"]),
    (4, ["parallel.zero_size=2", "parallel.zero_stage=0"], ["parallel.zero_size = 2", "parallel.zero_stage = 0"]),
    (4, ["parallel.zero_size=4", "parallel.cp=2", "parallel.zero_stage=3"], None),
    # Kernels
    (1, ["kernels.attention=flash", "train.precision=fp32"], ["kernels.attention", "fp32", "bf16"]),
    (1, ["kernels.attention=flash", "run.device=cpu"], ["run.device is cpu"]),
    (1, ["kernels.attention=flash", "train.precision=bf16", "parallel.context.fp32_blocks=true"], ["fp32_blocks"]),
])
def test_rules_between_keys(world, overrides, words):
    if words is None:
        resolved(world, *overrides)
        return
    with pytest.raises(ConfigError) as error:
        resolved(world, *overrides)
    for word in words:
        assert word in str(error.value), str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("override", [
    "parallel.ep=2",
])
def test_later_features_are_refused_with_the_reason(override):
    with pytest.raises(ConfigError) as error:
        resolved(1, override)
    key, value = override.split("=")
    assert f"{key} = {value} is not supported by this version: " in str(error.value)


def test_the_file_is_named_by_rules_too(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("parallel: {tp: 3}")
    with pytest.raises(ConfigError, match="run.yaml: world = dp"):
        resolve(load_config(str(path)), 4)


def test_auto_values_are_filled_in():
    config = resolved(16, "parallel.pp=2", "parallel.tp=2", "parallel.cp=2", "train.tokens=1000", "run.name=a")
    assert config.parallel.dp == 2 and config.parallel.context.ulysses == 1
    assert config.train.steps == 8 and config.train.tokens is None  # 1,000 / (8 · 16) = 7.8
    assert config.model.max_position_embeddings == 16 and config.model.head_dim == 8 and config.model.vocab_size == 64
    assert config.lr_schedule.decay_steps == 8 and config.run.dir == "runs/a" and config.checkpoint.dir is None
    assert config.checkpoint_dir == "runs/a/checkpoints"
    assert resolved(1, "lr_schedule.name=wsd", "train.steps=50").lr_schedule.decay_steps == 5
    assert resolved(1, "lr_schedule.name=constant").lr_schedule.decay_steps is None
    assert resolve(config, 16) == config


@pytest.mark.parametrize("key", ["min_lr", "decay_steps"])
def test_a_key_of_the_decay_is_refused_where_nothing_decays(key):
    value = {"min_lr": "1e-5", "decay_steps": "3"}[key]
    with pytest.raises(ConfigError, match=f"lr_schedule.{key} = .* has no effect on lr_schedule.name = constant"):
        resolved(1, "lr_schedule.name=constant", f"lr_schedule.{key}={value}")
    assert resolved(1, "lr_schedule.name=constant", f"lr_schedule.{key}={'0' if key == 'min_lr' else 'null'}")


def test_auto_ulysses_follows_method_and_key_value_heads():
    def ranks(*overrides):
        return resolved(4, "parallel.cp=4", *overrides).parallel.context.ulysses

    assert ranks() == 1 and ranks("parallel.context.method=ulysses") == 4
    assert ranks("parallel.context.method=usp") == 2    # 2 K/V heads: none is repeated
    assert ranks("parallel.context.method=usp", "model.num_key_value_heads=1") == 1


def test_a_pattern_of_windows_repeats_over_the_layers():
    model = resolved(1, "model.attention_window=[4, 8, null]").model
    assert [model.window(layer) for layer in range(4)] == [4, 8, None, 4]
    for wrong in ("[]", "[0]", "0", "[4, x]"):
        with pytest.raises(ConfigError, match="model.attention_window"):
            resolved(1, f"model.attention_window={wrong}")


@pytest.mark.parametrize(("name", "world", "mesh", "accumulation"), [
    ("quickstart", 16, "dp2-pp2-tp2-cp2", 4),
    ("quickstart", 8, "pp2-tp2-cp2", 8),
    ("gpt2-124m", 8, "dp8", 4),
    ("llama3-8b", 8, "dp2-tp4", 64),
    ("llama3-70b-128k", 128, "pp4-tp8-cp4", 32),
])
def test_example_configs_resolve_for_their_world(root, name, world, mesh, accumulation):
    config = resolve(load_config(str(root / "configs" / f"{name}.yaml")), world)
    assert mesh_name(config) == mesh
    words = describe(config)
    assert f"accumulation {accumulation};" in words and f"{mesh}: world {world}" in words


@pytest.fixture
def root(pytestconfig):
    return pytestconfig.rootpath


@pytest.mark.parametrize(("preset", "parameters"), [
    ("gpt2-124m", 124_439_808), ("llama3-8b", 8_030_261_248), ("llama3-70b", 70_553_706_496),
    ("llama3-405b", 405_853_388_800), ("qwen3-0.6b", 596_049_920), ("smollm2-135m", 134_515_008),
])
def test_presets_have_the_published_number_of_parameters(preset, parameters):
    model = load_config(None, [f"model.preset={preset}"]).model
    assert Architecture(model, int(model.vocab_size)).count == parameters


def test_describe_says_the_mesh_the_batch_and_the_parameters():
    words = describe(resolved(4, "parallel.tp=2", "train.steps=10"))
    assert "dp2-tp2: world 4 = 2 replicas · 2 tensor-parallel ranks" in words
    assert "8 samples = dp 2 · micro batch 1 · accumulation 4; 128 tokens a step" in words
    assert "10 steps = 1,280 tokens" in words and "parameters" in words
