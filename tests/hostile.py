"""A server that runs commands of megafour in forked processes, with a hostile console, environment and file system.

A process that imports torch costs seconds, a forked one milliseconds; so one process imports everything once, and forks
the ranks of each command from there. It runs no tensor operation itself: its children would hang.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MEMORY = 12 << 30
"""Bytes of address space that a rank gets: a size that fits no machine must not harm the one that tests."""

GRACE = 5.0
"""Seconds that the other ranks get to end once one has failed and they have been told to, as under torchrun."""

REFUSAL_WAIT = 15.0
"""Seconds for which other ranks than the first wait here before they say an error: no start takes as long."""

LOCK_WAIT = 0.5
"""Seconds for which the lock of another machine is watched here."""


@dataclass(frozen=True)
class Command:
    """One call of megafour: its words, and the world in which it runs."""

    words: tuple[str, ...]
    """`train …` is `train.py …`; anything else is `megafour …`."""
    ranks: int = 1
    env: dict[str, str] = field(default_factory=dict)
    console: str = "utf-8"
    """Encoding of stdout and stderr; `closed` closes both, `full` is a device without space."""
    locale: str = "utf-8"
    """Encoding of files that are opened without naming one."""
    faults: dict[str, int] = field(default_factory=dict)
    """System call -> errno: flock, fsync, fsync_folder, mmap, rename; file_size -> bytes of the largest file."""
    timeout: float = 120.0


@dataclass(frozen=True)
class Ended:
    """How a command ended: exit codes of the ranks in order, and what they printed."""

    codes: list[int]
    out: str
    err: str


class Server:
    """Runs commands one after the other; use it as a context."""

    def __init__(self) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self.process = subprocess.Popen([sys.executable, "-c", "from tests.hostile import serve; serve()"], cwd=ROOT,
                                        env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def run(self, command: Command, cwd: Path) -> Ended:
        """Run a command in a folder, and wait for its end."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({**asdict(command), "cwd": str(cwd)}).encode() + b"\n")
        self.process.stdin.flush()
        return Ended(**json.loads(self.process.stdout.readline()))


def serve() -> None:
    """Answer each command on standard input with a line of JSON, until the input ends."""
    import importlib

    from megafour.cli.main import verbs
    from megafour.config import errors
    from megafour.trainer.lock import RunLock
    from megafour.verify.pool import PRELOAD

    sys.path.insert(0, str(ROOT))
    for name in (*PRELOAD, *(f"megafour.cli.{verb}" for verb in verbs()), "train", "megafour.trainer.main",
                 "megafour.inference.inspection", "megafour.inference.convert", "megafour.inference.evaluate",
                 "megafour.inference.generate", "megafour.data.prepare"):
        importlib.import_module(name)
    errors.REFUSAL_WAIT = REFUSAL_WAIT
    beat, _, *rest = RunLock.__init__.__defaults__ or ()
    RunLock.__init__.__defaults__ = (beat, LOCK_WAIT, *rest)
    for line in sys.stdin.buffer:
        answer = json.dumps(asdict(_run(json.loads(line))))
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


def _run(task: dict[str, Any]) -> Ended:
    """Fork the ranks, and wait as torchrun does: the first failure ends the others."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = []
    printed: dict[int, bytearray] = {}      # by the end of a pipe that this process reads
    for rank in range(task["ranks"]):
        launch = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(task["ranks"]),
                  "LOCAL_WORLD_SIZE": str(task["ranks"]), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ends = [os.pipe(), os.pipe()]
        pid = os.fork()
        if pid == 0:
            _be_rank(task, launch if task["ranks"] > 1 else {}, [write for _, write in ends])
        for read, write in ends:
            os.close(write)
            os.set_blocking(read, False)
            printed[read] = bytearray()
        pids.append(pid)
    codes = _wait(pids, printed, time.monotonic() + task["timeout"])
    texts = [text.decode("utf-8", "backslashreplace") for text in printed.values()]
    for end in printed:
        os.close(end)
    return Ended(codes, "".join(texts[::2]), "".join(texts[1::2]))


def _wait(pids: list[int], printed: dict[int, bytearray], deadline: float) -> list[int]:
    """The exit codes; what the ranks print is collected meanwhile."""
    codes: dict[int, int] = {}
    left = len(pids)
    while left:
        left = len(pids) - len(codes)       # once more after the last has ended: what it printed is there by then
        for end, text in printed.items():
            with contextlib.suppress(BlockingIOError):
                while piece := os.read(end, 1 << 16):
                    text += piece
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                    if codes[pid] and deadline > time.monotonic() + GRACE:
                        deadline = time.monotonic() + GRACE
                        _signal(set(pids) - set(codes), signal.SIGTERM)
        if time.monotonic() > deadline:
            _signal(pids, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.005)
    return [codes[pid] for pid in pids]


def _signal(pids: Iterable[int], number: int) -> None:
    """Send a signal to the groups of processes that still are."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number)


def _be_rank(task: dict[str, Any], launch: dict[str, str], pipes: list[int]) -> None:
    """Become one rank of the command; never returns."""
    code = 70
    try:
        os.setpgid(0, 0)
        os.chdir(task["cwd"])
        for name in [name for name in os.environ if name.startswith(("SLURM", "OMPI", "PMI", "TORCHELASTIC"))]:
            del os.environ[name]
        os.environ.update({**launch, **task["env"]})
        _take_console(task["console"], pipes)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        _take_files(task["locale"], task["faults"])
        code = _call(list(task["words"]))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1 if end.code else 0
    except BaseException:
        code = 1
        with contextlib.suppress(Exception):
            traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _call(words: list[str]) -> int:
    if words[0] == "train":
        import train

        return train.main(words[1:])
    from megafour.cli import main

    return main.main(words)


def _take_console(console: str, pipes: list[int]) -> None:
    """Point stdin, stdout and stderr where the command's console is."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for fd, pipe in zip((1, 2), pipes, strict=True):
        os.dup2(os.open("/dev/full", os.O_WRONLY) if console == "full" and fd == 1 else pipe, fd)
    if console == "closed":
        os.close(1)
        sys.stdout = None    # type: ignore[assignment]    # as the interpreter starts without the descriptor
    encoding = console if console not in ("closed", "full") else "utf-8"
    if console != "closed":
        sys.stdout = io.TextIOWrapper(open(1, "wb", 0, closefd=False), encoding, "strict", write_through=True)
    sys.stderr = io.TextIOWrapper(open(2, "wb", 0, closefd=False), encoding, "backslashreplace", write_through=True)


def _take_files(locale: str, faults: dict[str, int]) -> None:
    """Make the file system answer as a hostile one does."""
    def failing(name: str, real: Any, wrong: Any = lambda *_: True) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            if name in faults and wrong(*args):
                raise OSError(faults[name], os.strerror(faults[name]))
            return real(*args, **named)
        return call

    def is_folder(fd: Any, *_: Any) -> bool:
        return os.path.isdir(f"/proc/self/fd/{fd if isinstance(fd, int) else fd.fileno()}")

    fcntl.flock, fcntl.lockf = failing("flock", fcntl.flock), failing("flock", fcntl.lockf)
    os.fsync = failing("fsync", failing("fsync_folder", os.fsync, is_folder), lambda fd: not is_folder(fd))
    os.rename, os.replace = failing("rename", os.rename), failing("rename", os.replace)
    if "mmap" in faults:
        class Unmapped(mmap.mmap):
            def __new__(cls, *args: Any, **named: Any) -> Any:
                raise OSError(faults["mmap"], os.strerror(faults["mmap"]))
        mmap.mmap = Unmapped    # type: ignore[misc]
    if "file_size" in faults:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (faults["file_size"], faults["file_size"]))
    if locale != "utf-8":
        real = io.open

        def opened(file: Any, mode: str = "r", buffering: int = -1, encoding: str | None = None, *rest: Any,
                   **named: Any) -> Any:
            if "b" not in mode and encoding in (None, "locale"):
                encoding = locale
            return real(file, mode, buffering, encoding, *rest, **named)
        import builtins

        io.open = builtins.open = opened    # type: ignore[assignment]


ERRNOS = {name: getattr(errno, name) for name in ("ENOSYS", "ENOLCK", "EOPNOTSUPP", "EINVAL", "ENODEV", "EXDEV", "EIO",
                                                  "ENOSPC", "EACCES", "EROFS", "ESTALE")}
