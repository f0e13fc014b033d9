"""Runs that start from a checkpoint or a Hugging Face folder, on any mesh, and exports in which no mesh shows."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megafour.checkpoint import store
from megafour.checkpoint.reading import CheckpointReader
from megafour.config.errors import ConfigError
from megafour.config.huggingface import read_huggingface
from megafour.config.load import config_from, to_yaml
from megafour.config.rules import resolve
from megafour.data.dataset import build_datasets
from megafour.data.description import tokenizer_info
from megafour.inference.convert import from_huggingface, to_huggingface
from megafour.trainer.saving import logical_tensors, restore_small_state, small_state
from megafour.trainer.setup import build_mesh, build_state
from megafour.trainer.starting import check_start, start_from
from tests.huggingface import deviation_of, doubled, logits_of, open_model, our_logits, save_model
from tests.training import losses, settings, train, write_corpus

pytest.importorskip("transformers")

MESHES = [{"tp": 2}, {"pp": 2}, {"cp": 2}, {"dp": 2, "pp": 2, "tp": 2, "zero_stage": 3}]


def started(folder: Path, parallel: dict[str, Any], source: Path, **sections: Any) -> dict[str, Any]:
    """Settings of a run that starts from a folder, with its model."""
    sections["checkpoint"] = {"init_from": str(source), **sections.get("checkpoint", {})}
    values = settings(folder, parallel, **sections)
    values["model"] = {**(read_huggingface(source) if (source / "config.json").is_file() else values["model"]),
                       "attention_dropout": 0.0, "hidden_dropout": 0.0}
    return values


def size(parallel: dict[str, Any]) -> int:
    return parallel.get("dp", 1) * parallel.get("pp", 1) * parallel.get("tp", 1) * parallel.get("cp", 1)


def first_loss(model: Any, values: dict[str, Any]) -> float:
    """What `transformers` makes of the run's first global batch."""
    config = resolve(config_from(values), size(values["parallel"]))
    samples = build_datasets(config, tokenizer_info(config)).train
    whole = torch.stack([torch.as_tensor(samples.sample(i)) for i in range(config.train.global_batch_size)])
    with torch.no_grad():
        return float(F.cross_entropy(model(whole[:, :-1]).logits.flatten(0, 1), whole[:, 1:].flatten()))


@pytest.mark.parametrize("kind", ["smollm", "gpt2"])
def test_a_run_starts_from_a_hugging_face_folder_on_any_mesh(pool, tmp_path, kind):
    model = doubled(save_model(kind, tmp_path / "hf"))
    write_corpus(tmp_path / "corpus")
    found = {}
    for index, parallel in enumerate([{}, *MESHES]):
        folder = tmp_path / str(index)
        shutil.copytree(tmp_path, folder, ignore=lambda _, names: [n for n in names if not n.startswith("corpus")])
        values = started(folder, parallel, tmp_path / "hf", train={"steps": 3})
        assert pool.run(train, size(parallel), values) == [0] * size(parallel)
        found[index] = losses(folder)
        assert sorted(found[index]) == [1, 2, 3]
        assert abs(found[index][1] - first_loss(model, values)) <= 1e-9 * found[index][1]
    assert all(abs(other[step] - found[0][step]) <= 1e-9 * found[0][step] for other in found.values() for step in other)


def held_after(rank: int, world: int, values: dict[str, Any], optimizer: bool) -> tuple[int, list[tuple]]:
    """(updates, [(key, offset, values)]) of a state that took its starting point."""
    config = resolve(config_from(values), world, data=False)
    state = build_state(config, build_mesh(config, torch.device("cpu")), int(config.model.vocab_size))
    start_from(state, config)
    return state.optimizer.updates, [(t.name, offset, part.tolist()) for t in logical_tensors(state)
                                     for offset, _, part in t.parts]


@pytest.mark.parametrize("optimizer", [True, False])
def test_from_a_checkpoint_of_another_mesh_with_and_without_its_optimizer(pool, tmp_path, optimizer):
    write_corpus(tmp_path / "corpus")
    assert pool.run(train, 2, settings(tmp_path, {"tp": 2}, train={"steps": 5})) == [0, 0]
    source = tmp_path / "run"
    checkpoint = store.find(source)
    values = started(tmp_path, {"dp": 2, "pp": 2}, source, checkpoint={"init_optimizer": optimizer})
    reader = CheckpointReader(checkpoint)
    stored = {name: reader.read(name) for name in reader.tensors}
    for updates, parts in pool.run(held_after, 4, values, optimizer):
        assert updates == (5 if optimizer else 0)
        for name, offset, part in parts:
            got = torch.tensor(part, dtype=torch.float64)
            place = tuple(slice(o, o + n) for o, n in zip(offset, got.shape, strict=True))
            taken = optimizer or name.startswith("weights/")
            assert torch.equal(got, stored[name][place] if taken else torch.zeros_like(got)), name


@pytest.mark.parametrize("name", ["__1_0.distcp", pytest.param("config.yaml", marks=pytest.mark.full)])
def test_of_a_run_folder_the_newest_whole_checkpoint_is_taken(pool, tmp_path, name):
    """Whether its shards are damaged, which only the ranks together find, or what is read before they meet."""
    write_corpus(tmp_path / "corpus")
    source = tmp_path / "run" / "checkpoints"
    assert pool.run(train, 2, settings(tmp_path, {"tp": 2}, train={"steps": 6}, checkpoint={"every": 2})) == [0, 0]
    damage(source / "step-00000006" / name)
    values = started(tmp_path, {"pp": 2}, tmp_path / "run", train={"steps": 1}, run={"dir": str(tmp_path / "new")})
    check_start(resolve(config_from(values), 2))
    assert pool.run(train, 2, values) == [0, 0]
    log = (tmp_path / "new" / "logs" / "rank-0.log").read_text()
    skipped, taken = (next(line for line in log.splitlines() if word in line) for word in ("skipped", "taken from"))
    assert f"{source / 'step-00000006'} is damaged: {name} has" in skipped and "step-00000004, at step 0" in taken
    for step in (2, 4):
        damage(source / f"step-0000000{step}" / name)
    values["run"]["dir"] = str(tmp_path / "newer")
    if name == "config.yaml":
        with pytest.raises(ConfigError, match="checkpoint.init_from=.*none of 3 checkpoints is whole"):
            check_start(resolve(config_from(values), 2))
    else:
        assert pool.run(train, 2, values) == [1, 1]
        assert "none of 3 checkpoints is whole" in (tmp_path / "newer" / "status.json").read_text()


def damage(path: Path) -> None:
    """Another byte in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_starting_point_that_cannot_be_read_is_refused_at_start(pool, tmp_path):
    write_corpus(tmp_path / "corpus")
    assert pool.run(train, 1, settings(tmp_path, {}, train={"steps": 1})) == [0]
    source = tmp_path / "run" / "checkpoints" / "step-00000001"
    config = resolve(config_from(started(tmp_path, {}, source, run={"dir": str(tmp_path / "new")})), 1)
    for text in ("[]", "{", None):
        (source / "state.json").unlink() if text is None else (source / "state.json").write_text(text)
        with pytest.raises(ConfigError, match="checkpoint.init_from=.*state.json"):
            check_start(config)


def test_its_own_checkpoint_comes_before_the_starting_point(pool, tmp_path):
    save_model("llama", tmp_path / "hf")
    write_corpus(tmp_path / "corpus")
    values = started(tmp_path, {"tp": 2}, tmp_path / "hf", train={"steps": 4})
    assert pool.run(train, 2, values) == [0, 0]
    shutil.rmtree(tmp_path / "hf")
    check_start(resolve(config_from(values), 2))
    values["train"]["steps"] = 6
    assert pool.run(train, 2, values) == [0, 0]
    assert sorted(losses(tmp_path)) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("change", "words"), [
    ({"checkpoint.init_optimizer": True}, "a Hugging Face folder, which holds no optimizer"),
    ({"checkpoint.init_from": "nowhere"}, "checkpoint.init_from=nowhere: nowhere is neither"),
    ({"model.norm_eps": 1e-3}, "model.norm_eps is 1e-06 there, 0.001 here; set model.preset="),
    ({"model.num_key_value_heads": 4}, "model.num_key_value_heads is 2 there, 4 here"),
    ({"model.vocab_size": 64}, "model.vocab_size is 67 there, 64 here"),
    ({"model.tie_embeddings": True}, "model.tie_embeddings is false there, true here"),
])
def test_a_starting_point_that_does_not_fit_is_refused_at_start(tmp_path, change, words):
    save_model("llama", tmp_path / "hf", torch.float32)
    config = resolve(config_from(started(tmp_path, {}, tmp_path / "hf")), 1)
    check_start(config)
    check_start(config.replace({"model.rope_theta": 5e5}))    # an extension to longer sequences: said, not refused
    with pytest.raises(ConfigError) as error:
        check_start(config.replace(change))
    assert words in str(error.value)


@pytest.mark.parametrize(("change", "words"), [
    (lambda folder: next(folder.glob("model-00002*")).unlink(), "is not whole: model-00002"),
    (lambda folder: (folder / "model.safetensors.index.json").write_text("{"), "index.json cannot be read as JSON"),
    (lambda folder: [file.rename(folder / "pytorch_model.bin") for file in folder.glob("model*")], "pickles")])
def test_weights_that_are_missing_are_found_before_the_ranks_meet(tmp_path, change, words):
    save_model("llama", tmp_path / "hf", torch.float32, max_shard_size="20KB")
    config = resolve(config_from(started(tmp_path, {}, tmp_path / "hf")), 1)
    check_start(config)
    change(tmp_path / "hf")
    with pytest.raises(ConfigError, match=f"checkpoint.init_from=.*{words}"):
        check_start(config)


def test_a_starting_point_of_another_tokenizer_is_refused_at_start(pool, tmp_path):
    """The same number of ids, and other texts behind them."""
    from tokenizers import Tokenizer, models

    from megafour.data.tokenizer import load_tokenizer

    write_corpus(tmp_path / "corpus")
    values = settings(tmp_path, {}, train={"steps": 1}, model={"vocab_size": 257})
    values["data"] = {**values["data"], "tokenizer": {"kind": "bytes"}}
    assert pool.run(train, 1, values) == [0]
    own = load_tokenizer("bytes").hash
    config = resolve(config_from(started(tmp_path, {}, tmp_path / "run")), 1).replace({
        "checkpoint.dir": str(tmp_path / "elsewhere"), "model.vocab_size": 257})
    check_start(config, own)
    check_start(config, "")                                  # a dataset that does not say what made it
    check_start(config, "f" * 64, ["data.tokenizer"])
    with pytest.raises(ConfigError, match=f"another tokenizer .hash {own[:12]}. than .* ffffffffffff.*--allow-change"):
        check_start(config, "f" * 64)
    (store.find(tmp_path / "run") / "state.json").write_text("{")
    with pytest.raises(ConfigError, match="checkpoint.init_from=.*state.json cannot be read"):
        check_start(config, own)
    save_model("llama", tmp_path / "hf", torch.float32)
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a")).save(str(tmp_path / "hf" / "tokenizer.json"))
    theirs = load_tokenizer("huggingface", tmp_path / "hf").hash
    config = resolve(config_from(started(tmp_path, {}, tmp_path / "hf")), 1).replace({
        "checkpoint.dir": str(tmp_path / "elsewhere")})
    check_start(config, theirs)
    with pytest.raises(ConfigError, match="was trained with another tokenizer"):
        check_start(config, own)


def save_again(rank: int, world: int, values: dict[str, Any], source: str, out: str) -> None:
    """Load a checkpoint on a mesh, and save what the mesh holds."""
    config = resolve(config_from(values), world, data=False)
    state = build_state(config, build_mesh(config, torch.device("cpu")), int(config.model.vocab_size))
    group = state.mesh.group("world").pg
    restore_small_state(state, store.load(Path(source), logical_tensors(state), group, cast=True))
    store.save(Path(out), 5, logical_tensors(state), small_state(state, 5, 40, 640, 0),
               {"config.yaml": to_yaml(config)}, group)


@pytest.mark.parametrize("model", [
    *(pytest.param(more, marks=pytest.mark.full) for more in ({}, {"qk_norm": True})),
    {"qkv_bias": True, "tie_embeddings": True}],
                         ids=["llama", "qwen3", "qwen2"])
def test_b13_exports_are_independent_of_the_mesh(pool, tmp_path, model):
    """4 query and 2 K/V heads, saved at t1, t2 and p2t2: byte-equal exports that transformers computes alike."""
    write_corpus(tmp_path / "corpus")
    values = settings(tmp_path, {"tp": 2}, train={"steps": 5}, model=model, data={"seq_length": 32})
    assert pool.run(train, 2, values) == [0, 0]
    trained, exports = store.find(tmp_path / "run"), []
    for name, parallel in (("t1", {}), ("t2", {"tp": 2}), ("p2t2", {"pp": 2, "tp": 2})):
        pool.run(save_again, size(parallel), {**values, "parallel": parallel}, str(trained), str(tmp_path / name))
        to_huggingface(tmp_path / name, tmp_path / f"{name}-hf")
        exports.append({p.name: p.read_bytes() for p in sorted((tmp_path / f"{name}-hf").iterdir())})
    assert exports[0] == exports[1] == exports[2] and "model.safetensors" in exports[0]
    want = logits_of(open_model(tmp_path / "t1-hf"), 64)
    assert deviation_of(our_logits(tmp_path / "t2", vocab=64), want) <= 1e-9
    back = from_huggingface(tmp_path / "p2t2-hf", tmp_path / "back")
    to_huggingface(back, tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == exports[0]["model.safetensors"]
