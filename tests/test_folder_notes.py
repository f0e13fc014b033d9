"""What is said of a Hugging Face folder: in every verb once, on standard error, also of keys that are not known."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from megafour.cli import main as cli
from megafour.data.indexed import IndexedWriter
from tests.training import losses

transformers = pytest.importorskip("transformers")

ROWS = 300
NOTE = f"note: the model has {ROWS} embedding rows and its tokenizer {ROWS + 1} ids"


@pytest.fixture(scope="module")
def command():
    """The entry point's `main`."""
    spec = importlib.util.spec_from_file_location("train_command", Path(__file__).parent.parent / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """`hf`: a byte-level tokenizer of 300 ids, to which `<extra>` was added, and a model of 300 rows; a dataset."""
    import tokenizers

    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(["the quick brown fox jumps over lazy dogs " * 20], vocab_size=ROWS,
                                  special_tokens=["</s>"])
    missing = ROWS - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<{i}>" for i in range(missing)] + ["<extra>"])
    assert tokenizer.token_to_id("<extra>") == ROWS
    config = transformers.LlamaConfig(vocab_size=ROWS, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                                      num_attention_heads=2, max_position_embeddings=32)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    tokenizer.save(str(tmp_path / "hf" / "tokenizer.json"))
    with IndexedWriter(tmp_path / "clean", ROWS + 1) as writer:
        writer.add([*range(20), ROWS - 1] * 4)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words(*more):
    """Overrides of a run that starts from the folder's model with its tokenizer."""
    return ["run.dir=run", "model.preset=hf", "checkpoint.init_from=hf", "data.train=[{path: clean}]",
            "data.tokenizer={kind: huggingface, path: hf/tokenizer.json}", "data.seq_length=16", "train.steps=2",
            "train.global_batch_size=2", "train.precision=fp32", "logging.tensorboard=false", "run.device=cpu",
            "lr_schedule.warmup_steps=0", *more]


def test_a_run_resumes_without_its_starting_point_although_ids_lie_beyond_its_rows(command, folder, capfd):
    assert command(words()) == 0
    assert NOTE in capfd.readouterr().err
    assert command(words("train.steps=3", "checkpoint.init_from=null", "model.preset=null", "model.vocab_size=300",
                         *shape())) == 0, "its own checkpoint has those rows too"
    assert sorted(losses(folder)) == [1, 2, 3]


def shape():
    """The model's shape without the folder."""
    return ["model.num_layers=1", "model.hidden_size=16", "model.ffn_hidden_size=24", "model.num_attention_heads=2",
            "model.norm_eps=1e-6", "model.max_position_embeddings=32"]


def spoil(folder):
    """Add a key that nobody knows."""
    config = folder / "hf" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "zz_note": 1}))


@pytest.mark.parametrize("argv", [
    ["evaluate", "--checkpoint", "hf", "--data", "clean", "--json"],
    ["generate", "--checkpoint", "hf", "--prompt", "a"], ["convert", "from-hf", "hf", "ours"], ["inspect", "hf"]])
def test_every_verb_names_unknown_keys_once_on_standard_error(folder, capfd, argv):
    spoil(folder)
    assert cli.main(argv) == 0
    out, err = capfd.readouterr()
    assert "zz_note" not in out and len([line for line in err.splitlines() if "zz_note" in line]) == 1, err
    if "--json" in argv:
        json.loads(out)


def test_training_names_unknown_keys_once(command, folder, capfd):
    spoil(folder)
    assert command(words()) == 0
    out, err = capfd.readouterr()
    assert "zz_note" not in out and len([line for line in err.splitlines() if "zz_note" in line]) == 1, err
