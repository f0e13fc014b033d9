"""A slow rank is named, by the time that it does not wait; ranks that are level are not."""

import os
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from megafour.comm.waits import Wait, Waits
from megafour.model import decoder
from megafour.trainer import loop
from megafour.trainer.slow import slow_lines
from tests import training
from tests.training import settings, write_corpus


def slowed(rank, world, values, slow, where):
    """Train; the rank `slow` sleeps in each step: in the passes of the model, or where data are read."""
    owner, name = {"data": (loop.Run, "_on_device"), "model": (decoder.Block, "forward")}[where]
    real = getattr(owner, name)

    def sleeping(*args, **named):
        time.sleep((1.2 if where == "data" else 0.8) if rank == slow else 0.2)    # the others' noise is small beside it
        return real(*args, **named)

    # A busy machine makes any rank half as slow again; no load makes one six times as slow.
    with mock.patch.object(owner, name, sleeping), mock.patch("megafour.trainer.slow.SHARE", 1.0):
        return training.train(rank, world, values)


@pytest.mark.parametrize(("parallel", "world", "slow", "where", "name"), [
    ({"dp": 2}, 2, 1, "data", "rank 1 (dp1)"),
    pytest.param({"tp": 2}, 2, 0, "data", "rank 0 (tp0)", marks=pytest.mark.full),
    ({"dp": 2, "pp": 2, "zero_stage": 1}, 4, 3, "model", "rank 3 (dp1-pp1)"),
    pytest.param({"pp": 2}, 2, 1, "data", "rank 1 (pp1)", marks=pytest.mark.full)])
def test_a_slow_rank_is_named_and_no_other(pool, tmp_path, parallel, world, slow, where, name):
    write_corpus(tmp_path / "corpus")
    values = settings(tmp_path, parallel, train={"steps": 4, "micro_batch_size": 4},
                      logging={"slow_ranks": 3, "tensorboard": False})
    assert pool.run(slowed, world, values, slow, where) == [0] * world
    log = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    lines = [line.partition("slow: ")[2] for line in log.splitlines() if "slow: " in line]
    assert [line.startswith(f"{name}: ") for line in lines] == [True], log
    assert " s of compute a step, median of " in lines[0] and lines[0].endswith("(over 3 steps)")


def without_a_core(rank, world, values):
    """Train; the last rank takes a second more per step, for which the scheduler says that it waited for a core.

    Every step takes half a second, so that the noise of a busy machine does not double it.
    """
    real, waited = loop.Run._on_device, [0.0]

    def waiting(run, batches):
        time.sleep(0.5)
        if rank == world - 1:
            time.sleep(1.0)
            waited[0] += 1.0
        return real(run, batches)

    with mock.patch.object(loop.Run, "_on_device", waiting), mock.patch("megafour.trainer.slow.SHARE", 1.0), \
            mock.patch("megafour.trainer.slow.CoreWait.__call__", lambda self: waited[0]):
        return training.train(rank, world, values)


def crowded(rank, world, values):
    """Train; the last rank shares its core with seven others that want it all the time."""
    cores, others = os.sched_getaffinity(0), []
    if rank == world - 1:
        os.sched_setaffinity(0, [max(cores)])
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(7)]
    try:
        with mock.patch.object(loop.Run, "_on_device", busy), mock.patch("megafour.trainer.slow.SHARE", 0.5):
            return training.train(rank, world, values)
    finally:
        os.sched_setaffinity(0, cores)
        for other in others:
            other.kill()
            other.wait()


def busy(run, batches):
    """A fifth of a second of computing."""
    end = time.thread_time() + 0.2
    while time.thread_time() < end:
        pass
    return batches


@pytest.mark.parametrize("crowd", [without_a_core, pytest.param(crowded, marks=[pytest.mark.full, pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="Linux's scheduler says how long a thread waited")])])
def test_a_rank_that_waits_for_a_core_is_not_slow(pool, tmp_path, crowd):
    """It takes several times as long as the other one, and computes as much."""
    write_corpus(tmp_path / "corpus")
    values = settings(tmp_path, {"dp": 2}, train={"steps": 3, "micro_batch_size": 4},
                      logging={"slow_ranks": 2, "tensorboard": False})
    assert pool.run(crowd, 2, values) == [0, 0]
    log = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert "slow: " not in log


def test_a_wait_for_a_core_within_a_wait_for_a_rank_counts_once():
    waits, core = Waits(), iter([0.0, 3.0, 3.0, 5.0])
    waits.without_core = lambda: next(core)
    for _ in range(2):
        with Wait(waits, "all_reduce", "tp", (0, 1)), Wait(waits, "all_reduce", "tp", (0, 1)):
            pass
    assert -5.0 <= waits.take() < -4.0


def test_who_is_slow():
    four = [("rank 0 (dp0-pp0)", 0), ("rank 1 (dp1-pp0)", 0), ("rank 2 (dp0-pp1)", 1), ("rank 3 (dp1-pp1)", 1)]
    assert slow_lines([1.0, 1.1, 2.0, 2.3], four, 100) == []        # stages are not compared
    assert slow_lines([1.0, 1.0, 2.0, 2.5], four, 100) == [
        "slow: rank 3 (dp1-pp1): 2.5 s of compute a step, median of its stage 2 s (over 100 steps)"]
    alone = [(f"rank {r} (pp{r})", r) for r in range(4)]
    assert slow_lines([1.0, 1.0, 1.0, 1.9], alone, 100) == []
    assert slow_lines([1.0, 1.0, 1.0, 2.1], alone, 100)[0].startswith("slow: rank 3 (pp3): 2.1 s")
    equal = [(f"rank {r} (tp{r})", 0) for r in range(4)]
    assert [line[6:12] for line in slow_lines([1.0, 1.42, 1.0, 1.5], equal, 100)] == ["rank 3", "rank 1"]
    assert "median of all ranks 1 s" in slow_lines([1.0, 1.0, 1.0, 1.5], equal, 100)[0]
    assert slow_lines([1.0, 1.19, 0.9, 1.0], equal, 100) == []
    assert slow_lines([1.0, 1.0, 1.0, 1.5], equal, 100, [0.0, 0.0, 0.0, 0.6]) == []    # put off for longer than that
    assert len(slow_lines([1.0, 1.0, 1.0, 1.5], equal, 100, [0.6, 0.6, 0.6, 0.4])) == 1
    assert slow_lines([0.01, 0.019, 0.01, 0.01], equal, 100) == []     # 9 ms: a busy machine's noise
