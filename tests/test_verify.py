"""What `megafour verify` walks, how it shrinks a config, and what it prints."""

import json
from pathlib import Path

import pytest

from megafour.cli.main import main
from megafour.config.errors import ConfigError
from megafour.config.load import config_from, load_config
from megafour.sizes import PRODUCTION
from megafour.verify.compare import TOLERANCES, Compared
from megafour.verify.full import full_cases, predicted
from megafour.verify.matrix import (
    DEFAULT_MESHES,
    OPTION_MESHES,
    OPTIONS,
    applicable_pairs,
    covering_array,
    pairs_of,
    parse_mesh,
    values,
)
from megafour.verify.run import Outcome, check, not_held, summarise
from megafour.verify.shrink import option_case, user_cases

CONFIGS = sorted(str(p) for p in (Path(__file__).parent.parent / "configs").glob("*.yaml"))
MESHES = [parse_mesh(words) for words in DEFAULT_MESHES]


def test_covering_array_walks_every_applicable_pair():
    rows = covering_array(OPTION_MESHES)
    walked = {pair for row in rows for pair in pairs_of(row)}
    wanted = applicable_pairs(OPTION_MESHES)
    assert wanted <= walked
    assert rows == covering_array(OPTION_MESHES)
    assert len(rows) <= 110    # 20 meshes × 3 values is the least


def test_applicable_pairs_are_those_of_the_issue():
    """Named here by hand, so that an option cannot drop out of the walk unseen."""
    wanted = applicable_pairs(OPTION_MESHES)
    for words in OPTION_MESHES:
        mesh = parse_mesh(words)
        for option in ("recompute", "tied", "micro_batches", "micro_batch_size", "dropout", "family", "optimizer",
                       "documents", "window"):
            assert all((("mesh", words), (option, value)) in wanted for value in OPTIONS[option])
        assert ((("mesh", words), ("kv_heads", "fewer")) in wanted) == (mesh.tp > 1)
        for method in ("ring", "all_gather", "ulysses", "usp", "double_ring"):
            applies = mesh.cp >= (4 if method in ("usp", "double_ring") else 2)
            assert ((("mesh", words), ("method", method)) in wanted) == applies
        for layout in ("zigzag", "striped", "contiguous"):
            assert ((("mesh", words), ("layout", layout)) in wanted) == (mesh.cp > 1)
        assert ((("mesh", words), ("sequence_parallel", "false")) in wanted) == (mesh.tp > 1)
        assert ((("mesh", words), ("zero_stage", "1")) in wanted) == (mesh.dp * mesh.cp > 1)
        assert ((("mesh", words), ("layers", "uneven")) in wanted) == (mesh.pp > 1)
        assert ((("mesh", words), ("valid", "empty-rank")) in wanted) == (mesh.dp * mesh.cp > 1)
    for f in OPTIONS:
        for g in OPTIONS:
            if list(OPTIONS).index(f) < list(OPTIONS).index(g):
                pairs = {pair for pair in wanted if (pair[0][0], pair[1][0]) == (f, g)}
                assert len(pairs) == len(OPTIONS[f]) * len(OPTIONS[g]), (f, g)


def test_every_row_is_a_config_that_differs_as_it_says():
    config = load_config(CONFIGS[-1])
    for row in covering_array(OPTION_MESHES):
        case = option_case(config, row, 3)
        c, mesh = case.config, case.degrees
        assert mesh.words == parse_mesh(row["mesh"]).words
        assert (c.model.kv_heads < mesh.tp) == (
            row["kv_heads"] == "fewer" or row["kv_heads"] == "one" and mesh.tp > 1)
        assert (c.model.kv_heads == 1) == (row["kv_heads"] == "one" or row["kv_heads"] == "fewer" and mesh.tp == 2)
        assert row.get("method", "ring") == c.parallel.context.method
        assert row.get("layout", "zigzag") == c.parallel.context.layout
        assert c.data.document_mask == (row["documents"] == "on")
        assert (c.model.kv_heads == c.model.num_attention_heads) == (row["kv_heads"] == "all")
        assert c.train.global_batch_size == mesh.dp * c.train.micro_batch_size * int(row["micro_batches"])
        assert (c.model.num_layers % mesh.pp > 0) == (row.get("layers", "even") != "even")
        assert c.model.tie_embeddings == (row["tied"] == "true")
        assert (c.model.attention_dropout > 0) == (row["dropout"] == "on")


def test_parse_mesh():
    assert parse_mesh("cp2-dp4").words == "dp4-cp2"
    assert parse_mesh("pp2-tp2-ep1").world == 4
    for wrong in ("", "dp0", "dp2-dp2", "xp2", "dp2,tp2", "ep2"):
        with pytest.raises(ConfigError, match="--mesh"):
            parse_mesh(wrong)
    assert values(parse_mesh("dp2"), "order") == ()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: Path(p).stem)
def test_shipped_configs_shrink_on_every_mesh(path):
    config = load_config(path)
    for case in user_cases(config, MESHES, 3):
        toy = case.config
        assert toy.model.num_attention_heads * config.model.kv_heads == (
            toy.model.kv_heads * config.model.num_attention_heads)
        for key in ("norm", "activation", "position", "tie_embeddings", "qkv_bias", "linear_bias", "qk_norm",
                    "hidden_dropout", "attention_dropout"):
            assert getattr(toy.model, key) == getattr(config.model, key)
        assert toy.train.recompute == config.train.recompute
        assert toy.train.grad_clip == config.train.grad_clip
        assert toy.optimizer.name == config.optimizer.name
        assert toy.parallel.zero_stage == config.parallel.zero_stage
        assert toy.parallel.sequence_parallel == config.parallel.sequence_parallel
        assert toy.parallel.pipeline.schedule == config.parallel.pipeline.schedule
        assert toy.model.hidden_size <= 256


def test_a_config_of_hybrid_sharding_shrinks_on_every_mesh():
    """dp is auto: the config by itself has as many replicas as its zero_size asks for, and not one."""
    config = config_from({"parallel": {"zero_size": 8, "zero_stage": 3}})
    sizes = [case.config.parallel.zero_size for case in user_cases(config, MESHES, 3)]
    assert len(sizes) == len(MESHES) and max(sizes) > 1


@pytest.mark.parametrize(("heads", "kv", "tp", "toy"), [
    (6, 3, 1, (8, 4)),    # 6 and 3 divide by no tp 4: scaled up, ratio kept
    (8, 2, 4, (4, 1)),    # K/V heads < tp stays so, on tp2 as on tp4
    (32, 1, 1, (32, 1)),    # multi-query
    (4, 4, 1, (4, 4)),
])
def test_head_ratio_is_kept(heads, kv, tp, toy):
    config = config_from({"model": {"hidden_size": 16 * heads, "num_attention_heads": heads,
                                    "num_key_value_heads": kv, "ffn_hidden_size": 64}, "parallel": {"tp": tp}})
    found = user_cases(config, [parse_mesh("tp2"), parse_mesh("tp4")], 1)[0].config.model
    assert (found.num_attention_heads, found.kv_heads) == toy


def test_a_toy_has_more_than_one_head_where_the_model_has():
    """With one head, no fault in the order of heads would show."""
    config = config_from({"model": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}})
    found = user_cases(config, [parse_mesh("dp2")], 1)[0].config.model
    assert (found.num_attention_heads, found.kv_heads) == (2, 2)


def test_windows_shrink_with_the_sequence_and_one_token_stays_one():
    """A window of one is a kind of its own: a query sees its own key alone, on every rank."""
    config = config_from({"model": {"attention_window": [1, None, 256, 2]}, "data": {"seq_length": 512}})
    assert user_cases(config, [parse_mesh("cp2")], 1)[0].config.model.attention_window == [1, None, 12, 2]


def test_odd_meshes_and_uneven_layers():
    config = config_from({"model": {"num_layers": 7}, "parallel": {"pp": 2, "pipeline": {"partition": [3, 4]}}})
    cases = user_cases(config, [parse_mesh(m) for m in ("tp3", "cp3-tp2", "pp2", "pp5", "dp3")], 2)
    assert [c.config.model.num_attention_heads % c.degrees.tp for c in cases] == [0] * 5
    assert cases[2].config.parallel.pipeline.partition == [3, 3]
    assert sum(cases[3].config.parallel.pipeline.partition) == 6


def test_a_number_that_is_none_fails_and_a_gap_is_named():
    good = Compared(0.0, 0.0, {"a": 1e-12}, {"a": 0.0}, [("a", (0, 0), (2, 3), 0, 6)])
    lost = Compared(0.0, 0.0, {"a": float("nan")}, {"a": 0.0}, [("a", (2, 0), (2, 3), 0, 5)])
    for ranks, passed in (([good], True), ([good, lost, good], False)):
        outcome = Outcome("dp2", {}, False, 0.0)
        summarise(outcome, ranks, TOLERANCES["fp64"])
        assert outcome.passed is passed
    assert not_held([good, lost], {"a": (4, 3)}) == ["a"]
    assert not_held([good], {"a": (2, 3)}) == []


def test_the_command(capsys):
    assert main(["verify", "--mesh", "dp2", "--mesh", "tp2-cp2", "--steps", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] and [m["mesh"] for m in found["meshes"]] == ["dp2", "tp2-cp2"]
    assert max(max(m["loss"], m["grad_norm"], m["gradient"], m["weights"]) for m in found["meshes"]) <= 1e-9
    assert "layers.0.attention.wk.weight" in found["meshes"][0]["gradients"]


ARRAY = covering_array(OPTION_MESHES)


@pytest.mark.parametrize("number", [number if number % 8 == 0 else pytest.param(number, marks=pytest.mark.full)
                                    for number in range(len(ARRAY))],
                         ids=lambda n: f"{n}-{ARRAY[n]['mesh']}")
def test_every_mesh_and_every_pair_of_options(pool, number, deviation):
    """The covering array: every applicable pair of options, and every applicable (mesh, option) pair; by default every
    eighth row of it, with `--all` the rest."""
    outcome = check(pool, option_case(config_from({}), ARRAY[number], 3, thorough=number % 8 > 0), 3)
    assert outcome.passed, outcome
    deviation(max(outcome.loss, outcome.grad_norm, outcome.gradient, outcome.weights))


def test_the_command_walks_options(capsys):
    assert main(["verify", "--options", "all", "--mesh", "tp2", "--steps", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] and {m["options"]["sequence_parallel"] for m in found["meshes"]} == {"true", "false"}


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_every_default_mesh(family, capsys):
    """Each axis, each pair and the 4D mesh, under one config of each family."""
    assert main(["verify", "--json", f"model.preset=tiny-{family}"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["meshes"]) == 18


def full(config, words, available=10**12, layers=1):
    return full_cases(config_from(config), [parse_mesh(w) for w in words], layers, 1, "fp64", "cpu", available)


SMALL = {"model": {"num_layers": 6, "hidden_size": 40, "num_attention_heads": 5, "ffn_hidden_size": 120,
                   "vocab_size": 301},
         "data": {"seq_length": 280}, "train": {"global_batch_size": 8}}


def test_full_size_keeps_the_shapes_and_the_sizes_of_training(pool):
    cases, skipped = full(SMALL, ["tp5", "cp2"])
    model = cases[0].config.model
    assert (model.num_layers, model.hidden_size, model.num_attention_heads, cases[0].vocab_size) == (1, 40, 5, 301)
    assert cases[0].config.data.seq_length == 280 and cases[0].sizes == PRODUCTION and not skipped
    outcome = check(pool, cases[1], 1)
    assert outcome.passed, outcome


def test_full_size_skips_a_mesh_that_does_not_fit_with_the_numbers():
    cases, skipped = full(SMALL, ["dp2", "tp2"], available=10**9)
    assert [(one.mesh, "num_attention_heads" in one.why) for one in skipped] == [("dp2", False), ("tp2", True)]
    assert not cases and "1.0 GB are available" in skipped[0].why and "the 2 ranks" in skipped[0].why
    (case,), _ = full(SMALL, ["dp2"])
    (deeper,), _ = full(SMALL, ["dp2"], layers=6)
    assert predicted(deeper, 1, "fp64").most > predicted(case, 1, "fp64").most > predicted(case, 1, "fp32").most


def test_bf16_on_cpu_at_its_own_tolerance(capsys):
    assert main(["verify", "--mesh", "dp2-pp2", "--dtype", "bf16", "--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert "passes at: loss and evaluation 0.01" in out and "1 of 1 passed" in out


@pytest.mark.parametrize(("argv", "said"), [
    (["--mesh", "dp2-xp2"], "xp2"),
    (["--device", "cuda", "--mesh", "dp64"], "64 GPUs"),
    (["model.num_heads=3"], "num_attention_heads"),
    (["--full-size", "2"], "model.vocab_size"),
    (["--full-size", "2", "--options", "all"], "--options"),
    (["--full-size", "900", "--mesh", "dp2", "model.preset=llama3-70b", "data.seq_length=8192"], "are available"),
    (["model.num_attention_heads=6", "model.num_key_value_heads=4", "model.hidden_size=48"], "num_key_value_heads"),
])
def test_wrong_arguments(argv, said, capsys):
    assert main(["verify", *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1


def product(cp):
    """Every method and layout at one cp."""
    return [(method, layout, cp) for method in ("ring", "all_gather", "ulysses", "usp", "double_ring")
            for layout in ("zigzag", "striped", "contiguous") if cp > 2 or method not in ("usp", "double_ring")]


@pytest.mark.parametrize(("method", "layout", "cp"), [
    *product(4), *(pytest.param(*case, marks=pytest.mark.full) for cp in (2, 8) for case in product(cp))])
def test_every_method_and_layout_trains_the_same_model(pool, method, layout, cp, deviation):
    """With documents and windows, shorter and longer than a rank's share."""
    inner = {"usp": {"ulysses": 2}, "double_ring": {"inner_ring": 2}}.get(method, {})
    config = config_from({
        "model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2,
                  "attention_window": [None, 11]},
        "parallel": {"cp": cp, "context": {"method": method, "layout": layout, **inner}},
        "data": {"seq_length": 32, "document_mask": True}, "train": {"global_batch_size": 3}})
    outcome = check(pool, user_cases(config, [parse_mesh(f"cp{cp}")], 3)[0], 3)
    assert outcome.passed, outcome
    deviation(max(outcome.loss, outcome.gradient, outcome.weights))
