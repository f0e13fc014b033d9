"""The lock of a run's folder: one live run at a time, a dead one's lock taken over."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from megafour.checkpoint.errors import CheckpointError
from megafour.config.file_system import naming
from megafour.trainer.peers import machine, started

BEAT = 5.0
"""Seconds between heartbeats."""
STALE = 45.0
"""Seconds without a heartbeat after which a lock that this machine cannot judge by its process is taken over."""


class RunLock:
    """Holds `lock` in a run's folder from `acquire` to `release`, with a heartbeat thread.

    A lock made on this machine is judged by whether its process lives, so that a killed run can be resumed at once. One
    made elsewhere is watched: a heartbeat means that it is live. Clocks of two machines are never compared.
    """

    def __init__(self, path: Path, beat: float = BEAT, stale: float = STALE, key: str = "run.dir",
                 beside: RunLock | None = None) -> None:
        """Prepare it.

        Args:
            path: of the lock.
            beat, stale: seconds between heartbeats, and without one.
            key: of the config, which names the folder that it lies in.
            beside: a lock that this run has taken; if its former holder is dead, that one's lock here is taken over at
                once.
        """
        self.key = key
        self.dead: str | None = None if beside is None else beside.dead
        """The token of the one that this lock was taken over from."""
        self.path, self.beat, self.stale = Path(path), beat, stale
        self.token: str = uuid.uuid4().hex if beside is None else beside.token
        self.machine = machine()
        self.lost = False
        """Whether another run has taken the lock, which happens when this one stood still for long."""
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._count = 0

    def acquire(self) -> RunLock:
        """Take the lock, waiting at most `stale` seconds for a sign of life of one that is there.

        Raises:
            CheckpointError: when a live run holds it.
        """
        while not self._create():
            held = _read(self.path)
            if held is None:
                continue        # released, or being written, between the two calls
            if self._lives(held):
                raise CheckpointError(
                    f"{self.path.parent} is in use by another run: host {held.get('host')}, pid {held.get('pid')}; end "
                    f"that run, or give this one another {self.key}")
            self.dead = str(held.get("token"))
            self._move_away(held)
        self._thread = threading.Thread(target=self._keep_beating, name="run-lock", daemon=True)
        self._thread.start()
        return self

    def release(self) -> None:
        """Give the lock back, if it is still this run's."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if (_read(self.path) or {}).get("token") == self.token:
            with contextlib.suppress(OSError):      # a disk that has failed: the lock of a dead process holds nobody up
                self.path.unlink(missing_ok=True)

    def _content(self) -> str:
        self._count += 1
        return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "heartbeat": time.time(),
                           "beats": self._count, "machine": self.machine, "process": started(os.getpid()),
                           "token": self.token})

    def _create(self) -> bool:
        """Make the lock with its content in one move; False when there is one."""
        own = self.path.with_name(f"lock.{self.token}")
        try:
            with naming(own):
                own.write_text(self._content(), encoding="utf-8")
            return self._place(own)
        finally:
            own.unlink(missing_ok=True)

    def _place(self, source: Path) -> bool:
        """Give a file's content the lock's name as well; False when there is a lock."""
        try:
            os.link(source, self.path)
            return True
        except FileExistsError:
            return False
        except OSError:         # a file system without hard links
            try:
                file = open(self.path, "x", encoding="utf-8")
            except FileExistsError:
                return False
            try:
                with naming(self.path), file:
                    file.write(source.read_text(encoding="utf-8"))
                return True
            except OSError:     # a full disk: an empty lock would hold up the next start
                self.path.unlink(missing_ok=True)
                raise

    def _lives(self, held: dict[str, Any]) -> bool:
        if self.dead is not None and held.get("token") == self.dead:
            return False
        if held.get("machine") == self.machine:
            return started(int(held["pid"])) == held.get("process") is not None
        end = time.monotonic() + self.stale
        while time.monotonic() < end:
            time.sleep(min(1.0, self.stale / 10))
            now = _read(self.path)
            if now is not None and now.get("token") != held.get("token"):
                return True         # someone else took it over
            if now is not None and now.get("beats") != held.get("beats"):
                return True
            if not self.path.exists():
                return False
        return False

    def _move_away(self, held: dict[str, Any]) -> None:
        """Remove a stale lock, and only that one: two runs may find it stale at once."""
        aside = self.path.with_name(f"lock.{self.token}.stale")
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return
        moved = _read(aside) or {}
        if moved.get("token") != held.get("token"):
            self._place(aside)      # it was another run's new one; if there is a newer one still, that one has it
        aside.unlink(missing_ok=True)

    def _keep_beating(self) -> None:
        own = self.path.with_name(f"lock.{self.token}")
        while not self._end.wait(self.beat):
            try:
                held = _read(self.path)
                if held is not None and held.get("token") != self.token:
                    self.lost = True
                    return
                own.write_text(self._content(), encoding="utf-8")
                os.replace(own, self.path)
            except OSError:
                continue            # a full or absent disk must not end a run; the next beat tries again


def _read(path: Path) -> dict[str, Any] | None:
    """What a lock says; {} for one that is damaged, None when there is none."""
    for _ in range(5):
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            return value if isinstance(value, dict) else {}
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            time.sleep(0.05)        # it may be half written
    return {}
