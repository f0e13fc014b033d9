"""Faults of processes and disks: kills at any moment, full disks, damaged checkpoints; nothing is lost or trusted."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from megafour.checkpoint import store
from megafour.checkpoint.errors import CheckpointError
from megafour.trainer.run_folder import newest_whole, resume_points
from megafour.trainer.saving import Saver
from tests import training
from tests.test_run_folder import fake
from tests.training import losses, settings, write_corpus

ROOT = Path(__file__).parent.parent


def drill(folder: Path, parallel: dict, world: int, kills: int, steps: int, asynchronous: bool, seed: int = 0) -> dict:
    write_corpus(folder / "corpus")
    values = settings(folder, parallel, train={"steps": steps, "precision": "fp32"},
                      checkpoint={"every": 2, "keep": 2, "asynchronous": asynchronous})
    command = [sys.executable, "-m", "tests.kill_drill", str(folder), str(world), json.dumps(values), str(kills),
               str(seed)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, env={
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout)


@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_run_that_is_killed_at_random_loses_nothing(tmp_path, asynchronous):
    """The losses of every run, killed and resumed, equal the untouched run's bit for bit."""
    found = drill(tmp_path, {"pp": 2}, 2, 3, 12, asynchronous)
    assert found["kills"] == 3 and found["different"] == 0 and found["longest_end"] < 180


@pytest.mark.full
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_that_is_killed_twenty_times_loses_nothing(tmp_path, asynchronous):
    found = drill(tmp_path, {"dp": 2, "pp": 2, "zero_stage": 1}, 4, 20, 20, asynchronous, seed=1)
    assert found["kills"] == 20 and found["different"] == 0 and found["longest_end"] < 180


def test_a_truncated_newest_checkpoint_is_replaced_by_the_one_before(pool, tmp_path):
    """On all ranks alike, on another mesh too; the losses go on as if nothing had happened."""
    write_corpus(tmp_path / "corpus")
    whole = settings(tmp_path, {"dp": 1}, run={"dir": str(tmp_path / "whole" / "run")})
    assert pool.run(training.train, 1, whole) == [0]
    values = settings(tmp_path, {"dp": 2, "zero_stage": 1}, checkpoint={"every": 2}, train={"steps": 12})
    pool.run(training.train, 2, values, 7)
    shard = tmp_path / "run" / "checkpoints" / "step-00000006" / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    second = settings(tmp_path, {"tp": 2}, checkpoint={"every": 2}, train={"steps": 12})
    assert pool.run(training.train, 2, second) == [0, 0]
    for rank in (0, 1):
        log = (tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text()
        assert "skipped the newest checkpoint: " in log and "__1_0.distcp has " in log and "step 4, on mesh tp2" in log
    got, expected = losses(tmp_path), losses(tmp_path / "whole")
    assert got.keys() == expected.keys() and all(abs(got[s] - expected[s]) <= 1e-9 * expected[s] for s in got)


def test_a_damaged_checkpoint_is_skipped_unless_it_was_asked_for_by_name(tmp_path):
    fake(tmp_path, 5, 10, 20)
    (tmp_path / "step-00000010" / "data").write_text("123")
    (tmp_path / "step-00000020" / "manifest.json").write_text("{")
    (tmp_path / "step-00000015").mkdir()
    for resume in ("auto", str(tmp_path)):
        point, notes = newest_whole(resume_points(tmp_path, resume), None)
        assert point.name == "step-00000005"
        assert len(notes) == 3 and "data has 3 bytes instead of 4" in notes[2] and "step-00000020" in notes[0]
        assert "step-00000015 is not a whole checkpoint: it has no manifest.json" in notes[1]
    for resume in (10, str(tmp_path / "step-00000010")):
        with pytest.raises(CheckpointError, match="data has 3 bytes instead of 4; checkpoint.resume=STEP goes on"):
            newest_whole(resume_points(tmp_path, resume), None)
    (tmp_path / "step-00000005" / "data").unlink()
    with pytest.raises(CheckpointError, match="none of 4 checkpoints is whole: .*data is missing; move them away"):
        newest_whole(resume_points(tmp_path, "auto"), None)


@pytest.mark.parametrize(("layers", "words"), [
    (5, "missing in the checkpoint"), (3, "unknown to this model")])
def test_a_run_refuses_a_checkpoint_with_a_layer_more_or_less(pool, tmp_path, layers, words):
    """By name and on every rank, before a step, even when the change of the config was allowed."""
    write_corpus(tmp_path / "corpus")
    assert pool.run(training.train, 2, settings(tmp_path, {"tp": 2}, train={"steps": 2})) == [0, 0]
    values = settings(tmp_path, {"tp": 2}, train={"steps": 4}, model={"num_layers": layers})
    assert pool.run(training.train, 2, values, None, ("model.num_layers",)) == [1, 1]
    reason = json.loads((tmp_path / "run" / "status.json").read_text())["reason"]
    assert words in reason and f"layers.{max(layers, 4) - 1}." in reason
    assert list(losses(tmp_path)) == [1, 2]


def train_with_quota(rank, world, values, allowed, at):
    """Train; from save number `at`, the last rank may write no file larger than `allowed` bytes."""
    real, saves = Saver.save, []

    def save(self, *args):
        saves.append(None)
        if len(saves) >= at and rank == world - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (allowed, resource.RLIM_INFINITY))
        return real(self, *args)

    try:
        with mock.patch.object(Saver, "save", save):
            return training.train(rank, world, values)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_quota_ends_every_rank_and_the_older_checkpoint_still_loads(pool, tmp_path, asynchronous):
    """A limit that the kernel enforces, met by the shard of one rank alone."""
    write_corpus(tmp_path / "corpus")
    parallel = {"dp": 2, "zero_stage": 1}
    values = settings(tmp_path, parallel, train={"steps": 8},
                      checkpoint={"every": 3, "keep": 1, "asynchronous": asynchronous})
    assert pool.run(train_with_quota, 2, values, 20000, 2) == [1, 1]
    assert store.list_steps(tmp_path / "run" / "checkpoints") == [3]
    assert "on rank 1: OSError: [Errno 27] File too large" in (tmp_path / "run" / "status.json").read_text()
    assert pool.run(training.train, 2, values) == [0, 0]
    assert list(losses(tmp_path)) == list(range(1, 9))
    assert store.list_steps(tmp_path / "run" / "checkpoints") == [8]


def unwritable(rank, world, values):
    """Train into a checkpoints folder that is replaced by a file once the run has begun."""
    real = Saver.save

    def save(self, *args):
        if rank == 0:
            shutil.rmtree(self.folder)      # but for the lock it is empty
            self.folder.write_text("")
        return real(self, *args)

    with mock.patch.object(Saver, "save", save):
        return training.train(rank, world, values)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_target_that_cannot_be_written_ends_every_rank(pool, tmp_path, asynchronous):
    write_corpus(tmp_path / "corpus")
    values = settings(tmp_path, {"tp": 2}, train={"steps": 2},
                      checkpoint={"every": 0, "asynchronous": asynchronous})
    assert pool.run(unwritable, 2, values) == [1, 1]
    assert "NotADirectoryError" in (tmp_path / "run" / "status.json").read_text()
