"""Joining the world: where the ranks of a launch meet, whom they wait for, and the default process group."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Callable, Collection
from datetime import timedelta

import torch
import torch.distributed as dist

from megafour.config.errors import say_line
from megafour.config.launch import Launch, LaunchError

STARTUP_TIMEOUT = timedelta(minutes=30)
"""For the first step and all before it: files are read, kernels compiled."""

FIRST_WORD, NEXT_WORD = 5.0, 60.0
"""Seconds until a rank that waits at start says for whom, and between two such lines."""

UNKNOWN_HOST = 60.0
"""Seconds for which a name that does not resolve is tried again: a cluster's name server may be late."""

STOP_GRACE = 5.0
"""Seconds that ranks which are still missing have to come after a request to stop, so that all end alike."""


def start_distributed(launch: Launch, device: torch.device, timeout: timedelta = STARTUP_TIMEOUT,
                      stopped: Callable[[], bool] = lambda: False) -> None:
    """Join the world over NCCL (GPU, with gloo for CPU tensors) or gloo; a world of one joins nothing.

    Args:
        launch: who this rank is.
        device: where it computes.
        timeout: how long it waits for the others.
        stopped: asked while it waits; where it says yes, a world that does not complete soon is given up.
    Raises:
        ConfigError: MASTER_ADDR or MASTER_PORT is no place to meet at.
        LaunchError: the ranks do not come together; names those that have not come.
    """
    launch.check_address()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if launch.world == 1:
        return
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")   # torch's flight recorder, for the report of a hang
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    waiting = Waiting(launch, timeout.total_seconds(), stopped)
    try:
        store = meet(launch, timeout, waiting)
        dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world, timeout=timeout,
                                device_id=device if device.type == "cuda" else None)
    except RuntimeError as error:       # of torch's store and of the backends' connections; LaunchError is not one
        what = str(error).splitlines()[0]
        if "EADDRINUSE" in what or "address already in use" in what.lower() or "failed to listen" in what.lower():
            raise LaunchError(f"the ranks cannot meet at {launch.address}: {what}; give another MASTER_PORT, or leave "
                              f"the choice to `torchrun --standalone`") from error
        raise LaunchError(f"the ranks cannot meet at {launch.address}: {what}; the log of the rank that has failed "
                          f"first, often rank 0, says why") from error


def stop_distributed() -> None:
    """Leave the world, if one was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


class Waiting:
    """What a rank says while it waits at start: for whom, after a few seconds and then every minute."""

    def __init__(self, launch: Launch, seconds: float, stopped: Callable[[], bool]) -> None:
        """Begin.

        Args:
            launch: who waits. Of the ranks that one torchrun has started only the first says so.
            seconds: until it gives up.
            stopped: whether this process was asked to stop.
        """
        self._launch, self._stopped = launch, stopped
        self._begun = time.monotonic()
        self._limit, self._next = seconds, FIRST_WORD
        self._speaks = launch.local_rank == 0 or "TORCHELASTIC_RUN_ID" not in os.environ

    @property
    def seconds(self) -> float:
        """Since the wait began."""
        return time.monotonic() - self._begun

    def look(self, whom: Callable[[], str]) -> bool:
        """Say whom this rank waits for, if it is time; returns whether it was.

        Raises:
            LaunchError: it has waited for too long, or was asked to stop.
        """
        if self._stopped():
            self._limit = min(self._limit, self.seconds + STOP_GRACE)
        launch = self._launch
        if self.seconds > self._limit:
            raise LaunchError(f"rank {launch.rank} has waited {self.seconds:.0f} s at {launch.address} for {whom()}: "
                              f"start all {launch.world} ranks, or a smaller world")
        if self.seconds < self._next:
            return False
        self._next = self.seconds + NEXT_WORD
        if self._speaks:
            say_line(f"rank {launch.rank} waits at {launch.address} for {whom()}, {self.seconds:.0f} s")
        return True


def meet(launch: Launch, timeout: timedelta, waiting: Waiting) -> dist.Store:
    """The store that all ranks of this start share, once all have come.

    Raises:
        LaunchError: not all come.
    """
    resolve(launch.host, waiting)
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = launch.rank == 0 and not agent
    if not serves:
        reach(launch, "torchrun's agent" if agent else "rank 0", waiting)
    # Rank 0 connects to localhost: MASTER_ADDR may resolve to another host there.
    store: dist.Store = dist.TCPStore("localhost" if serves else launch.host, int(launch.port), is_master=serves,
                                      timeout=timeout, wait_for_workers=False, multi_tenant=serves)
    return together(store, launch, waiting, anew="TORCHELASTIC_RUN_ID" in os.environ)


def resolve(host: str, waiting: Waiting) -> None:
    """Wait until a host's name resolves.

    Raises:
        LaunchError: it has not for a minute.
    """
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not a host name"
        if waiting.seconds > UNKNOWN_HOST:
            raise LaunchError(f"MASTER_ADDR={host} does not resolve: {reason}; set it to a name or an address of rank "
                              f"0's host that every node knows")
        waiting.look(lambda why=reason: f"the name {host} (MASTER_ADDR), which does not resolve: {why}")  # type: ignore[misc]
        time.sleep(0.5)


def reach(launch: Launch, whom: str, waiting: Waiting) -> None:
    """Wait until somebody listens where the ranks meet.

    Raises:
        LaunchError: nobody does in time.
    """
    while True:
        try:
            socket.create_connection((launch.host, int(launch.port)), timeout=5).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
        waiting.look(lambda why=reason: f"{whom}, which does not answer there: {why}")      # type: ignore[misc]
        time.sleep(0.2)


def together(store: dist.Store, launch: Launch, waiting: Waiting, *, anew: bool) -> dist.Store:
    """Wait until all ranks have come; returns the part of the store that only this start of them uses.

    torchrun keeps one store over its restarts, and with it the addresses of the ranks that died: a new rank that reads
    them before they are written anew would connect to nobody. The number of restarts does not tell the starts apart,
    for nodes count their own. So the first rank draws a name, and gives it to each rank under a word which that one has
    drawn.

    Args:
        store: where the ranks meet.
        launch, waiting: who waits.
        anew: whether the store may hold what an earlier start has left.
    """
    rank, name = launch.rank, uuid.uuid4().hex
    if rank == 0:
        ours = dist.PrefixStore(f"start/{name}", store) if anew else store
        _await_others(store, ours, name if anew else None, launch.world, waiting)
        return ours
    ours = store
    if anew:
        store.set(f"start/hello/{rank}", name)
        _await_key(store, f"start/name/{name}", waiting, lambda: "rank 0")
        ours = dist.PrefixStore(f"start/{store.get(f'start/name/{name}').decode()}", store)
    ours.set(f"here/{rank}", "")
    _await_key(ours, "all", waiting, lambda: ours.get("missing").decode() if ours.check(["missing"]) else "other ranks")
    return ours


def _await_others(store: dist.Store, ours: dist.Store, name: str | None, world: int, waiting: Waiting) -> None:
    """The first rank: answer each of the others, and tell all when they are there."""
    missing, answered = set(range(1, world)), dict[int, bytes]()
    while True:
        missing = {other for other in missing if not ours.check([f"here/{other}"])}
        if not missing:
            ours.set("all", "")
            return
        for other in missing if name is not None else ():
            if store.check([f"start/hello/{other}"]):
                word = store.get(f"start/hello/{other}")
                if answered.get(other) != word:     # an old word is answered too, and nobody waits for that answer
                    store.set(f"start/name/{word.decode()}", str(name))
                    answered[other] = word
        words = _in_words(missing, world)
        if waiting.look(lambda said=words: said):       # type: ignore[misc]
            ours.set("missing", words)
        time.sleep(0.02)


def _await_key(store: dist.Store, key: str, waiting: Waiting, whom: Callable[[], str]) -> None:
    while True:
        with contextlib.suppress(dist.DistStoreError):      # not within that second
            store.wait([key], timedelta(seconds=1))
            return
        waiting.look(whom)


def _in_words(ranks: Collection[int], world: int) -> str:
    """`ranks 3, 5-7 of 8`."""
    ends: list[list[int]] = []
    for rank in sorted(ranks):
        if ends and ends[-1][1] == rank - 1:
            ends[-1][1] = rank
        else:
            ends.append([rank, rank])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in ends[:8]]
    return (f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(shown)}{', …' if len(ends) > 8 else ''} of {world}, "
            f"which {'has' if len(ranks) == 1 else 'have'} not come")
