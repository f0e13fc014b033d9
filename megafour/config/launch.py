"""Who this process is among the ranks of a launch, from the variables that a launcher sets; no torch is imported."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from megafour.config.errors import ConfigError

ONE_PROCESS = "unset RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE to run as one process"
DEFAULT_PORT = "29500"


class LaunchError(Exception):
    """The ranks of a launch do not come together. The message is a single line."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


@dataclass(frozen=True)
class Family:
    """The variables of one launcher that starts several tasks and says to each which one it is."""

    launcher: str
    world: str
    rank: str
    local_rank: str
    local_world: str | None


FAMILIES = (
    Family("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
           "OMPI_COMM_WORLD_LOCAL_SIZE"),
    Family("mpiexec", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Family("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", None),
)
"""Read where torchrun's variables are not set; the first launcher that has started two tasks or more counts. mpirun in
a SLURM job starts its daemons by srun, and its tasks inherit the variables of that step: the inner launcher comes
first. srun's own PMI sets no MPI_LOCALRANKID."""


@dataclass(frozen=True)
class Launch:
    """Who this process is. torchrun's variables win over those of SLURM and MPI; none of them: a world of one."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    host: str = ""
    """MASTER_ADDR as it was set: where rank 0, or torchrun's agent, listens."""
    port: str = ""
    """MASTER_PORT as it was set; `check_address` says what is wrong with it."""
    note: str | None = None
    """How SLURM's variables contradict torchrun's, in one line; null where they agree."""

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> Launch:
        """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE (torchrun), else what srun or mpirun says.

        An sbatch or salloc shell carries SLURM_NTASKS too, but only a step (SLURM_STEP_ID) has started the tasks.

        Raises:
            ConfigError: naming the variable that is half of a launch, or no rank of one, and its value.
        """
        host, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
        if "RANK" not in env and "WORLD_SIZE" not in env:
            return _of_tasks(env, host, port)
        for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
            if other not in env:
                raise ConfigError(f"{name}={env[name]} is set and {other} is not: set both, or launch with torchrun, "
                                  f"which sets them; {ONE_PROCESS}")
        world = _whole(env, "WORLD_SIZE", 1)
        rank = _below(env, "RANK", "WORLD_SIZE", world)
        local_world = _whole(env, "LOCAL_WORLD_SIZE", 1) if "LOCAL_WORLD_SIZE" in env else world
        if local_world > world:
            raise ConfigError(f"LOCAL_WORLD_SIZE={local_world} is more than WORLD_SIZE={world}: a node has no more "
                              f"ranks than all nodes together; {ONE_PROCESS}")
        local = (_below(env, "LOCAL_RANK", "LOCAL_WORLD_SIZE", local_world) if "LOCAL_RANK" in env
                 else rank % local_world)
        return cls(rank, world, local, local_world, host, port, _contradiction(env, rank, world))

    def check_address(self) -> None:
        """Check that MASTER_ADDR and MASTER_PORT are valid; a world of one needs neither.

        Raises:
            ConfigError: naming MASTER_ADDR or MASTER_PORT and its value.
        """
        if self.world == 1:
            return
        where = "set it to the host of rank 0, or launch with torchrun, which sets it"
        if not self.host:
            raise ConfigError(f"MASTER_ADDR is not set, and {self.world} ranks have to meet: {where}")
        if re.search(r"[\s/]", self.host) or self.host.count(":") == 1:
            raise ConfigError(f"MASTER_ADDR={self.host} is not a host name or an address: {where}; its port goes into "
                              f"MASTER_PORT")
        free = "set it to a free port of that host, such as 29500, the same on every rank"
        if not self.port:
            raise ConfigError(f"MASTER_PORT is not set, and {self.world} ranks have to meet at MASTER_ADDR="
                              f"{self.host}: {free}")
        if not re.fullmatch("[0-9]{1,5}", self.port) or not 1 <= int(self.port) <= 65535:
            reason = ("; Kubernetes sets it so for a service called master: set it in the pod, or rename that service"
                      if "://" in self.port else "")
            raise ConfigError(f"MASTER_PORT={self.port} is not a port, a number from 1 to 65535: {free}{reason}")

    @property
    def address(self) -> str:
        """Where the ranks meet, `HOST:PORT`."""
        return f"{self.host}:{self.port}"


def local_rank(env: Mapping[str, str] = os.environ) -> int:
    """The local rank that the launcher has set, or 0 where it is missing or invalid.

    It decides which rank prints an error at once, also where the launch itself is what is wrong.
    """
    names = ["LOCAL_RANK", *(family.local_rank for family in FAMILIES)]
    text = next((env[name] for name in names if name in env), "")
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else 0


def _of_tasks(env: Mapping[str, str], host: str, port: str) -> Launch:
    """The launch where torchrun's variables are not set."""
    for family in FAMILIES:
        name = _counting(env, family)
        world = _whole(env, name, 1) if name in env else 1
        if world == 1:
            continue
        if family.rank not in env:
            raise ConfigError(f"{name}={world} is set and {family.rank} is not: launch with torchrun, or unset {name} "
                              f"to run as one process")
        rank = _below(env, family.rank, name, world)
        if not host:
            raise ConfigError(f"{family.launcher} has started {world} tasks ({name}={world}), and this is task {rank} "
                              f"({family.rank}={rank}), but MASTER_ADDR is not set, so they cannot meet: set "
                              f"MASTER_ADDR to the host of task 0, start torchrun in one task per node, or start one "
                              f"task")
        if family.local_world is None:
            local_world = _tasks_on_node(env, world)
        else:
            local_world = _whole(env, family.local_world, 1) if family.local_world in env else world
        local = _whole(env, family.local_rank, 0) if family.local_rank in env else 0
        return Launch(rank, world, local, local_world, host, port or DEFAULT_PORT)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if name in env:
            raise ConfigError(f"{name}={env[name]} is set, and RANK and WORLD_SIZE are not: launch with torchrun, "
                              f"which sets them all, or {ONE_PROCESS}")
    return Launch()


def _tasks_on_node(env: Mapping[str, str], world: int) -> int:
    """Tasks of an srun step on this node: from `4(x2),1`, four on each of two nodes and one on the third; else even."""
    counts: list[int] = []
    for part in env.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        found = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part.strip())
        counts += [int(found[1])] * int(found[2] or 1) if found else []
    node = env.get("SLURM_NODEID", "")
    if sum(counts) == world and re.fullmatch("[0-9]{1,6}", node) and int(node) < len(counts):
        return counts[int(node)]
    nodes = _whole(env, "SLURM_STEP_NUM_NODES", 1) if "SLURM_STEP_NUM_NODES" in env else 1
    return -(-world // nodes)


def _counting(env: Mapping[str, str], family: Family) -> str:
    """The variable that tells how many tasks this one is among."""
    if family.launcher == "mpiexec" and family.local_rank not in env:
        return "" if "SLURM_STEP_ID" in env else family.world
    if family.launcher != "srun":
        return family.world
    if "SLURM_STEP_ID" in env:
        return family.world if "SLURM_PROCID" in env else ""
    # A batch shell is task 0 of a job that may have more: only another number says that a step has started this one.
    return "" if re.fullmatch("0*", env.get("SLURM_PROCID", "")) else "SLURM_NTASKS"


def _contradiction(env: Mapping[str, str], rank: int, world: int) -> str | None:
    """What SLURM's step says otherwise than torchrun's variables, which are followed."""
    if "SLURM_STEP_ID" not in env or not env.get("SLURM_STEP_NUM_TASKS", "").isdecimal():
        return None
    tasks = int(env["SLURM_STEP_NUM_TASKS"])
    if tasks == 1:
        return None
    if "TORCHELASTIC_RUN_ID" in env:
        nodes = env.get("GROUP_WORLD_SIZE", "")
        if not nodes.isdecimal() or int(nodes) == tasks:
            return None
        return (f"srun has started {tasks} tasks (SLURM_STEP_NUM_TASKS), and this torchrun joins {nodes} of them "
                f"(--nnodes): each group trains a model of its own; start torchrun with --nnodes {tasks}")
    task = env.get("SLURM_PROCID", str(rank))
    if (tasks, task) == (world, str(rank)):
        return None
    return (f"RANK={rank} and WORLD_SIZE={world} are followed, although srun says task {task} of {tasks} "
            f"(SLURM_PROCID, SLURM_STEP_NUM_TASKS)")


def _below(env: Mapping[str, str], name: str, of: str, size: int) -> int:
    value = _whole(env, name, 0)
    if value >= size:
        raise ConfigError(f"{name}={value} is not below {of}={size}: ranks count from 0 to {size - 1}; launch with "
                          f"torchrun, which numbers them, or {ONE_PROCESS}")
    return value


def _whole(env: Mapping[str, str], name: str, least: int) -> int:
    text = env[name].strip()
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < least:
        wrong = "is not valid" if text else "is empty"
        raise ConfigError(f"{name}={env[name]} {wrong}: it must be a whole number, at least {least}, as a launcher "
                          f"sets it; launch with torchrun, or unset it")
    return int(text)
