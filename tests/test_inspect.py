"""What `megafour inspect` says of checkpoints, datasets and configs, and of two of a kind."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megafour.cli import main as cli
from megafour.data.indexed import IndexedWriter
from megafour.inference.convert import from_huggingface
from tests.huggingface import save_model
from tests.training import settings, train, write_corpus

pytest.importorskip("transformers")


@pytest.fixture
def said(capsys, tmp_path, monkeypatch):
    """`said(words...)`: the lines that `megafour inspect` prints in the test's folder."""
    monkeypatch.chdir(tmp_path)

    def inspect(*words: str, code: int = 0) -> list[str]:
        capsys.readouterr()
        assert cli.main(["inspect", *words]) == code
        out, err = capsys.readouterr()
        return (err if code else out).splitlines()

    return inspect


def row(lines: list[str], name: str) -> list[str]:
    return next(line.split() for line in lines if line.startswith(name))


def test_a_checkpoint_of_a_mesh(pool, tmp_path, said):
    """Step, samples, and shape, norm and NaNs of the whole tensors, whatever mesh wrote them."""
    write_corpus(tmp_path / "corpus")
    assert pool.run(train, 2, settings(tmp_path, {"tp": 2}, train={"steps": 2})) == [0, 0]
    lines = said("run")
    assert lines[0] == "checkpoint run/checkpoints/step-00000002"
    assert lines[1].startswith("step 2, consumed samples 16, consumed tokens 256")
    assert any(line.startswith("mesh   tp2") for line in lines)
    assert row(lines, "weights/layers.0.attention.wk.weight")[1:3] == ["16×32", "float64"]
    assert row(lines, "exp_avg_sq/norm.weight")[1] == "32"
    assert re.fullmatch(r"\d+ tensors, [\d,]+ numbers, 0 NaN, 0 infinite", lines[-1])


def test_norms_and_nans(tmp_path, said):
    save_model("llama", tmp_path / "hf", torch.float32)
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.self_attn.q_proj.weight"][3, :2] = torch.tensor([torch.nan, torch.inf])
    tensors["model.norm.weight"][:] = 3.0
    save_file(tensors, path)
    from_huggingface(tmp_path / "hf", tmp_path / "ours")
    for source, first in (("hf", "Hugging Face folder hf (llama)"), ("ours", "checkpoint ours/step-00000000")):
        lines = said(source)
        assert lines[0] == first and lines[-1].endswith("1 NaN, 1 infinite")
        assert row(lines, "weights/norm.weight")[1:] == ["32", "float32", f"{3 * 32 ** 0.5:.6g}", "0"]
        assert row(lines, "weights/layers.1.attention.wq.weight")[-3:] == ["1,", "1", "infinite"]
    shard = next((tmp_path / "ours" / "step-00000000").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert said("ours", code=1)[0].startswith("error: ours/step-00000000 is damaged: ")


def test_of_a_run_the_newest_whole_checkpoint_is_shown_and_a_damaged_one_is_named(pool, tmp_path, capsys, monkeypatch):
    """As resuming does; one that is named itself is refused."""
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "corpus")
    assert pool.run(train, 1, settings(tmp_path, {}, train={"steps": 4}, checkpoint={"every": 2})) == [0]
    newest = tmp_path / "run" / "checkpoints" / "step-00000004"
    shard = next(newest.glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    for damaged in (bytes(content), bytes(content[:-1])):
        shard.write_bytes(damaged)
        for words in (["run"], ["run", "run"]):
            assert cli.main(["inspect", *words]) == 0
            out, err = capsys.readouterr()
            assert "step-00000002" in out and err.startswith("skipped: run/checkpoints/step-00000004 is damaged: ")
        assert cli.main(["inspect", str(newest)]) == 1
        assert capsys.readouterr().err.startswith(f"error: {newest} is damaged: ")


def test_two_checkpoints(tmp_path, said):
    """Equal but for one tensor, which is named with its distance; a type is a difference as well."""
    save_model("smollm", tmp_path / "a", torch.float32)
    from_huggingface(tmp_path / "a", tmp_path / "ours")
    assert said("a", "ours")[-1].endswith("tensors are equal, 0 differ")
    save_model("smollm", tmp_path / "b", torch.float32)
    path = tmp_path / "b" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] += 0.5
    tensors["model.norm.weight"] = tensors["model.norm.weight"].double()
    save_file(tensors, path)
    lines = said("ours", "b")
    up = next(line for line in lines if line.startswith("weights/layers.0.mlp.up.weight: max |a - b| 0.5, "))
    assert 0 < float(up.split()[-1]) < 1
    assert any(x.startswith("weights/norm.weight: max |a - b| 0,") and x.endswith("float32 -> float64") for x in lines)
    assert lines[-1].endswith("2 differ")
    save_model("gpt2", tmp_path / "c", torch.float32)
    lines = said("a", "c")
    assert "weights/layers.0.mlp.gate.weight: only in the first" in lines
    assert "model.norm: rmsnorm -> layernorm" in lines


def test_datasets(tmp_path, said):
    documents = [[104, 105], [], list(range(65, 91)) * 4, [256]]
    for name, changed in (("a", 0), ("b", 1)):
        with IndexedWriter(tmp_path / name, 257) as writer:
            for index, tokens in enumerate(documents):
                tokens = list(tokens)
                if changed and index == 2:
                    tokens[7] = 33
                writer.add(np.array(tokens, dtype=np.int64))
    lines = said("a", "--tokenizer", "bytes", "--document", "2")
    for name, value in (("documents", "4"), ("tokens", "107"), ("empty documents", "1"),
                        ("longest", "document 2, 104 tokens"), ("type", "uint16")):
        assert re.search(rf"^{name} +{value}$", "\n".join(lines), re.M), name
    assert lines[-2] == "document 2 begins, 64 tokens and 40 more:" and lines[-1].startswith("'ABCDEFG")
    assert "104 105" in said("a.bin")
    assert said("a", "b")[-1] == "the first document that differs is 2, from its token 7 on"
    assert said("a", "a")[-1] == "all documents are equal"
    assert said("a", "--document", "9", code=1) == ["error: a has 4 documents, numbered from 0; there is no 9"]


def test_configs_and_what_is_neither(tmp_path, said):
    (tmp_path / "a.yaml").write_text("parallel: {tp: 2}\nmodel: {rope_scaling: {type: linear, factor: 2.0}}\n")
    (tmp_path / "b.yaml").write_text("parallel: {tp: 4}\ntrain: {steps: 7}\n")
    lines = said("a.yaml")
    assert any(line.startswith("mesh   tp2") for line in lines) and "parallel.tp: 1 -> 2" in lines
    assert "model.rope_scaling.factor: null -> 2.0" in lines and not any("rope_scaling: " in line for line in lines)
    assert said("a.yaml", "b.yaml")[1:] == [
        "model.rope_scaling.type: linear -> null", "model.rope_scaling.factor: 2.0 -> null", "parallel.tp: 2 -> 4",
        "train.steps: 200 -> 7"]
    assert said("a.yaml", "a.yaml")[-1] == "no key differs"
    assert "is neither a checkpoint" in said("nothing", code=2)[0]
    save_model("llama", tmp_path / "hf", torch.float32)
    assert "only two of a kind" in said("a.yaml", "hf", code=2)[0]
