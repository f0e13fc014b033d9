"""train.py: what is refused before any process group exists, in one line and with exit code 2."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megafour.config import errors
from megafour.config.errors import ConfigError
from megafour.config.load import config_from
from megafour.config.rules import resolve, smallest_world
from megafour.kernels.attention_plain import PlainAttention
from megafour.mesh import Launch
from megafour.model.stage import attention_kernel
from megafour.trainer.setup import choose_device
from tests.test_run_folder import fake
from tests.training import settings, write_corpus

CONFIGS = Path(__file__).parent.parent / "configs"


@pytest.fixture(scope="module")
def command():
    """The entry point's `main`."""
    spec = importlib.util.spec_from_file_location("train_command", CONFIGS.parent / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.mark.parametrize(("argv", "words"), [
    (["--tp=3"], "--tp=3"),
    (["--world", "2"], "--world goes with --check"),
    (["--check", "--world", "-3"], "'-3' is not a positive whole number"),
    (["--check", "--world", "0"], "'0' is not a positive whole number"),
    (["--check", "nonsense"], "an override is section.key=value"),
    (["train.steps=x"], "train.steps = x"),
    (["--config", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
])
def test_one_line_and_exit_2(command, capfd, argv, words):
    assert command(argv) == 2
    err = capfd.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and words in err


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("key", ["data.train", "data.valid", "data.tokenizer", "checkpoint.init_from",
                                 "checkpoint.resume", "model.preset", "parallel.pipeline.schedule"])
def test_a_path_in_the_config_that_leads_nowhere_is_exit_2_on_every_rank(command, capfd, tmp_path, monkeypatch, key,
                                                                          rank):
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(errors, "REFUSAL_WAIT", 0.0)
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "corpus")
    nowhere = str(tmp_path / "nowhere")
    value = {"parallel.pipeline.schedule": f"{nowhere}.csv",
             "data.train": f"[{{path: {nowhere}}}]", "data.valid": f"{{held: [{{path: {nowhere}}}]}}",
             "data.tokenizer": f"{{kind: huggingface, path: {nowhere}}}"}.get(key, nowhere)
    assert command(["data.train=[{path: corpus}]", "model.vocab_size=64", "parallel.tp=2", f"{key}={value}"]) == 2
    err = capfd.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and nowhere in err
    assert not Path("runs").exists()


@pytest.mark.parametrize(("name", "ranks"), [("quickstart", 8), ("llama3-70b-128k", 128), ("gpt2-124m", 1)])
def test_check_assumes_the_fewest_ranks_that_the_mesh_takes(command, capfd, name, ranks):
    assert command(["--check", "--config", str(CONFIGS / f"{name}.yaml")]) == 0
    out = capfd.readouterr().out
    assert f"world {ranks} =" in out or ranks == 1
    assert smallest_world(config_from({"parallel": {"dp": 3, "tp": 2}})) == 6
    assert smallest_world(config_from({"parallel": {"zero_size": 8, "tp": 2}})) == 16
    assert smallest_world(config_from({"parallel": {"zero_size": 6, "cp": 4, "pp": 2}})) == 24


@pytest.mark.parametrize(("values", "words"), [
    ({"run": {"device": "cuda"}}, "one GPU per local rank: this machine has 1 GPUs and 2 local ranks"),
    ({"kernels": {"attention": "flash"}}, "kernels.attention=flash needs CUDA"),
])
def test_what_the_machine_lacks_is_refused_at_start(monkeypatch, values, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = resolve(config_from({**values, "data": {"train": [{"path": "a"}]}}), 2)
    with pytest.raises(ConfigError, match=words):
        choose_device(config, Launch(0, 2, 0, 2))


def test_blocks_in_fp32_run_on_a_gpu_where_flash_kernels_take_16_bits_only():
    def backend(fp32_blocks):
        config = config_from({"train": {"precision": "bf16"}, "parallel": {"context": {"fp32_blocks": fp32_blocks}}})
        return attention_kernel(config, "cuda").backend

    assert isinstance(backend(True), PlainAttention) and not isinstance(backend(False), PlainAttention)


FAULTY = """
import sys, unittest.mock
import megafour.trainer.loop as loop
from megafour.data.errors import DataError
from train import main

real = loop.train_step

def train_step(state, batches, step, *rest):
    if step == 2 and state.mesh.rank == 1:
        raise {error}("planted fault")
    return real(state, batches, step, *rest)

with unittest.mock.patch.object(loop, "train_step", train_step):
    code = main(sys.argv[1:])
sys.exit(code)
"""


@pytest.mark.parametrize(("error", "said"), [
    ("RuntimeError", "rank 1 (pp1): failed in step 3: RuntimeError: planted fault (traceback in "),
    pytest.param("DataError", "error: planted fault", marks=pytest.mark.full),
    ("KeyboardInterrupt", "error: interrupted"),
])
def test_the_first_failure_is_shown_once_and_named(tmp_path, error, said):
    """Under torchrun: not the failures of the ranks that lose their peer by it, and no traceback twice."""
    write_corpus(tmp_path / "corpus")
    values = settings(tmp_path, {"pp": 2})
    (tmp_path / "run.yaml").write_text(json.dumps(values))
    (tmp_path / "faulty.py").write_text(FAULTY.replace("{error}", error))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               str(tmp_path / "faulty.py"), "--config", str(tmp_path / "run.yaml")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300,
                           env={**os.environ, "PYTHONPATH": str(CONFIGS.parent)})
    assert ended.returncode == 1
    assert ended.stderr.count(said) == 1
    assert ended.stderr.count("in train_step") == (1 if error == "RuntimeError" else 0)     # torchrun's own summary
    assert "[rank" not in ended.stderr and "rank 0 (pp0): failed" not in ended.stderr
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "failed" and status["step"] == 2
    assert ("interrupted" if error == "KeyboardInterrupt" else "planted fault") in status["reason"]


@pytest.mark.parametrize(("words", "said"), [
    (["model.vocab_size=100"], "error: model.vocab_size=100 is less than the tokenizer's 257 token ids"),
    (["data.train=[{path: damaged}]"], "error: damaged.idx is no Megatron index"),
    (["data.train=[{path: corpus}]", "data.seq_length=8192"], "tokens in 40 documents are fewer than one sample"),
    (["data.train=[{path: corpus}, {path: other}]"], "error: other.json: made with another tokenizer"),
    (["checkpoint.resume=3", "checkpoint.dir=saved"], "error: checkpoint.resume=3: saved has no whole checkpoint"),
    (["checkpoint.init_from=saved"], "error: checkpoint.init_from=saved: saved is neither a whole checkpoint")])
def test_check_refuses_what_a_start_would_refuse_of_the_files_that_are_there(command, capfd, tmp_path, monkeypatch,
                                                                             words, said):
    monkeypatch.chdir(tmp_path)
    for name in ("corpus", "other"):
        write_corpus(tmp_path / name)
    (tmp_path / "other.json").write_text(
        '{"tokenizer": {"kind": "bytes", "hash": "0", "vocab_size": 257, "eod_id": 1}}')
    for name in ("damaged.idx", "damaged.bin"):
        (tmp_path / name).write_bytes(b"no index at all, but of a length that would hold one")
    (tmp_path / "saved").mkdir()
    whole = ["data.tokenizer={kind: bytes}", "data.train=[{path: corpus}]", "data.seq_length=16"]
    assert command(["--check", *whole]) == 0
    assert "not checked" not in capfd.readouterr().out
    assert command(["--check", *whole, *words]) in (1, 2)
    err = capfd.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and said in err
    assert command(["--check", *whole, "data.train=[{path: corpus}, {path: absent}]",
                    "checkpoint.init_from=absent"]) == 0
    out = capfd.readouterr().out
    assert "note: not checked: absent.idx does not exist here" in out
    assert "note: not checked: checkpoint.init_from=absent does not exist here" in out


@pytest.mark.parametrize(("resume", "said"), [
    ("7", "checkpoint.resume=7: runs/default/checkpoints has no whole checkpoint of that step"),
    ("never", "checkpoint.resume=never, but runs/default/checkpoints holds checkpoints (steps 5)")])
def test_a_resume_that_no_checkpoint_answers_is_exit_2_before_the_folder_is_touched(command, capfd, tmp_path,
                                                                                   monkeypatch, resume, said):
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "corpus")
    fake(tmp_path / "runs" / "default" / "checkpoints", 5)
    words = ["data.train=[{path: corpus}]", "model.vocab_size=64", "data.seq_length=16", "run.name=default"]
    assert command([*words, f"checkpoint.resume={resume}"]) == 2
    err = capfd.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and said in err
    assert [path.name for path in (tmp_path / "runs" / "default").iterdir()] == ["checkpoints"]


def test_a_start_that_the_saved_run_does_not_fit_is_refused_and_keeps_its_step(command, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "corpus")
    words = ["data.tokenizer={kind: bytes}", "data.train=[{path: corpus}]", "data.seq_length=16", "train.steps=2",
             "train.global_batch_size=2", "train.precision=fp32", "model.num_layers=1", "model.hidden_size=16",
             "model.num_attention_heads=2", "logging.tensorboard=false", "run.dir=run"]
    assert command(words) == 0
    for start in (["--check"], []):
        assert command([*start, *words, "model.vocab_size=100"]) == 2
        assert "model.vocab_size=100 is less than the tokenizer's 257 token ids" in capfd.readouterr().err
    assert command([*words, "optimizer.name=sgd"]) == 2
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["step"]) == ("failed", 2)
