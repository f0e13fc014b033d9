"""Odd Hugging Face folders: tokenizers with more ids than rows, two sets of weights, damaged files."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megafour.checkpoint.errors import CheckpointError
from megafour.checkpoint.safetensors_file import INDEX, ONE_FILE
from megafour.cli import main as cli
from megafour.config.launch import Launch
from megafour.config.notes import say_note
from megafour.data.indexed import IndexedWriter
from megafour.trainer.signals import StopRequest
from tests.huggingface import VOCAB, deviation_of, logits_of, open_model, our_logits, save_model

pytest.importorskip("transformers")
NOTE = f"note: the model has {VOCAB} embedding rows and its tokenizer {VOCAB + 1} ids"


@pytest.fixture
def padded(tmp_path, monkeypatch) -> Path:
    """A folder whose tokenizer has one id more than the embedding has rows, a dataset and texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    save_model("smollm", tmp_path / "hf", torch.float32)
    library = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, "w0"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_tokens(["[extra]"])
    library.save(str(tmp_path / "hf" / "tokenizer.json"))
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps({"eos_token_id": 5, "pad_token_id": VOCAB}))
    monkeypatch.chdir(tmp_path)
    Path("good.txt").write_text("w1 w2 w3 w4")
    Path("bad.txt").write_text("w1 w2 [extra] w4")
    for name, last in (("good", 3), ("bad", VOCAB)):
        with IndexedWriter(name, VOCAB + 1) as writer:
            for _ in range(20):
                writer.add([1, 2, 3, 4, 5, 6, 7, last] * 4)
    return tmp_path


def train_argv(data: str, *more: str) -> list[str]:
    tokenizer = "data.tokenizer={kind: huggingface, path: hf/tokenizer.json}"
    return [f"data.train=[{{path: {data}}}]", tokenizer, "data.seq_length=16", "train.steps=1",
            "train.global_batch_size=2", "train.micro_batch_size=1", "run.device=cpu", "train.precision=fp32",
            f"run.dir=runs-{data}", *more]


def train(argv: list[str]) -> int:
    """The exit code of one process."""
    from megafour.trainer.main import run

    with StopRequest() as stop:
        return run(None, argv, Launch(), stop)


def test_training_tolerates_an_unused_id_beyond_the_rows(padded, capfd):
    start = ["model.preset=hf", "checkpoint.init_from=hf"]
    assert train(train_argv("good", *start)) == 0
    assert capfd.readouterr().err.count(NOTE) == 1
    assert train(train_argv("bad", *start)) == 1
    assert re.search(rf"error: bad.bin: .* token id {VOCAB}, outside the vocabulary of {VOCAB}", capfd.readouterr().err)


def test_a_vocabulary_that_no_weights_decide_is_refused_with_a_way_on_that_works(padded, capfd):
    assert train(train_argv("bad", "model.preset=hf")) == 2
    assert "set model.vocab_size=auto" in capfd.readouterr().err
    assert train(train_argv("bad", "model.preset=hf", "model.vocab_size=auto")) == 0


def command(words: list[str]) -> int:
    """One call of megafour, as in a process of its own: what it notes it says anew."""
    say_note.cache_clear()
    return cli.main(words)


@pytest.mark.parametrize("converted", [False, True])
def test_verbs_tolerate_an_unused_id_beyond_the_rows(padded, capsys, converted):
    """Each says it once on standard error, and names the id where a text holds it."""
    source = "hf"
    if converted:
        assert command(["convert", "from-hf", "hf", "ours"]) == 0
        assert capsys.readouterr().err.count(NOTE) == 1
        assert command(["convert", "to-hf", "ours", "back"]) == 0
        assert capsys.readouterr().err.count(NOTE) == 1
        assert torch.equal(logits_of(open_model(Path("back"), torch.float32)),
                           logits_of(open_model(Path("hf"), torch.float32)))
        source = "ours"
    assert command(["evaluate", "--checkpoint", source, "--text", "good.txt", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["tokens"] == 3 and said.err.count(NOTE) == 1
    assert command(["evaluate", "--checkpoint", source, "--text", "bad.txt"]) != 0
    assert f"token id {VOCAB}, outside the vocabulary of {VOCAB}" in capsys.readouterr().err
    assert command(["generate", "--checkpoint", source, "--prompt", "w1 w2", "--max-tokens", "2"]) == 0
    assert capsys.readouterr().err.count(NOTE) == 1
    assert command(["generate", "--checkpoint", source, "--prompt", "w1 [extra]"]) == 2
    assert f"error: --prompt holds '[extra]', token id {VOCAB}" in capsys.readouterr().err


def test_of_one_file_and_an_index_the_file_is_read_as_transformers_does(tmp_path, capsys):
    save_model("smollm", tmp_path / "hf", torch.float64, max_shard_size="20KB")
    shards = {name: tensor for file in (tmp_path / "hf").glob("model-*") for name, tensor in load_file(file).items()}
    save_file({name: tensor * 1.5 for name, tensor in shards.items()}, tmp_path / "hf" / ONE_FILE,
              metadata={"format": "pt"})
    said = f"{ONE_FILE} is read, as transformers does"
    assert deviation_of(our_logits(tmp_path / "hf"), logits_of(open_model(tmp_path / "hf"))) <= 1e-9
    assert capsys.readouterr().err.count(said) == 1
    assert command(["convert", "from-hf", str(tmp_path / "hf"), str(tmp_path / "ours")]) == 0
    assert capsys.readouterr().err.count(said) == 1
    assert deviation_of(our_logits(tmp_path / "ours"), our_logits(tmp_path / "hf")) == 0
    capsys.readouterr()
    assert command(["inspect", str(tmp_path / "hf")]) == 0
    assert capsys.readouterr().out.count(said) == 1


def reshaped(**change: Any):
    def apply(folder: Path) -> None:
        tensors = load_file(folder / ONE_FILE)
        tensors.update({name.replace("__", "."): tensor for name, tensor in change.items()})
        save_file(tensors, folder / ONE_FILE)
    return apply


def index(text: str):
    def apply(folder: Path) -> None:
        (folder / ONE_FILE).rename(folder / "model-1.safetensors")
        (folder / INDEX).write_text(text)
    return apply


DAMAGED = {
    "head of another type": reshaped(lm_head__weight=torch.ones(VOCAB, 32, dtype=torch.bfloat16)),
    "head of whole numbers": reshaped(lm_head__weight=torch.ones(VOCAB, 32, dtype=torch.int8)),
    "head of another shape": reshaped(lm_head__weight=torch.ones(3)),
    "head in fp8": reshaped(lm_head__weight=torch.ones(VOCAB, 32).to(torch.float8_e4m3fn)),
    "scalar norm": reshaped(model__norm__weight=torch.tensor(1.0)),
    "complex norm": reshaped(model__norm__weight=torch.ones(32, dtype=torch.complex64)),
    "empty file": lambda folder: (folder / ONE_FILE).write_bytes(b""),
    "no header": lambda folder: (folder / ONE_FILE).write_bytes(b"\xff" * 64),
    "nested index": index("[" * 100_000),
    "index of a list": index("[]"),
    "index without map": index("{}"),
    "empty map": index('{"weight_map": {}}'),
    "map of numbers": index('{"weight_map": {"a": 5}}'),
    "map of lists": index('{"weight_map": {"a": ["model-1.safetensors"]}}'),
    "map to another folder": index('{"weight_map": {"a": "../model-1.safetensors"}}'),
    "map to an absolute path": index('{"weight_map": {"a": "/tmp/model-1.safetensors"}}'),
    "map to a null byte": index('{"weight_map": {"a": "a\\u0000.safetensors"}}'),
    "map to a missing file": index('{"weight_map": {"a": "model-2.safetensors"}}'),
    "map to a missing tensor": index('{"weight_map": {"a": "model-1.safetensors"}}'),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "hf"
    save_model("smollm", folder, torch.float32)
    return folder


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_folder_is_one_line(sound, tmp_path, capsys, what):
    shutil.copytree(sound, tmp_path / "hf")
    DAMAGED[what](tmp_path / "hf")
    assert command(["convert", "from-hf", str(tmp_path / "hf"), str(tmp_path / "ours")]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and str(tmp_path / "hf") in said
    assert not (tmp_path / "ours").exists()
    with pytest.raises(CheckpointError):
        our_logits(tmp_path / "hf")
