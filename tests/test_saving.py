"""Saving while training goes on: the snapshot is of its step, saves queue, and one that fails ends the run."""

import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from megafour.checkpoint import store
from megafour.checkpoint.checksum import SummedFiles
from megafour.checkpoint.tensors import LogicalTensor
from tests import training
from tests.training import losses, settings, write_corpus

FULL = {"dp": 2, "pp": 2, "tp": 2, "zero_stage": 1}


def train_writing(rank, world, values, delay=0.0, broken=(), full_at=None):
    """Train, with shards that take `delay` seconds to open; on the ranks `broken`, from save `full_at`, the disk is
    full. Returns the exit code, and the seconds."""
    real, opened, began = SummedFiles.create_stream, [], time.monotonic()

    def slow(self, path, mode):
        if "w" in mode and str(path).endswith(".distcp"):
            opened.append(path)
            time.sleep(delay)
            if rank in broken and len(opened) >= full_at:
                raise OSError(28, "No space left on device")
        return real(self, path, mode)

    with mock.patch.object(SummedFiles, "create_stream", slow):
        return training.train(rank, world, values), time.monotonic() - began


def content(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    held, values = [], {}
    for name, (shape, dtype) in store.stored_tensors(path).items():
        values[name] = torch.zeros(shape, dtype=dtype)
        held.append(LogicalTensor(name, shape, dtype, [((0,) * len(shape), shape, values[name])]))
    store.load(path, held, None)
    return values


@pytest.mark.parametrize("parallel", [{"dp": 1}, FULL])
def test_a_snapshot_is_of_its_step_whatever_comes_after(pool, tmp_path, parallel):
    world, seen = 8 if parallel is FULL else 1, []
    for name, asynchronous in (("at-once", False), ("behind", True)):
        place = tmp_path / name
        place.mkdir()
        write_corpus(place / "corpus")
        values = settings(place, parallel, train={"steps": 6},
                          checkpoint={"every": 2, "keep": 9, "asynchronous": asynchronous})
        delay = 0.3 if asynchronous else 0.0      # longer than two steps: training is well past the snapshot
        assert {code for code, _ in pool.run(train_writing, world, values, delay)} == {0}
        saved = place / "run" / "checkpoints"
        assert store.list_steps(saved) == [2, 4, 6] and not list(saved.glob("*.*"))
        seen.append((losses(place), [content(store.step_path(saved, step)) for step in (2, 4, 6)]))
    (plain, stored), (behind, snapshots) = seen
    assert plain == behind
    for one, other in zip(stored, snapshots, strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    log = (tmp_path / "behind" / "run" / "logs" / "rank-0.log").read_text()
    assert log.count("in the background, training stood still for") == 3


@pytest.mark.parametrize(("every", "full_at", "kept"), [(0, 1, []), (2, 2, [2])])
def test_a_background_save_that_fails_ends_the_run_on_every_rank(pool, tmp_path, every, full_at, kept):
    """For the only (last) save, and for one in the middle; the older one stays."""
    write_corpus(tmp_path / "corpus")
    values = settings(tmp_path, {"dp": 2}, train={"steps": 40 if every else 3},
                      checkpoint={"every": every, "asynchronous": True})
    assert [code for code, _ in pool.run(train_writing, 2, values, 0.0, [1], full_at)] == [1, 1]
    saved = tmp_path / "run" / "checkpoints"
    assert store.list_steps(saved) == kept
    assert len(losses(tmp_path)) <= (6 if every else 3)     # it ends soon, not at the run's end only
    for rank in (0, 1):
        log = (tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text()
        assert "on rank 1: OSError: [Errno 28] No space left on device" in log
    status = (tmp_path / "run" / "status.json").read_text()
    assert '"failed"' in status and "No space left" in status
