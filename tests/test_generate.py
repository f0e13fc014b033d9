"""`megafour generate`: the same text from the checkpoint of any mesh, and wrong arguments in one line."""

import shutil
from pathlib import Path

import pytest
import torch

from megafour.cli.main import main
from megafour.inference.generate import generate, next_token_logits
from megafour.inference.load import load_model
from tests import training
from tests.training import MODEL, settings, write_corpus

MESHES = [{"dp": 1}, {"pp": 2, "tp": 2}, {"dp": 2, "cp": 2, "zero_stage": 1}]


@pytest.fixture(scope="module")
def runs(pool, tmp_path_factory) -> list[Path]:
    """The folder of one short run for each mesh, all of the same model."""
    folders = []
    for mesh in MESHES:
        folder = tmp_path_factory.mktemp("run")
        write_corpus(folder / "corpus")
        world = mesh.get("dp", 1) * mesh.get("pp", 1) * mesh.get("tp", 1) * mesh.get("cp", 1)
        values = settings(folder, mesh, model={**MODEL, "vocab_size": 257}, train={"steps": 3})
        values["data"] = {**values["data"], "tokenizer": {"kind": "bytes"}}
        assert set(pool.run(training.train, world, values)) == {0}
        folders.append(folder / "run")
    return folders


def test_every_mesh_leaves_the_same_model(runs) -> None:
    prompt = torch.tensor([5, 17, 3, 60])
    logits, texts = [], []
    for path in (*runs, runs[0] / "checkpoints" / "step-00000003"):
        stage, tokenizer, _ = load_model(path, precision="fp64")
        assert tokenizer.kind == "bytes"
        logits.append(next_token_logits(stage, prompt))
        texts.append(list(generate(stage, prompt.tolist() * 9, 5, temperature=0)))    # longer than data.seq_length
    for other, text in zip(logits[1:], texts[1:], strict=True):
        assert torch.allclose(other, logits[0], rtol=1e-9, atol=1e-12) and text == texts[0]
    assert logits[0].shape == (257,) and logits[0].std() > 0


def test_sampling_follows_its_options(runs) -> None:
    stage = load_model(runs[0], precision="fp64")[0]
    best = int(next_token_logits(stage, torch.tensor([1, 2])).argmax())
    assert next(generate(stage, [1, 2], 1, top_k=1, temperature=3.0)) == best
    samples = [list(generate(stage, [1, 2], 8, seed=seed)) for seed in (1, 1, 2)]
    assert samples[0] == samples[1] != samples[2]
    assert list(generate(stage, [1, 2], 8, temperature=0, stop=best)) == []


def test_the_verb(runs, capsys) -> None:
    assert main(["generate", "--checkpoint", str(runs[1]), "--prompt", "ab", "--max-tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("ab")


def test_it_is_for_one_process(runs, capsys, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["generate", "--checkpoint", str(runs[1]), "--prompt", "ab"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: generate runs on one process, and was launched on 2; ") and not captured.out


@pytest.mark.parametrize("name", ["__0_0.distcp", "config.yaml"])
@pytest.mark.parametrize("verb", ["generate", "evaluate"])
def test_a_damaged_newest_checkpoint_is_skipped_in_a_run_folder_only(runs, tmp_path, capsys, verb, name) -> None:
    """One bit of a shard, found by its checksum, or of the config, without which nothing is known of the rest."""
    (tmp_path / "text").write_text("some text")
    more = ["--prompt", "ab", "--max-tokens", "1"] if verb == "generate" else ["--text", str(tmp_path / "text")]
    shutil.copytree(runs[0], tmp_path / "run")
    old, new = (tmp_path / "run" / "checkpoints" / f"step-0000000{step}" for step in (3, 4))
    shutil.copytree(old, new)
    content = bytearray((new / name).read_bytes())
    content[len(content) // 2] ^= 1
    (new / name).write_bytes(content)
    assert main([verb, "--checkpoint", str(tmp_path / "run"), *more]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith(f"skipped: {new} is damaged: {name} has ") and captured.out
    assert main([verb, "--checkpoint", str(old), *more]) == 0
    assert capsys.readouterr().out == captured.out
    if name != "config.yaml":
        assert main([verb, "--checkpoint", str(new), *more]) == 1
        assert f"error: {new} is damaged" in capsys.readouterr().err
    (old / name).unlink()
    assert main([verb, "--checkpoint", str(tmp_path / "run"), *more]) == 1
    assert ("error: none of " if name == "config.yaml" else "error: ") in capsys.readouterr().err


def test_a_damaged_checkpoint_is_not_exported(runs, tmp_path, capsys) -> None:
    """An export has no checksums: what goes into it is checked, byte for byte."""
    shutil.copytree(runs[0], tmp_path / "run")
    old, new = (tmp_path / "run" / "checkpoints" / f"step-0000000{step}" for step in (3, 4))
    shutil.copytree(old, new)
    for checkpoint, more in ((new, "skipped: "), (old, "error: none of ")):
        content = bytearray((checkpoint / "__0_0.distcp").read_bytes())
        content[len(content) // 2] ^= 1
        (checkpoint / "__0_0.distcp").write_bytes(content)
        code = main(["convert", "to-hf", str(tmp_path / "run"), str(tmp_path / more[0])])
        assert code == (more != "skipped: ") and more in capsys.readouterr().err
    assert main(["convert", "to-hf", str(new), str(tmp_path / "x")]) == 1
    assert f"error: {new} is damaged" in capsys.readouterr().err and not (tmp_path / "x").exists()


@pytest.mark.parametrize(("arguments", "code"), [
    (["--max-tokens", "0"], 2), (["--temperature", "-1"], 2), (["--temperature", "nan"], 2),
    (["--temperature", "inf"], 2), (["--top-k", "-1"], 2), (["--seed", "-1"], 2), (["--seed", str(2**63)], 2),
    (["--checkpoint", "nowhere"], 1)])
def test_wrong_arguments_are_one_line(runs, capsys, arguments, code) -> None:
    assert main(["generate", "--checkpoint", str(runs[0]), "--prompt", "x", *arguments]) == code
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and arguments[-1] in err
