"""The processes of a run: what tells one from a later one under its number, and which of them have died."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from megafour.comm.objects import gather_objects
from megafour.mesh import Mesh

PATIENCE = 2.0
"""Seconds for which a process may have closed its connections and not be dead yet."""


@dataclass(frozen=True)
class Peer:
    """One rank's process."""

    name: str
    """`rank 12 (pp1-tp0), pid 4711 on node3`."""
    pid: int
    machine: str
    started: str | None


def meet(mesh: Mesh) -> list[Peer]:
    """Every rank's process, in rank order. All ranks call it together."""
    pid = os.getpid()
    mine = Peer(f"{mesh.describe()}, pid {pid} on {socket.gethostname()}", pid, machine(), started(pid))
    return gather_objects(mine, mesh.group("world"))


def lost(peers: list[Peer], error: Exception) -> str | None:
    """Which peers have died, where an error may come of that: a broken connection names an address and no rank.

    Only this machine's can be looked up; a process of another one shows in that one's own output. None: none is known.
    """
    end = time.monotonic() + PATIENCE
    here = [peer for peer in peers if peer.machine == machine() and peer.started is not None]
    while True:
        dead = [peer.name for peer in here if started(peer.pid) != peer.started]
        if dead:
            return f"{', '.join(dead)} died (killed, or out of memory?)"
        if "onnection " not in str(error) or time.monotonic() > end:    # gloo: Connection closed by peer, reset by peer
            return None
        time.sleep(0.05)


def machine() -> str:
    """Identifies the boot and the pid namespace in which pids are comparable."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:
        pass
    return " ".join(parts)


def started(pid: int) -> str | None:
    """When a living process began, which tells it from a later one under the same number; None for a dead one."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    except OSError:
        pass
    if Path("/proc/self/stat").exists():
        return None
    try:
        os.kill(pid, 0)
        return "alive"
    except ProcessLookupError:
        return None
    except PermissionError:
        return "alive"
