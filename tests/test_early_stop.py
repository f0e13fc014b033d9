"""A request to stop that comes before the first step: while Python imports, and while ranks wait for each other."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import torch

from megafour.config.load import config_from
from megafour.config.rules import resolve
from megafour.data.dataset import build_datasets
from megafour.data.description import tokenizer_info
from megafour.mesh import Mesh
from megafour.trainer.main import train_on
from megafour.trainer.run_folder import leave_preempted, read_status
from megafour.trainer.setup import build_mesh
from megafour.trainer.signals import StopRequest
from tests.training import Launch, losses, settings, train, write_corpus

ROOT = Path(__file__).resolve().parent.parent

IMPORTS = """
import os, signal, sys

class Importing:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            os.kill(os.getpid(), signal.{signal})

sys.meta_path.insert(0, Importing())
from train import main
sys.exit(main())
"""


def interrupted(folder: Path, name: str, env: dict[str, str]) -> subprocess.CompletedProcess:
    (folder / "run.yaml").write_text(json.dumps(settings(folder, {})))
    (folder / "imports.py").write_text(IMPORTS.replace("{signal}", name))
    return subprocess.run([sys.executable, str(folder / "imports.py"), "--config", str(folder / "run.yaml"),
                           "parallel.dp=auto", "train.steps=3"], capture_output=True, text=True, timeout=300,
                          env={**os.environ, "PYTHONPATH": str(ROOT), **env})


def test_a_signal_while_python_imports_ends_the_run_preempted(tmp_path):
    write_corpus(tmp_path / "corpus")
    ended = interrupted(tmp_path, "SIGTERM", {})
    assert ended.returncode == 0, ended.stderr
    status = read_status(tmp_path / "run")
    assert (status["state"], status["step"], status["reason"]) == ("preempted", 0, "SIGTERM")
    assert "preempted by SIGTERM before the first step" in ended.stdout
    assert not (tmp_path / "run" / "lock").exists() and not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_signal_while_ranks_are_waited_for_ends_the_run_preempted(tmp_path):
    write_corpus(tmp_path / "corpus")
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    ended = interrupted(tmp_path, "SIGUSR1", {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost",
                                              "MASTER_PORT": str(port)})
    assert ended.returncode == 0 and "error" not in ended.stderr, ended.stderr
    status = read_status(tmp_path / "run")
    assert (status["state"], status["reason"]) == ("preempted", "SIGUSR1, before all ranks had come")


def heard(rank: int, world: int, values: dict) -> tuple[int, bool]:
    """Train where the last rank has heard a signal before; also: whether signals are ignored afterwards."""
    config = resolve(config_from(values), world)
    datasets = build_datasets(config, tokenizer_info(config))
    stop = StopRequest().listen()
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGTERM)
    code = train_on(build_mesh(config, torch.device("cpu")), config, Launch(rank, world, rank, world), None, datasets,
                    listening=stop)
    os.kill(os.getpid(), signal.SIGTERM)        # the run has said how it ended: nothing ends it otherwise any more
    ignored = signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    stop.restore()
    return code, ignored


def test_a_signal_on_one_rank_before_the_first_step_is_everyones(pool, tmp_path):
    write_corpus(tmp_path / "corpus")
    values = settings(tmp_path, {"dp": 2}, train={"steps": 9})
    assert pool.run(train, 2, {**values, "train": {**values["train"], "steps": 4}}) == [0, 0]
    assert pool.run(heard, 2, values) == [(0, True)] * 2
    status = read_status(tmp_path / "run")
    assert (status["state"], status["step"], status["reason"]) == ("preempted", 4, "a signal on another rank")
    assert pool.run(train, 2, values) == [0, 0] and max(losses(tmp_path)) == 9


def test_the_status_of_a_folder_that_another_run_holds_is_left_alone(tmp_path):
    write_corpus(tmp_path / "corpus")
    config = resolve(config_from(settings(tmp_path, {})), 1)
    from megafour.trainer.run_folder import open_run_folder

    folder = open_run_folder(config, Mesh.single().group("world").pg)
    leave_preempted(tmp_path / "run", "SIGTERM")
    assert read_status(tmp_path / "run")["state"] == "running"
    folder.close()
    leave_preempted(tmp_path / "run", "SIGTERM")
    assert read_status(tmp_path / "run")["state"] == "preempted"
