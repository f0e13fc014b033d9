"""train.py: what is refused before any process group exists, in one line and with exit code 2."""

import importlib.util
from pathlib import Path

import pytest
import torch

from megafour.config.errors import ConfigError
from megafour.config.load import config_from
from megafour.config.rules import resolve, smallest_world
from megafour.mesh import Launch
from megafour.trainer.setup import choose_device

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


@pytest.mark.parametrize(("name", "ranks"), [("quickstart", 8), ("llama3-70b-128k", 128), ("gpt2-124m", 1)])
def test_check_assumes_the_fewest_ranks_that_the_mesh_takes(command, capfd, name, ranks):
    assert command(["--check", "--config", str(CONFIGS / f"{name}.yaml")]) == 0
    out = capfd.readouterr().out
    assert f"world {ranks} =" in out or ranks == 1
    assert smallest_world(config_from({"parallel": {"dp": 3, "tp": 2}})) == 6


@pytest.mark.parametrize(("values", "words"), [
    ({"run": {"device": "cuda"}}, "run.device = cuda: one GPU a rank, and this machine has 1 for 2 local ranks"),
    ({"kernels": {"attention": "flash"}}, "kernels.attention=flash needs CUDA"),
])
def test_what_the_machine_lacks_is_refused_at_start(monkeypatch, values, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = resolve(config_from({**values, "data": {"train": [{"path": "a"}]}}), 2)
    with pytest.raises(ConfigError, match=words):
        choose_device(config, Launch(0, 2, 0, 2))
