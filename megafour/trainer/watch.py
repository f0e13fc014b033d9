"""The end of a run that hangs: which rank waits for what, which one does not answer, and where each stands."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from megafour.comm.objects import gather_objects
from megafour.mesh import Mesh
from megafour.trainer.peers import meet
from megafour.world import STARTUP_TIMEOUT

BACKSTOP = timedelta(seconds=60)
"""How much longer than the watch torch's own timeouts wait, which end a process without saying who is missing."""


class HangError(Exception):
    """A collective did not complete in time; one line says which, and who is missing."""


@dataclass
class Place:
    """Where one rank is."""

    rank: int
    doing: str
    """`step 5, forward`."""
    waiting: str | None
    """What it waits for; None: for no other rank."""
    among: list[int]
    """Ranks that take part in that, where it is known."""
    seconds: float
    """For how long."""
    at: str
    """The innermost line of this project that its main thread is in."""
    stacks: str
    """Every thread's stack."""


class HangWatch:
    """A thread beside training. When a wait outlasts the limit it writes where this rank is, collects what the others
    write, says in one line who is missing, and ends the process: the main thread, inside a collective, cannot.

    What is waited for comes from the mesh's `waits`, and from torch's flight recorder for the collectives of other
    threads (a save in the background). A rank that waits for nothing itself answers once another one has asked.
    """

    def __init__(self, mesh: Mesh, logs: Path, seconds: float, ended: Callable[[str], None],
                 leave: Callable[[int], Any] = os._exit) -> None:
        """Begin to watch, with the long limit of a start. Every rank calls it together.

        Args:
            mesh: all ranks of it.
            logs: the run's folder of logs, which all ranks see.
            seconds: how long a collective may take once the first step is done.
            ended: called on one rank with the line that says why, before any rank leaves.
            leave: ends the process, with that exit code.
        """
        self.mesh, self._seconds, self._ended, self._leave = mesh, seconds, ended, leave
        self.limit = max(STARTUP_TIMEOUT.total_seconds(), seconds)
        self.peers = meet(mesh)
        self.names = [peer.name for peer in self.peers]
        folders = gather_objects(f"hang-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}", mesh.group("world"))
        self.folder = Path(logs) / folders[0]       # the first rank's: one name, and none of an earlier start's
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang-watch", daemon=True)
        self._thread.start()

    @property
    def every(self) -> float:
        """Seconds between two looks."""
        return min(5.0, max(0.1, self._seconds / 20))

    def shorten(self) -> None:
        """The first step is done: from now on a wait may last `seconds`."""
        self.limit = self._seconds
        self.mesh.shorten_timeout(timedelta(seconds=self._seconds) + BACKSTOP)

    def close(self) -> None:
        """Stop watching."""
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(self.every):
            waited = max((seconds for _, _, seconds in self.waiting()), default=0.0)
            if waited > self.limit or self.folder.is_dir():
                try:
                    self._report()
                finally:        # whatever fails there, a full disk say: this rank must not wait for ever
                    sys.stderr.flush()
                    self._leave(1)
                return

    def waiting(self) -> list[tuple[str, tuple[int, ...], float]]:
        """What this rank's threads wait for: in words, among which ranks, since how many seconds; training's first."""
        found = [(now.words, now.ranks, time.perf_counter() - now.since) for now in self.mesh.waits.all_now]
        for entry in _in_flight():
            found.append((f"{entry['profiling_name'].removeprefix('gloo:')} over {entry['process_group'][-1]}", (),
                          time.time() - entry["time_created_ns"] / 1e9))
        return found

    def _place(self) -> Place:
        waits, main = self.mesh.waits, threading.main_thread().ident
        waiting = self.waiting()
        frames = sys._current_frames()
        stacks = [f"thread {thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
                  for thread in threading.enumerate()
                  if thread.ident in frames and thread is not threading.current_thread()]
        own = [frame for frame in traceback.extract_stack(frames[main] if main in frames else None)
               if "megafour" in frame.filename and "comm" not in Path(frame.filename).parts]
        at = f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else "nowhere in this project"
        doing = f"step {waits.step}, {waits.phase}" if waits.step else waits.phase
        words, among, seconds = waiting[0] if waiting else (None, (), 0.0)
        return Place(self.mesh.rank, doing, words, list(among), seconds, at, "\n".join(stacks))

    def _report(self) -> None:
        """Write this rank's place, wait for the others' a little, and let the first one say what they tell together."""
        place = self._place()
        self.folder.mkdir(parents=True, exist_ok=True)
        aside = self.folder / f"rank-{place.rank}.tmp"
        aside.write_text(json.dumps(asdict(place)), encoding="utf-8")
        aside.rename(aside.with_suffix(".json"))
        (self.folder / f"flight-{place.rank}").write_bytes(_flight_recording())
        # A shared file system may hide for a minute, from ranks that wait for nothing, that there is a report.
        end = time.monotonic() + max(10 * self.every, self._seconds / 10)
        while len(places := self._places()) < self.mesh.world and time.monotonic() < end:
            time.sleep(self.every / 4)
        try:
            with open(self.folder / "report.txt", "x", encoding="utf-8") as file:
                line = summary(places, self.names, self.limit)
                file.write(f"{line}\n\n{details(places, self.names)}")
        except FileExistsError:
            time.sleep(2 * self.every)      # torchrun ends all ranks as soon as one exits: the line must be said first
            return
        line += f"; where each rank stands: {self.folder / 'report.txt'}"
        get_error_handler().record_exception(HangError(line))      # what torchrun shows as the root cause
        self._ended(line)

    def _places(self) -> list[Place]:
        found = []
        for path in sorted(self.folder.glob("rank-*.json")):
            found.append(Place(**json.loads(path.read_text(encoding="utf-8"))))
        return sorted(found, key=lambda place: place.rank)


def summary(places: list[Place], names: list[str], limit: float) -> str:
    """One line: who does not answer, who is busy with something else, and who waits for what.

    Args:
        places: of the ranks that answered.
        names: of all ranks, in words.
        limit: seconds that a wait may last: run.timeout_seconds, or that of the start.
    """
    waiting = [place for place in places if place.waiting is not None]
    absent = {*range(len(names))} - {place.rank for place in waiting}
    # Most wait for ranks that wait themselves: a wait for one that does not is where it began.
    first = max(waiting, key=lambda place: (bool(absent & {*place.among}), place.seconds), default=None)
    silent = [names[rank] for rank in sorted(absent - {place.rank for place in places})]
    busy = [f"{names[place.rank]} waits for no rank, in {place.doing}, at {place.at}"
            for place in places if place.waiting is None]
    parts = ["a collective hangs" if first is None else
             f"{first.waiting} did not complete in {limit:g} s (run.timeout_seconds)"]
    if silent:
        parts.append(f"no answer from {_few(silent)}")
    parts += busy[:3]
    if not silent and not busy:
        parts.append("every rank waits for another one")
    parts.append("waiting: " + _few([f"{names[p.rank].split(', pid')[0]} in {p.doing} for {p.waiting}, "
                                     f"{p.seconds:.0f} s" for p in waiting]))
    return "; ".join(parts)


def details(places: list[Place], names: list[str]) -> str:
    """For every rank: what it does, what it waits for, and the stacks of its threads."""
    answered = {place.rank: place for place in places}
    lines = []
    for rank, name in enumerate(names):
        place = answered.get(rank)
        if place is None:
            lines.append(f"{name}: no answer: stopped, or its machine cannot be reached\n")
            continue
        what = f"waits for {place.waiting}, {place.seconds:.1f} s" if place.waiting else "waits for no rank"
        lines.append(f"{name}: {place.doing}, {what}\n{place.stacks}")
    return "\n".join(lines)


def _few(words: list[str], most: int = 4) -> str:
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def _in_flight() -> list[dict[str, Any]]:
    """Gloo's collectives that torch's flight recorder has seen begin and not end.

    NCCL's are not judged by it: the parts of a batch are recorded and never marked as ended.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return []
    entries = json.loads(dump(True, True)).get("entries", [])
    return [e for e in entries if not e["retired"] and e["profiling_name"].startswith("gloo:")]


def _flight_recording() -> bytes:
    """torch's flight recorder of this rank, as its analyzer (`torchfrtrace`) reads it; empty without one."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)
    return b"" if dump is None else dump(True, True, False)
