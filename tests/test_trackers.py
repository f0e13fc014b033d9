"""Weights & Biases that fails or hangs at any call, on every way out of a run: a stand-in of the published module."""

import contextlib
import io
import json
import os
import queue
import signal
import sys
import time
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from megafour.trainer import loop, wandb_process
from megafour.trainer.trackers import close_all
from tests import training
from tests.training import settings, write_corpus

WANDB = '''
"""A stand-in: the signatures of wandb 0.2x; does what calls.json says, and notes each call in calls.txt."""
import atexit, json, os, threading, time
from pathlib import Path

HERE = Path(__file__).parent
PLAN = json.loads((HERE / "plan.json").read_text())

def call(name):
    status = json.loads(Path(PLAN["status"]).read_text())["state"]
    with open(HERE / "calls.txt", "a") as file:
        file.write(f"{name} {os.getpid()} {status}\\n")
    if PLAN["at"] == name and PLAN["error"]:
        raise ConnectionError("no route to host")
    if PLAN["at"] == name:
        time.sleep(3600)

class Run:
    url = "http://here/run"

    def log(self, data, step=None, commit=None):
        call("log")

    def finish(self, exit_code=None, quiet=None):
        call("finish")

def init(entity=None, project=None, dir=None, id=None, name=None, notes=None, tags=None, config=None, resume=None):
    atexit.register(call, "exit")
    if PLAN["at"] == "thread":
        threading.Thread(target=time.sleep, args=(3600,)).start()
    call("init")
    return Run()
'''


def tracked(rank, world, values, place, end, seconds):
    """Train with the stand-in; in the third step the run is left by `end`."""
    real, sys.path[0:0] = loop.train_step, [place]
    called = Path(place, "calls.txt")

    def step(state, batches, number, *rest):
        while number == 2 and not called.exists():
            time.sleep(0.01)
        if number == 2 and end == "failed":
            raise OSError("broken")
        if number == 2 and end == "preempted":
            os.kill(os.getpid(), signal.SIGTERM)
        if number == 2 and end == "interrupted":
            raise KeyboardInterrupt
        return real(state, batches, number, *rest)

    with mock.patch.object(loop, "train_step", step), contextlib.suppress(OSError), \
            mock.patch("megafour.trainer.metrics.close_all", partial(close_all, seconds=seconds)):
        return training.train(rank, world, values)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize(("at", "error", "end"), [
    ("none", False, "finished"), ("init", True, "finished"), ("log", True, "preempted"), ("init", False, "finished"),
    ("log", False, "failed"), ("finish", False, "preempted"), ("exit", False, "interrupted"),
    ("thread", False, "finished")])
def test_a_wandb_that_fails_or_hangs_holds_no_way_out(pool, tmp_path, at, error, end):
    """The last status is written before wandb hears of the end; its hooks and threads end with its own process."""
    place = tmp_path / "place"
    place.mkdir()
    (place / "wandb.py").write_text(WANDB)
    plan = {"at": at, "error": error, "status": str(tmp_path / "run" / "status.json")}
    (place / "plan.json").write_text(json.dumps(plan))
    write_corpus(tmp_path / "corpus")
    values = settings(tmp_path, {}, train={"steps": 4}, logging={"wandb": "project"})
    pool.run(tracked, 1, values, str(place), end, 60 if error or at == "none" else 0.5)
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == (end if end in ("finished", "preempted") else "failed")
    assert not (tmp_path / "run" / "lock").exists()
    calls = [line.split() for line in (place / "calls.txt").read_text().splitlines()]
    assert error or all(state == status["state"] for name, _, state in calls if name in ("finish", "exit"))
    until = time.monotonic() + 60
    while not all(gone(int(pid)) for _, pid, _ in calls):
        assert time.monotonic() < until
        time.sleep(0.05)
    log = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    said = [line.partition("wandb is off: ")[2] for line in log.splitlines() if "wandb is off: " in line]
    if at == "none":
        assert said == [] and [name for name, _, _ in calls] == ["init", *["log"] * 4, "finish", "exit"]
        assert "wandb: http://here/run" in log
    else:
        expected = "RuntimeError: ConnectionError: no route to host (see " if error else "it did not finish within "
        assert len(said) == 1 and said[0].startswith(expected), log


def test_without_wandb_installed_a_run_goes_on(pool, tmp_path):
    write_corpus(tmp_path / "corpus")
    (tmp_path / "wandb.py").write_text("raise ImportError('No module named wandb')")
    (tmp_path / "calls.txt").touch()
    values = settings(tmp_path, {}, train={"steps": 2}, logging={"wandb": "project"})
    assert pool.run(tracked, 1, values, str(tmp_path), "finished", 60) == [0]
    log = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert log.count("wandb is off: RuntimeError: ImportError: No module named wandb") == 1


def test_the_process_of_wandb_ends_where_the_run_is_killed_in_the_middle_of_a_line(monkeypatch):
    """Nothing else would ever end it."""
    ended = []
    monkeypatch.setattr(wandb_process.sys, "stdin", io.StringIO('["log", [1, {"lo'))
    monkeypatch.setattr(wandb_process.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(wandb_process.os, "_exit", ended.append)
    requests = queue.Queue()
    with pytest.raises(json.JSONDecodeError):
        wandb_process._read(requests)
    assert ended == [1] and requests.get_nowait() is None
