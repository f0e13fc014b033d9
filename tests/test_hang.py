"""A rank that stands still: the others end within run.timeout_seconds, with a report of which rank is where."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from megafour.trainer import watch
from megafour.trainer.watch import Place, summary
from tests import training
from tests.training import settings, write_corpus

ROOT = Path(__file__).parent.parent
SCENARIOS = {
    "pp": ({"pp": 2}, 2, 1, "stopped"), "tp": ({"tp": 2}, 2, 0, "stopped"), "cp": ({"cp": 2}, 2, 1, "stopped"),
    "dp-pp": ({"dp": 2, "pp": 2, "zero_stage": 1}, 4, 2, "stopped"), "busy": ({"dp": 2}, 2, 0, "busy"),
    "saving": ({"dp": 2, "zero_stage": 1}, 2, 1, "saving")}
USUAL = ("pp", "busy", "saving")
"""Those that run without `--all`."""


@pytest.fixture(scope="module")
def drilled(request, tmp_path_factory) -> dict[str, tuple[dict, str, str]]:
    """What the drill saw, the reason in status.json and the report, of every scenario."""
    asked = SCENARIOS if request.config.getoption("--all") else USUAL
    folders = {name: tmp_path_factory.mktemp(name) for name in asked}
    given = []
    for name, folder in folders.items():
        parallel, world, victim, how = SCENARIOS[name]
        write_corpus(folder / "corpus")
        values = settings(folder, parallel, checkpoint={"asynchronous": how == "saving", "every": 0},
                          train={"steps": 4 if how == "saving" else 100000})
        values["run"]["timeout_seconds"] = 8
        given.append({"folder": str(folder), "world": world, "values": values, "victim": victim, "how": how})
    ended = subprocess.run(
        [sys.executable, "-m", "tests.hang_drill", json.dumps(given)], cwd=ROOT, capture_output=True, text=True,
        timeout=800, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
                          "TORCH_FR_BUFFER_SIZE": "2000"})
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = {}
    for (name, folder), seen in zip(folders.items(), json.loads(ended.stdout), strict=True):
        status = json.loads((folder / "run" / "status.json").read_text())
        assert status["state"] == "failed" and status["step"] > 0
        report, = (folder / "run" / "logs").glob("hang-*/report.txt")
        found[name] = (seen, status["reason"], report.read_text())
    return found


@pytest.mark.parametrize(("name", "waits"), [
    ("pp", r"(send_recv over pp|all_reduce over (world|embedding)) \(ranks 0, 1\)"),
    pytest.param("tp", r"\w+ over (tp|world) \(ranks 0, 1\)", marks=pytest.mark.full),
    pytest.param("cp", r"\w+ over (ring|dp_cp|world) \(ranks 0, 1\)", marks=pytest.mark.full),
    pytest.param("dp-pp", r"\w+ over (pp|dp|dp_cp|world|embedding) \((ranks 0, 2|ranks 2, 3|ranks 0, 1, 2, 3)\)",
                 marks=pytest.mark.full),
    ("saving", r"\w+ over checkpoint")])
def test_a_stopped_rank_is_named_whatever_the_others_wait_for(drilled, name, waits):
    (found, reason, report), (_, world, victim, _) = drilled[name], SCENARIOS[name]
    assert found["codes"] == [1] * (world - 1) and found["seconds"] < 120
    assert re.search(rf"^{waits} did not complete in 8 s \(run.timeout_seconds\); ", reason)
    assert re.search(rf"no answer from rank {victim} \([a-z0-9-]+\), pid \d+ on \S+; waiting: ", reason)
    for rank in range(world):
        if rank == victim:
            assert re.search(rf"^rank {rank} .*: no answer", report, re.M)
        else:
            assert re.search(rf"rank {rank} \([a-z0-9-]+\) in step \d+, \w+ for \w+", reason)
            assert re.search(rf"^rank {rank} .*: step \d+, \w+, waits for \w+", report, re.M)
    assert ("in _save" if name == "saving" else "in train_step") in report      # where in the code
    assert found["output"].count("did not complete in 8 s") == 1        # one line on the console, not one a rank


def test_a_rank_that_lives_and_does_not_come_is_told_from_a_stopped_one(drilled):
    found, reason, report = drilled["busy"]
    assert found["codes"] == [1, 1] and found["seconds"] < 120
    assert re.search(r"did not complete in 8 s .*; rank 0 \(dp0\), pid \d+ on \S+ waits for no rank, in step 4, data, "
                     r"at \S+loop.py:\d+ in train; waiting: rank 1 \(dp1\) in step 4, \w+ for all_reduce", reason)
    assert "no answer" not in reason and "hang_drill.py" in report


def test_the_line_says_where_it_began():
    names = ["rank 0 (pp0), pid 1 on a", "rank 1 (pp1), pid 2 on a", "rank 2 (pp2), pid 3 on b"]
    down = Place(0, "step 9, forward", "send_recv over pp (ranks 0, 1)", [0, 1], 31.0, "", "")
    near = Place(1, "step 9, forward", "send_recv over pp (ranks 1, 2)", [1, 2], 30.5, "", "")
    text = summary([down, near], names, 30.0)
    assert text == (
        "send_recv over pp (ranks 1, 2) did not complete in 30 s (run.timeout_seconds); no answer from rank 2 (pp2), "
        "pid 3 on b; waiting: rank 0 (pp0) in step 9, forward for send_recv over pp (ranks 0, 1), 31 s, rank 1 (pp1) "
        "in step 9, forward for send_recv over pp (ranks 1, 2), 30 s")
    last = Place(2, "step 9, sync", "all_reduce over world (ranks 0, 1, 2)", [0, 1, 2], 30.2, "", "")
    assert "; every rank waits for another one; " in summary([down, near, last], names, 30.0)


@pytest.mark.full
def test_torchrun_leaves_nobody_behind(tmp_path):
    """The agent's SIGTERM does not reach a stopped rank; its SIGKILL, half a minute later, does."""
    write_corpus(tmp_path / "corpus")
    values = settings(tmp_path, {"tp": 2}, train={"steps": 100000}, checkpoint={"every": 0})
    values["run"]["timeout_seconds"] = 8
    (tmp_path / "run.yaml").write_text(json.dumps(values))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               str(ROOT / "train.py"), "--config", str(tmp_path / "run.yaml")]
    job = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
                           env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        end, logs = time.monotonic() + 300, tmp_path / "run" / "metrics.jsonl"
        while not (logs.exists() and logs.read_text().count("\n") >= 3):
            assert time.monotonic() < end and job.poll() is None
            time.sleep(0.05)
        ranks = [int(pid) for pid in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGSTOP)
        _, errors = job.communicate(timeout=180)
    finally:
        job.kill()
    assert job.returncode == 1
    assert [line for line in errors.splitlines() if line.startswith("rank 0 (tp0): ") and "did not complete" in line]
    assert f"no answer from rank 1 (tp1), pid {ranks[1]} on " in errors
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


def ended(rank: int, world: int, values: dict) -> tuple[int, int, list]:
    """Train; (exit code, collectives that torch's recorder knows, those that it believes to be under way)."""
    close, seen = watch.HangWatch.close, []

    def closing(self):
        known = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(True, False)).get("entries", [])
        seen.append((len(known), watch._in_flight()))
        close(self)

    with mock.patch.object(watch.HangWatch, "close", closing):
        return training.train(rank, world, values), *seen[0]


@pytest.mark.parametrize(("parallel", "world"), [
    ({"dp": 2, "pp": 2, "tp": 2, "zero_stage": 1}, 8), ({"dp": 2, "cp": 2, "context": {"method": "ulysses"}}, 4)])
def test_a_collective_that_has_ended_is_not_taken_for_one_that_hangs(pool, tmp_path, parallel, world):
    write_corpus(tmp_path / "corpus")
    values = settings(
        tmp_path, parallel, train={"steps": 4}, eval={"every": 2, "batches": 2},
        data={"valid": {"held": [{"path": str(tmp_path / "corpus")}]}},
        checkpoint={"every": 2, "asynchronous": True}, logging={"parameter_norms": 2, "slow_ranks": 2})
    for code, known, under_way in pool.run(ended, world, values):
        assert (code, under_way) == (0, []) and known > 100
