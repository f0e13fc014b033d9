"""Several runs on one machine, by the commands that are documented, and a port that is taken."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.training import losses, settings, train, write_corpus

ROOT = Path(__file__).parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


def settled(folder: Path) -> dict:
    """The settings of a run of two ranks in `folder`, with its corpus."""
    folder.mkdir(exist_ok=True)
    write_corpus(folder / "corpus")
    return settings(folder, {"tp": 2}, train={"steps": 4, "precision": "fp32"}, checkpoint={"every": 2})


def start(folder: Path, *options: str, **env: str) -> subprocess.Popen:
    """Such a run, by a launcher."""
    values = settled(folder)
    (folder / "run.yaml").write_text(json.dumps(values))
    return subprocess.Popen([*(TORCHRUN if not env else [sys.executable]), *options, str(ROOT / "train.py"), "--config",
                             str(folder / "run.yaml")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            env={**os.environ, "PYTHONPATH": str(ROOT), **env})


def test_the_documents_say_standalone():
    """What is tested below is what a reader of README is told to type."""
    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("torchrun")]
    assert len(lines) > 3 and all("--standalone" in line or "--rdzv-endpoint" in line for line in lines)


def test_two_runs_at_once_equal_runs_alone(pool, tmp_path):
    places = [tmp_path / name for name in ("a", "b")]
    jobs = [start(place, "--standalone") for place in places]
    outputs = [job.communicate(timeout=300)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], outputs
    alone = settled(tmp_path / "alone")
    assert pool.run(train, 2, alone) == [0, 0]
    assert losses(places[0]) == losses(places[1]) == losses(tmp_path / "alone") and len(losses(places[0])) == 4


@pytest.mark.parametrize("way", ["master-port", "rdzv-endpoint", "srun"])
def test_a_port_that_is_taken_is_said_soon(tmp_path, way):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        began = time.monotonic()
        if way == "srun":
            job = start(tmp_path / "run", SLURM_STEP_ID="0", SLURM_PROCID="0", SLURM_LOCALID="0", MASTER_PORT=port,
                        SLURM_STEP_NUM_TASKS="2", SLURM_STEP_NUM_NODES="1", MASTER_ADDR="127.0.0.1")
        elif way == "master-port":
            job = start(tmp_path / "run", "--nnodes", "1", "--master-port", port)
        else:
            job = start(tmp_path / "run", "--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint",
                        f"127.0.0.1:{port}", "--rdzv-id", "run", "--rdzv-conf", "is_host=true")
        try:
            output = job.communicate(timeout=300)[0]
        finally:
            job.kill()
        assert job.returncode == 1 and time.monotonic() - began < 240
        assert "EADDRINUSE" in output and port in output
        if way == "srun":
            error, = re.findall(r"^error: .*", output, re.M)
            assert f"cannot meet at 127.0.0.1:{port}" in error and "address already in use" in error
            assert "Traceback" not in output
        assert not (tmp_path / "run" / "run").exists()
