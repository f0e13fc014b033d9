"""A pool of local gloo ranks, forked from a clean process, on which functions run as one world after another.

Starting a rank costs seconds (importing torch), forking one costs milliseconds, and a process that has run a threaded
tensor operation cannot be forked safely: its children hang. So the ranks are forked from a process of their own that
has imported torch and done nothing else, whatever the caller has done before. The ranks of a call that failed are
replaced by newly forked ones: what a failure left in a process (half-closed connections, threads of gloo) made a later
call hang.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from megafour.console import open_console

PRELOAD = ("numpy", "torch", "torch.distributed", "torch.distributed.device_mesh", "torch.distributed.checkpoint",
           "torch._dynamo", "megafour.verify.run")
"""Imported once before the fork, shared by all ranks. None of these may run a tensor operation when imported.
`torch._dynamo` is what the first optimizer of a process imports: 1.2 s on each of sixteen ranks otherwise."""

START = 300.0
"""Seconds that the ranks of a new pool get to import torch."""

GRACE = 10.0
"""Seconds that the other ranks get to end, once one rank has failed or is done."""

NUMBER = 2
"""Bytes in which the caller tells the server a rank's number, with the rank's socket."""

LEAVE = b"leave"
"""What the caller says to the ranks once all are done. One that left earlier would close its connections under a peer
that is still making the other end of one, and that fails with `Connection closed by peer`."""


class RankError(RuntimeError):
    """A function failed on a rank. `rank` says where, `kind` is the exception's class name, `text` its message."""

    def __init__(self, rank: int, kind: str, text: str, detail: str = ""):
        super().__init__(f"rank {rank}: {kind}: {text}" + (f"\n{detail}" if detail else ""))
        self.rank, self.kind, self.text = rank, kind, text


class Pool:
    """`size` ranks that wait for work; started at the first `run` (or by `start`), ended by `close`.

    A rank runs with one thread. What a function changes of its process stays there for later calls, except for the
    environment, the working folder, the handlers of SIGTERM and SIGUSR1, torch's default dtype and its thread count.
    A call that fails replaces every rank.
    """

    def __init__(self, size: int = 16, preload: Iterable[str] = PRELOAD):
        self.size = size
        self.preload = tuple(preload)
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ranks: list[Connection] = []
        self._pids: list[int] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._calls = 0

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the ranks without waiting for them; nothing happens if they run already."""
        if self._server is not None:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="megafour-pool-")
        self._control, theirs = socket.socketpair()
        code = "import sys, pickle; sys.path[:] = pickle.loads(bytes.fromhex(sys.argv[1])); " \
               "from megafour.verify.pool import serve; serve(*pickle.loads(bytes.fromhex(sys.argv[2])))"
        arguments = [pickle.dumps(sys.path).hex(),
                     pickle.dumps((theirs.fileno(), self.preload, self._folder.name)).hex()]
        env = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}    # local ranks need no host name
        env = {**env, **os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._server = subprocess.Popen([sys.executable, "-c", code, *arguments], pass_fds=[theirs.fileno()], env=env,
                                        start_new_session=True)
        theirs.close()
        self._fork()

    def run(self, fn: Callable[..., Any], world: int, *args: Any, timeout: float = 300,
            backend: str = "gloo") -> list[Any]:
        """Call `fn(rank, world, *args)` on ranks 0..world-1 of a fresh default process group; results in rank order.

        `fn` is a module-level function of an importable module; arguments and results are pickled.

        Raises:
            RankError: a rank raised or died; the first one to do so is named and its traceback shown.
            TimeoutError: not all ranks ended in `timeout` seconds; the message shows where each of them stands.
        """
        if not 1 <= world <= self.size:
            raise ValueError(f"world {world}: the pool has {self.size} ranks")
        if getattr(fn, "__module__", None) == "__main__":
            raise ValueError(f"{fn.__qualname__} is defined in __main__: ranks can only import it from a module")
        self.start()
        self._greet()
        assert self._folder is not None
        self._calls += 1
        store = str(Path(self._folder.name) / f"store-{self._calls}")
        where = (os.getcwd(), list(sys.path))
        task = pickle.dumps((fn, args))
        try:
            for rank in range(world):
                self._ranks[rank].send_bytes(pickle.dumps((task, rank, world, store, backend, timeout, where)))
            return self._collect(world, timeout)
        except BaseException:    # when interrupted, answers are still on their way and must not meet a later call
            self._replace()
            raise

    def _fork(self) -> None:
        """Ask the server for `size` ranks, without waiting for them: a socket for each goes over, in order."""
        assert self._control is not None
        self._ranks = []
        for rank in range(self.size):
            ours, theirs = socket.socketpair()
            with theirs:
                socket.send_fds(self._control, [rank.to_bytes(NUMBER)], [theirs.fileno()])
            self._ranks.append(Connection(ours.detach()))

    def _replace(self) -> None:
        """End every rank, whatever it does, and fork new ones."""
        self._end_ranks()
        try:
            self._fork()
        except OSError:         # the server is gone: a later `run` starts another
            self.close()

    def close(self) -> None:
        """End every rank at once. A later `run` starts new ones."""
        server, self._server = self._server, None
        if server is not None:
            server.kill()
            server.wait()
        self._end_ranks()
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _end_ranks(self) -> None:
        for pid in self._pids:      # each leads a group, with what it has started; an idle one ends by itself
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        for connection in self._ranks:
            connection.close()
        self._ranks, self._pids = [], []

    def _greet(self) -> None:
        """Wait until every rank of a new pool has said its process id."""
        if self._pids:
            return
        for rank, connection in enumerate(self._ranks):
            try:
                if not connection.poll(START):
                    raise TimeoutError(f"rank {rank} of the pool did not start within {START:g} s")
                self._pids.append(pickle.loads(connection.recv_bytes()))
            except (EOFError, TimeoutError, ConnectionResetError) as error:
                self.close()
                raise RuntimeError(f"the pool of {self.size} local ranks did not start: {error!r}") from error

    def _collect(self, world: int, timeout: float) -> list[Any]:
        """Wait for every rank's answer; on a failure, give the others a moment to say what happened to them."""
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        failures: list[tuple[float, RankError]] = []
        pending = {self._ranks[rank]: rank for rank in range(world)}
        staying: list[Connection] = []
        lost = False
        while pending and not lost:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                try:
                    ok, moment, answer = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    ok, moment, answer, lost = False, time.monotonic(), ("died", self._death(rank), ""), True
                if ok:
                    results[rank] = answer
                    staying.append(connection)
                else:
                    failures.append((moment, RankError(rank, *answer)))
                    deadline = min(deadline, time.monotonic() + GRACE)
            while staying and (failures or not pending):
                with contextlib.suppress(BrokenPipeError):
                    staying.pop().send_bytes(LEAVE)
        if failures:
            raise min(failures, key=lambda failure: failure[0])[1]
        if pending:
            stacks = self._stacks(sorted(pending.values()))
            raise TimeoutError(f"{len(stacks)} of {world} ranks did not end within {timeout:g} s\n"
                               + "\n".join(f"rank {rank}:\n{stack}" for rank, stack in stacks.items()))
        return [results[rank] for rank in range(world)]

    def _log(self, rank: int) -> str:
        assert self._folder is not None
        return Path(self._folder.name, f"rank-{rank}.log").read_text(encoding="utf-8", errors="replace")

    def _death(self, rank: int) -> str:
        time.sleep(0.2)    # the fault handler's last words
        return "its process ended; it last wrote:\n" + self._log(rank)[-3000:]

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """Where each of `ranks` stands now: the end of the stack that its fault handler writes on a signal."""
        before = {rank: len(self._log(rank)) for rank in ranks}
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGUSR1)
        end = time.monotonic() + 5
        while any(len(self._log(rank)) == before[rank] for rank in ranks) and time.monotonic() < end:
            time.sleep(0.1)
        time.sleep(0.2)    # the rest of a stack that has begun
        return {rank: "\n".join(self._log(rank)[before[rank]:].splitlines()[:14]) for rank in ranks}


def serve(control: int, preload: tuple[str, ...], folder: str) -> None:
    """The clean process: import, then fork a rank for each socket that comes, until the caller is gone."""
    for name in preload:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)       # the kernel clears away ranks that have ended
    with socket.socket(fileno=control) as channel:
        while True:
            number, fds, _, _ = socket.recv_fds(channel, NUMBER, 1)
            if not fds:
                return
            if os.fork() == 0:
                code = 1
                try:
                    channel.close()
                    os.setpgid(0, 0)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    _serve_rank(Connection(fds[0]), Path(folder, f"rank-{int.from_bytes(number)}.log"))
                    code = 0
                finally:
                    os._exit(code)
            os.close(fds[0])


def _serve_rank(connection: Connection, log: Path) -> None:
    """One rank: say the process id, then answer one call after another until the caller is gone."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    open_console(tolerant=True)
    faulthandler.enable(file=2)
    connection.send_bytes(pickle.dumps(os.getpid()))
    environment = dict(os.environ)
    while True:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        faulthandler.unregister(signal.SIGUSR1)     # a function may have put a handler of its own in its place
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)
        try:
            request = connection.recv_bytes()
            if request == LEAVE:    # this rank has left already
                continue
            try:
                answer = _call(*pickle.loads(request))
                ok, message = answer[0], pickle.dumps(answer)
                del answer
            except Exception as error:    # what came cannot be loaded, or what the function returned cannot be pickled
                ok, message = False, pickle.dumps(_failure(error))
            sys.stdout.flush()
            connection.send_bytes(message)
            if ok and connection.poll(GRACE):
                connection.recv_bytes()
        except (EOFError, ConnectionResetError, BrokenPipeError):
            return
        _leave()
        os.environ.clear()
        os.environ.update(environment)


def _failure(error: BaseException) -> tuple[bool, float, tuple[str, str, str]]:
    """What a rank answers when it failed: when that was, and the exception in words."""
    moment = time.monotonic()
    return False, moment, (type(error).__name__, str(error), "".join(traceback.format_exception(error)))


def _call(task: bytes, rank: int, world: int, store: str, backend: str, timeout: float,
          where: tuple[str, list[str]]) -> tuple[bool, float, Any]:
    """Run one task inside a process group of its own. Returns (whether it went well, when it ended, the result)."""
    import torch
    import torch.distributed as dist

    os.chdir(where[0])
    sys.path[:] = where[1]
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    fn, args = pickle.loads(task)
    # Collectives outlive the caller's patience a little, so that the caller's report of all ranks comes first.
    dist.init_process_group(backend, store=dist.FileStore(store, world), rank=rank, world_size=world,
                            timeout=timedelta(seconds=timeout + 30))
    try:
        return True, time.monotonic(), fn(rank, world, *args)
    except BaseException as error:    # noqa: B036  a SystemExit in a rank is an answer too
        return _failure(error)


def _leave() -> None:
    """Leave the process group of a call; its peers fail if they still need this rank."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
