"""How ranks learn who they are and meet: half a launch is refused, and who waits says for whom."""

import importlib.util
import os
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megafour import world
from megafour.cli import main as cli
from megafour.config import errors
from megafour.config.errors import ConfigError
from megafour.config.launch import Launch, LaunchError
from tests.training import write_corpus

ROOT = Path(__file__).resolve().parent.parent
TWO = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI_", "TORCHELASTIC_")

WRONG = [
    ({"RANK": "", "WORLD_SIZE": ""}, "WORLD_SIZE= is empty"),
    ({"RANK": "", "WORLD_SIZE": "2"}, "RANK= is empty"),
    ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE=two is not valid"),
    ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0 is not valid: it must be a whole number, at least 1"),
    ({"RANK": "0", "WORLD_SIZE": "-2"}, "WORLD_SIZE=-2"),
    ({"RANK": "0", "WORLD_SIZE": "9" * 5000}, "is not valid"),
    ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK=5 is not below WORLD_SIZE=2"),
    ({"RANK": "1", "WORLD_SIZE": "1"}, "RANK=1 is not below WORLD_SIZE=1"),
    ({"RANK": "-1", "WORLD_SIZE": "1"}, "RANK=-1"),
    ({"RANK": "0"}, "RANK=0 is set and WORLD_SIZE is not"),
    ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set and RANK is not"),
    ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1 is set, and RANK and WORLD_SIZE are not"),
    ({"LOCAL_WORLD_SIZE": "x"}, "LOCAL_WORLD_SIZE=x"),
    ({**TWO, "LOCAL_RANK": "2"}, "LOCAL_RANK=2 is not below LOCAL_WORLD_SIZE=2"),
    ({**TWO, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK=1 is not below LOCAL_WORLD_SIZE=1"),
    ({**TWO, "LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE=4 is more than WORLD_SIZE=2"),
    ({**TWO, "MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
    ({**TWO, "MASTER_ADDR": "tcp://10.0.0.1"}, "MASTER_ADDR=tcp://10.0.0.1 is not a host name"),
    ({**TWO, "MASTER_ADDR": "n1:29500"}, "MASTER_ADDR=n1:29500 is not a host name"),
    ({**TWO, "MASTER_PORT": ""}, "MASTER_PORT is not set"),
    ({**TWO, "MASTER_PORT": "0"}, "MASTER_PORT=0 is not a port"),
    ({**TWO, "MASTER_PORT": "99999"}, "MASTER_PORT=99999 is not a port"),
    ({**TWO, "MASTER_PORT": "tcp://10.0.0.1:80"}, "Kubernetes sets it so for a service called master"),
    (STEP, "srun has started 2 tasks (SLURM_STEP_NUM_TASKS=2), and this is task 1 (SLURM_PROCID=1), but MASTER_ADDR"),
    ({**STEP, "SLURM_PROCID": "0"}, "this is task 0 (SLURM_PROCID=0), but MASTER_ADDR is not set"),
    ({"SLURM_NTASKS": "2", "SLURM_PROCID": "1"}, "srun has started 2 tasks (SLURM_NTASKS=2), and this is task 1"),
    ({**STEP, "SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS=many is not valid"),
    ({**STEP, "MASTER_ADDR": "n1", "MASTER_PORT": "tcp://10.0.0.1:80"}, "MASTER_PORT=tcp://10.0.0.1:80"),
    ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, "mpirun has started 2 tasks"),
    ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "mpiexec has started 2 tasks (PMI_SIZE=2), and this is task 0 (PMI_RANK=0)"),
    ({"PMI_SIZE": "2"}, "PMI_SIZE=2 is set and PMI_RANK is not"),
]


@pytest.mark.parametrize(("env", "words"), WRONG)
def test_half_a_launch_is_refused_by_name(env, words):
    with pytest.raises(ConfigError) as error:
        Launch.from_environment(env).check_address()
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("env", "launch"), [
    ({"MASTER_ADDR": "localhost", "MASTER_PORT": "tcp://10.0.0.1:80"}, (0, 1, 0, 1)),     # of no use to one process
    ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 1, 0, 1)),
    ({**TWO, "RANK": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, (1, 2, 0, 1)),
    ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, (0, 1, 0, 1)),       # sbatch's own shell
    ({**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, (0, 1, 0, 1)),             # srun -n1
    ({**STEP, "SLURM_STEP_NUM_NODES": "2", "MASTER_ADDR": "n1"}, (1, 2, 0, 1)),
    ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
      "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "1"}, (3, 4, 1, 2)),
    ({**STEP, "OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_RANK": "11", "OMPI_COMM_WORLD_LOCAL_RANK": "3",
      "OMPI_COMM_WORLD_LOCAL_SIZE": "8", "MASTER_ADDR": "n1", "MASTER_PORT": "1"}, (11, 16, 3, 8)),
    ({**STEP, "PMI_SIZE": "2", "PMI_RANK": "1", "SLURM_STEP_NUM_NODES": "2", "MASTER_ADDR": "n1"}, (1, 2, 0, 1)),
    ({**STEP, "SLURM_STEP_NUM_TASKS": "5", "SLURM_PROCID": "3", "SLURM_LOCALID": "3", "SLURM_STEP_NUM_NODES": "2",
      "SLURM_STEP_TASKS_PER_NODE": "4,1", "SLURM_NODEID": "0", "MASTER_ADDR": "n1"}, (3, 5, 3, 4)),
    ({**STEP, "SLURM_STEP_NUM_TASKS": "9", "SLURM_PROCID": "8", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": "3",
      "SLURM_STEP_TASKS_PER_NODE": "4(x2),1", "SLURM_NODEID": "2", "MASTER_ADDR": "n1"}, (8, 9, 0, 1)),
    ({**TWO, "RANK": "1"}, (1, 2, 1, 2)),       # no LOCAL_RANK: all ranks on one machine
    ({"PMI_SIZE": "1", "PMI_RANK": "0"}, (0, 1, 0, 1)),
    ({**STEP, **TWO, "TORCHELASTIC_RUN_ID": "a", "GROUP_WORLD_SIZE": "2", "LOCAL_RANK": "0"}, (0, 2, 0, 2)),
])
def test_a_whole_launch_is_followed(env, launch):
    found = Launch.from_environment(env)
    found.check_address()
    assert (found.rank, found.world, found.local_rank, found.local_world) == launch and found.note is None


@pytest.mark.parametrize(("env", "words"), [
    ({**TWO, "TORCHELASTIC_RUN_ID": "a", "GROUP_WORLD_SIZE": "1"}, "srun has started 2 tasks (SLURM_STEP_NUM_TASKS), "
     "and this torchrun joins 1 of them (--nnodes)"),
    ({**TWO, "WORLD_SIZE": "4"}, "RANK=0 and WORLD_SIZE=4 are followed, although srun says task 1 of 2")])
def test_what_srun_says_otherwise_is_noted(env, words):
    assert words in (Launch.from_environment({**STEP, **env}).note or "")


@pytest.fixture
def train():
    spec = importlib.util.spec_from_file_location("train_command", ROOT / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.fixture
def environment(monkeypatch):
    """Sets these variables of launchers and no others."""
    def change(env):
        for name in list(os.environ):
            if name.startswith(LAUNCHERS):
                monkeypatch.delenv(name)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(errors, "REFUSAL_WAIT", 0.0)
    return change


HALF = [{"RANK": "", "WORLD_SIZE": ""}, {"RANK": "5", "WORLD_SIZE": "2"}, STEP]


@pytest.mark.parametrize("env", [*HALF, {"RANK": "1", "WORLD_SIZE": "2"}, {**TWO, "MASTER_PORT": "tcp://10.0.0.1:80"}])
def test_train_and_evaluate_refuse_half_a_launch_in_one_line(train, environment, tmp_path, monkeypatch, capfd, env):
    environment(env)
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "corpus")
    for command in (lambda: train(["data.train=[{path: corpus}]", "model.vocab_size=64", "data.seq_length=16"]),
                    lambda: cli.main(["evaluate", "--checkpoint", "runs", "--data", "corpus"])):
        assert command() == 2
        err = capfd.readouterr().err
        assert err.startswith("error: ") and err.count("\n") == 1
        assert any(name in err for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    assert not Path("runs").exists()


@pytest.mark.parametrize("env", HALF)
def test_generate_refuses_half_a_launch_and_check_does_not(train, environment, capfd, env):
    environment(env)
    assert cli.main(["generate", "--checkpoint", "nowhere", "--prompt", "a"]) == 2
    assert "error: " in capfd.readouterr().err
    assert train(["--check", "data.train=[{path: corpus}]"]) == 0
    assert capfd.readouterr().err.startswith("note: ")
    assert train(["--check", "--world", "2", "data.train=[{path: corpus}]"]) == 0
    assert capfd.readouterr().err == ""


def _launches(count: int, port: int, host: str = "localhost") -> list[Launch]:
    return [Launch(rank, count, rank, count, host, str(port)) for rank in range(count)]


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def _meet_all(launches: list[Launch], seconds: float, stopped=lambda: False) -> dict[int, dist.Store | Exception]:
    """`meet` on a thread for each of these ranks."""
    found: dict[int, dist.Store | Exception] = {}

    def one(launch: Launch) -> None:
        try:
            found[launch.rank] = world.meet(launch, timedelta(seconds=seconds),
                                            world.Waiting(launch, seconds, stopped))
        except Exception as error:
            found[launch.rank] = error

    threads = [threading.Thread(target=one, args=(launch,)) for launch in launches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


@pytest.mark.parametrize("anew", [False, True])
def test_ranks_that_have_all_come_share_a_store(monkeypatch, anew):
    if anew:        # as under torchrun, whose store may hold what an earlier start has left
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    stores = _meet_all(_launches(3, _free_port()), 60)
    stores[1].set("word", "ok")
    assert [stores[rank].get("word") for rank in range(3)] == [b"ok"] * 3


@pytest.mark.parametrize("anew", [False, True])
def test_who_waits_names_the_ranks_that_have_not_come_at_once_and_again(monkeypatch, capfd, anew):
    if anew:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setattr(world, "FIRST_WORD", 0.1)
    monkeypatch.setattr(world, "NEXT_WORD", 0.3)
    launches = _launches(6, _free_port())
    found = _meet_all([launches[0], launches[2]], 2.5)
    missing = "ranks 1, 3-5 of 6, which have not come"
    assert isinstance(found[0], LaunchError) and missing in str(found[0]) and "start all 6 ranks" in str(found[0])
    assert isinstance(found[2], (LaunchError, RuntimeError))        # rank 0, which serves the store, may end first
    err = capfd.readouterr().err
    assert err.count("rank 0 waits at ") > 1 and missing in err
    assert ("rank 2 waits at " in err) is not anew      # torchrun has started both: its first rank says it for all


def test_a_rank_without_a_rank_0_says_so(monkeypatch, capfd):
    monkeypatch.setattr(world, "FIRST_WORD", 0.0)
    found = _meet_all(_launches(2, _free_port())[1:], 0.5)
    assert isinstance(found[1], LaunchError) and "for rank 0, which does not answer there" in str(found[1])
    assert "rank 1 waits at localhost:" in capfd.readouterr().err


def test_a_host_that_does_not_resolve_is_named(monkeypatch):
    def unknown(*_):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(world.socket, "getaddrinfo", unknown)
    monkeypatch.setattr(world, "UNKNOWN_HOST", 0.2)
    for error in _meet_all(_launches(2, 29500, "n1.cluster"), 60).values():
        assert "MASTER_ADDR=n1.cluster does not resolve: Name or service not known" in str(error)


def test_a_request_to_stop_ends_the_wait(monkeypatch):
    monkeypatch.setattr(world, "STOP_GRACE", 0.2)
    found = _meet_all(_launches(2, _free_port())[:1], 600, lambda: True)
    assert isinstance(found[0], LaunchError) and "rank 1 of 2" in str(found[0])


def test_a_port_that_is_taken_is_one_line():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        launch = _launches(2, taken.getsockname()[1])[0]
        with pytest.raises(LaunchError, match="the ranks cannot meet at localhost:.*give another MASTER_PORT"):
            world.start_distributed(launch, torch.device("cpu"))


def test_the_launch_is_read_without_torch():
    code = "import sys; from megafour.config.launch import Launch; Launch.from_environment(); " \
           "from megafour.trainer.signals import StopRequest; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, cwd=ROOT)
