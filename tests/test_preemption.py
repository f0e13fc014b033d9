"""Asked to stop at any time, on any one rank: all agree, save once and end well; torchrun starts a failed run again."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest

from megafour.checkpoint import store
from megafour.trainer import loop, main
from megafour.trainer.run_folder import RunFolder
from megafour.trainer.saving import Saver
from tests import training
from tests.training import losses, settings, write_corpus

ROOT = Path(__file__).parent.parent


def signalled(rank, world, values, where, number):
    """Train; the last rank gets the signal in its third step, second batch of evaluation, or first save."""
    owner, name, call = {"step": (loop, "train_step", 3), "evaluation": (loop, "evaluate_batch", 2),
                         "save": (Saver, "save", 1)}[where]
    real, calls = getattr(owner, name), []

    def asked(*args, **named):
        calls.append(name)
        if rank == world - 1 and len(calls) == call:
            os.kill(os.getpid(), number)
        return real(*args, **named)

    with mock.patch.object(owner, name, asked):
        return training.train(rank, world, values), len(calls)


@pytest.mark.parametrize(("where", "number", "parallel", "asynchronous", "step", "calls"), [
    ("step", signal.SIGTERM, {"pp": 2}, True, 3, 3), ("evaluation", signal.SIGUSR1, {"tp": 2}, False, 2, 2),
    ("save", signal.SIGTERM, {"dp": 2, "zero_stage": 1}, False, 4, 1),
    ("save", signal.SIGUSR1, {"cp": 2}, True, 4, 1)])
def test_a_signal_on_one_rank_at_any_time(pool, tmp_path, where, number, parallel, asynchronous, step, calls):
    write_corpus(tmp_path / "corpus")
    values = settings(tmp_path, parallel, eval={"every": 2 if where == "evaluation" else 0, "batches": 5},
                      data={"valid": {"held": [{"path": str(tmp_path / "corpus")}]}} if where == "evaluation" else {},
                      checkpoint={"every": 4, "asynchronous": asynchronous})
    assert pool.run(signalled, 2, values, where, number) == [(0, calls)] * 2
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["step"]) == ("preempted", step)
    assert store.list_steps(tmp_path / "run" / "checkpoints") == [step] == [max(losses(tmp_path))]


def signalled_outside_a_step(rank, world, values, where):
    """Train; this process gets a SIGTERM in the start, or once a step has failed and before anybody has said why."""
    owner, name = {"start": (main, "open_run_folder"), "failed": (RunFolder, "fail")}[where]
    real = getattr(owner, name)

    def at(*args, **named):
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*args, **named)

    def broken(*args):
        raise OSError("broken")

    with mock.patch.object(owner, name, at):
        if where == "failed":
            with mock.patch.object(loop, "train_step", broken), pytest.raises(OSError, match="broken"):
                return training.train(rank, world, values)
            return 1
        return training.train(rank, world, values)


@pytest.mark.parametrize(("where", "state", "reason"), [
    ("start", "preempted", "SIGTERM"), ("failed", "failed", "rank 0: OSError: broken")])
def test_a_signal_before_the_first_step_and_one_after_a_failure(pool, tmp_path, where, state, reason):
    write_corpus(tmp_path / "corpus")
    values = settings(tmp_path, {}, train={"steps": 4})
    assert pool.run(signalled_outside_a_step, 1, values, where) == [int(state == "failed")]
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == state and status["reason"] == reason
    assert store.list_steps(tmp_path / "run" / "checkpoints") == ([1] if state == "preempted" else [])


def signalled_while_waiting(rank, world, values):
    """Train; the last rank gets the signal where a second save waits for the first, which ends only now."""
    over, calls, write, begin = threading.Event(), [], store.save, Saver.save

    def slow(*args):
        assert over.wait(120)
        return write(*args)

    def asked(*args):
        calls.append(args)
        if len(calls) == 2:
            if rank == world - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            over.set()
        return begin(*args)

    with mock.patch.object(store, "save", slow), mock.patch.object(Saver, "save", asked):
        return training.train(rank, world, values)


def test_a_signal_while_one_save_waits_for_another_does_not_begin_it(pool, tmp_path):
    write_corpus(tmp_path / "corpus")
    values = settings(tmp_path, {"pp": 2}, train={"steps": 9}, checkpoint={"every": 2, "asynchronous": True})
    assert pool.run(signalled_while_waiting, 2, values) == [0] * 2
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "preempted"
    assert (store.list_steps(tmp_path / "run" / "checkpoints"), max(losses(tmp_path))) == ([2], 4)


ONCE = """
import os, signal, sys, unittest.mock
import megafour.trainer.loop as loop
from train import main

real = loop.train_step

def train_step(state, batches, step, *rest):
    if step == {step} and state.mesh.rank == state.mesh.world - 1 and os.environ.get(
            "TORCHELASTIC_RESTART_COUNT", "0") == "0":
        {fault}
    return real(state, batches, step, *rest)

with unittest.mock.patch.object(loop, "train_step", train_step):
    code = main()
sys.exit(code)
"""


def launch(folder: Path, values: dict, fault: str, step: int, *options: str,
           world: int = 2) -> subprocess.CompletedProcess:
    """A run under torchrun on two ranks, or on one without it, whose last rank meets `fault` in that step."""
    (folder / "run.yaml").write_text(json.dumps(values))
    (folder / "faulty.py").write_text(ONCE.replace("{fault}", fault).replace("{step}", str(step)))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options]
    command = [sys.executable, *(torchrun if world > 1 else []), str(folder / "faulty.py"),
               "--config", str(folder / "run.yaml")]
    return subprocess.run(command, capture_output=True, text=True, timeout=600,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.mark.parametrize("fault", [
    pytest.param("os._exit(3)", marks=pytest.mark.full), "os.kill(os.getpid(), signal.SIGKILL)"])
def test_torchrun_starts_a_failed_run_again_where_it_stopped(tmp_path, fault):
    write_corpus(tmp_path / "corpus")
    values = settings(tmp_path, {"pp": 2}, train={"steps": 8}, checkpoint={"every": 3})
    ended = launch(tmp_path, values, fault, 4, "--max-restarts", "2")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert list(losses(tmp_path)) == list(range(1, 9))
    log = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert "step 3, on mesh pp2" in log
    assert re.search(r"rank 1 \(pp1\), pid \d+ on \S+ died .*, so step 5 failed here", log), log
    assert "rank 0 (pp0)" not in ended.stderr.partition("Root Cause")[2]
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "finished"


STORM = ('import subprocess; subprocess.Popen(["sh", "-c", "exec >/dev/null 2>&1; '
         'while kill -TERM $0; do sleep 0.02; done", str(os.getpid())])')


@pytest.mark.parametrize("world", [1, 2])
def test_a_signal_again_and_again_ends_the_run_as_one_does(tmp_path, world):
    """Until the process is gone: an exit by the signal would make torchrun start the run again, to its end."""
    write_corpus(tmp_path / "corpus")
    values = settings(tmp_path, {"pp": world}, train={"steps": 30})
    ended = launch(tmp_path, values, STORM, 4, "--max-restarts", "1", world=world)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["reason"]) == ("preempted", "SIGTERM" if world == 1 else "a signal on another rank")
    assert status["step"] == max(losses(tmp_path)) < 30


def started_again(rank, world, values, run_id, restarts):
    """Train as a rank that torchrun has started for the so-manieth time."""
    os.environ.update(TORCHELASTIC_RUN_ID=run_id, TORCHELASTIC_RESTART_COUNT=str(restarts))
    return signalled(rank, world, values, "step", signal.SIGTERM)


def test_a_rank_that_torchrun_starts_again_after_the_run_was_stopped_does_not_go_on(pool, tmp_path):
    """Whatever fails after the last status: the request to stop was meant for this launch. The next launch goes on."""
    write_corpus(tmp_path / "corpus")
    values = settings(tmp_path, {"dp": 2}, train={"steps": 12})
    assert pool.run(started_again, 2, values, "a", 0) == [(0, 3)] * 2
    before = (tmp_path / "run" / "status.json").read_text()
    assert pool.run(started_again, 2, values, "a", 1) == [(0, 0)] * 2
    assert before == (tmp_path / "run" / "status.json").read_text() and not (tmp_path / "run" / "lock").exists()
    assert "was stopped in this launch, after step 3" in (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert pool.run(started_again, 2, values, "a", 0) == [(0, 3)] * 2       # requeued under the same name
    assert pool.run(started_again, 2, values, "b", 1) == [(0, 3)] * 2
    assert max(losses(tmp_path)) == 9


def test_ranks_whose_torchrun_is_killed_save_and_end(tmp_path):
    """As a bare SIGUSR1 kills it: they would train on unwatched, and hold the folder against the next start."""
    write_corpus(tmp_path / "corpus")
    values = settings(tmp_path, {"pp": 2}, train={"steps": 100000}, checkpoint={"every": 0})
    (tmp_path / "run.yaml").write_text(json.dumps(values))
    job = subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                            str(ROOT / "train.py"), "--config", str(tmp_path / "run.yaml")],
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                           env={**os.environ, "PYTHONPATH": str(ROOT)})
    ranks: list[int] = []
    try:
        wait_until(lambda: len(metric_lines(tmp_path)) >= 2)
        ranks = [int(pid) for pid in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]
        job.send_signal(signal.SIGUSR1)
        job.wait(timeout=60)
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))
    finally:
        for pid in (job.pid, *ranks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert len(ranks) == 2 and status["state"] == "preempted" and "death of torchrun" in status["reason"]
    assert store.list_steps(tmp_path / "run" / "checkpoints") == [status["step"]]


def metric_lines(folder: Path) -> list[str]:
    path = folder / "run" / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def wait_until(there, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < end
        time.sleep(0.05)


SLOW_SAVES = """
import sys, time, unittest.mock
from megafour.checkpoint.checksum import SummedFiles
from train import main

real = SummedFiles.create_stream

def create_stream(self, path, mode):
    if "w" in mode and str(path).endswith(".distcp") and "step-00000002" not in str(path):
        time.sleep({seconds})
    return real(self, path, mode)

with unittest.mock.patch.object(SummedFiles, "create_stream", create_stream):
    code = main(sys.argv[1:])
sys.exit(code)
"""


@pytest.mark.parametrize(("save", "patience", "asynchronous", "state"), [
    (5, 60, True, "preempted"), (90, 2, True, "running"),
    pytest.param(45, 55, False, "preempted", marks=pytest.mark.full),
    pytest.param(45, 55, True, "preempted", marks=pytest.mark.full)])
def test_sigterm_to_the_agent_while_a_save_takes_long(tmp_path, save, patience, asynchronous, state):
    """The agent passes it on, and waits for --shutdown-timeout: longer than a save, or the last whole one is left."""
    write_corpus(tmp_path / "corpus")
    values = settings(tmp_path, {"pp": 2}, train={"steps": 100000},
                      checkpoint={"every": 2, "asynchronous": asynchronous})
    (tmp_path / "run.yaml").write_text(json.dumps(values))
    (tmp_path / "slow.py").write_text(SLOW_SAVES.replace("{seconds}", str(save)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               "--shutdown-timeout", str(patience), str(tmp_path / "slow.py"), "--config", str(tmp_path / "run.yaml")]
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                           env={**os.environ, "PYTHONPATH": str(ROOT)})
    saved = tmp_path / "run" / "checkpoints"
    try:
        end = time.monotonic() + 300
        while not (saved / "step-00000004.tmp").exists():       # the second save has begun
            assert time.monotonic() < end and job.poll() is None
            time.sleep(0.05)
        ranks = [int(pid) for pid in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]
        job.terminate()
        asked = time.time()
        job.wait(timeout=300)
    finally:
        job.kill()
    assert len(ranks) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == state
    steps = store.list_steps(saved)
    if state == "preempted":
        assert steps == [2, 4] and status["step"] == 4 and status["time"] - asked < patience
    else:
        assert steps == [2] and time.time() - asked < patience + 60


RAISES = """
import sys, unittest.mock
import megafour.trainer.loop, megafour.data.loader, megafour.model.decoder, megafour.trainer.saving
from megafour.mesh import Launch
from train import main

owner, name = {owner}, "{name}"
real, calls = getattr(owner, name), []

def planted(*args, **named):
    calls.append(None)
    if len(calls) == 2 and Launch.from_environment().rank == 1:
        raise KeyError("planted fault")
    return real(*args, **named)

with unittest.mock.patch.object(owner, name, planted):
    code = main(sys.argv[1:])
sys.exit(code)
"""


@pytest.mark.parametrize(("owner", "name"), [
    ("megafour.model.decoder.Block", "forward"), ("megafour.data.loader.BatchLoader", "step"),
    pytest.param("megafour.trainer.saving.Saver", "save", marks=pytest.mark.full),
    pytest.param("megafour.trainer.loop", "evaluate_batch", marks=pytest.mark.full)])
def test_an_error_of_one_rank_ends_the_job_and_is_shown(tmp_path, owner, name):
    """In the forward pass, a data worker, a save, an evaluation; the original error, its rank, not zero, soon."""
    write_corpus(tmp_path / "corpus")
    values = settings(tmp_path, {"pp": 2}, checkpoint={"every": 1}, eval={"every": 1},
                      data={"valid": {"held": [{"path": str(tmp_path / "corpus")}]}, "workers": 1})
    (tmp_path / "run.yaml").write_text(json.dumps(values))
    (tmp_path / "faulty.py").write_text(RAISES.replace("{owner}", owner).replace("{name}", name))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               str(tmp_path / "faulty.py"), "--config", str(tmp_path / "run.yaml")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300,
                           env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert ended.returncode == 1
    assert "rank 1 (pp1): failed in step" in ended.stderr and "KeyError: 'planted fault'" in ended.stderr
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "failed" and "planted fault" in status["reason"]
