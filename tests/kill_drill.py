"""SIGKILL of a random rank at random moments, the run started again after each, in a process of its own.

    python -m tests.kill_drill FOLDER WORLD VALUES KILLS SEED

VALUES: the run's config as JSON. Prints one JSON object: the number of kills, how many left a save unfinished, the
longest time that the other ranks took to end, and the number of runs whose losses differ from the uninterrupted run's.
Ranks are forked from a process that has imported torch and run nothing: a start costs a fraction of a second.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from megafour.verify.pool import PRELOAD

PATIENCE = 180.0
"""Seconds in which all ranks must have ended once one was killed."""
MEETING = 3.0
"""The same while they meet: a rank that never comes is waited for in a start, and it is the launcher that ends the
others. Here the drill is the launcher."""


def fork_ranks(world: int, values: dict, store: Path) -> list[int]:
    """Start the ranks of one run; their process numbers."""
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            os._exit(_rank(rank, world, values, store))
        pids.append(pid)
    return pids


def _rank(rank: int, world: int, values: dict, store: Path) -> int:
    import torch
    import torch.distributed as dist

    from tests import training

    log = os.open(store.with_name("output"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        return training.train(rank, world, values)
    except BaseException:
        traceback.print_exc()
        return 1


def wait_all(pids: list[int], patience: float, meet: Callable[[], bool] = lambda: False) -> tuple[list[int], float]:
    """Exit statuses of the ranks, and the seconds it took; a rank that does not end in time is killed and fails.

    `meet`: whether the ranks are still meeting; then those that are left are killed as a launcher would.
    """
    began, codes = time.monotonic(), dict.fromkeys(pids)
    while None in codes.values():
        for pid in [pid for pid, code in codes.items() if code is None]:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() - began > MEETING and meet():
                os.kill(pid, signal.SIGKILL)
            elif time.monotonic() - began > patience:
                for one in [one for one, code in codes.items() if code is None]:
                    os.kill(one, signal.SIGKILL)
                raise TimeoutError(f"a rank was still there {patience} s after another one was killed")
        time.sleep(0.01)
    return [codes[pid] for pid in pids], time.monotonic() - began


def drill(folder: Path, world: int, values: dict, kills: int, seed: int) -> dict:
    """Run once untouched, then again and again under fire until `kills` kills are done; compare the losses."""
    chance, done, runs, unfinished, longest, different = random.Random(seed), 0, 0, 0, 0.0, 0
    stores = iter(range(10**6))

    def start(place: Path) -> list[int]:
        place.mkdir(exist_ok=True)
        return fork_ranks(world, {**values, "run": {"name": "drill", "dir": str(place / "run")}},
                          folder / f"store-{next(stores)}")

    def losses(place: Path) -> list[tuple[int, float]]:
        lines = (place / "run" / "metrics.jsonl").read_text().splitlines()
        return [(line["step"], line["loss"]) for line in map(json.loads, lines)]

    codes, length = wait_all(start(folder / "untouched"), 10 * PATIENCE)
    assert set(codes) == {0}, (folder / "output").read_text()[-3000:]
    while done < kills:
        runs += 1
        place = folder / f"run-{runs}"
        while True:
            pids, started = start(place), time.time()
            if done == kills:
                codes, _ = wait_all(pids, 10 * PATIENCE)
                assert set(codes) == {0}, (folder / "output").read_text()[-3000:]
                break
            time.sleep(chance.uniform(0.0, length))
            victim = chance.choice(pids)
            os.kill(victim, signal.SIGKILL)
            codes, seconds = wait_all(pids, PATIENCE, lambda s=started, p=place: _stepped(p) < s)
            if set(codes) == {0} or codes[pids.index(victim)] != -signal.SIGKILL:
                length *= 0.8       # the run was over before the kill: this machine has become faster
                break
            done, longest = done + 1, max(longest, seconds)
            unfinished += any((place / "run" / "checkpoints").glob("*.tmp"))
            finished = _status(place).get("state") == "finished"
            # Once the last checkpoint has its name, a rank that has heard of it is done, and one that has not fails.
            last = (place / "run" / "checkpoints" / f"step-{values['train']['steps']:08d}" / "manifest.json").exists()
            assert finished or last or 0 not in codes, f"{codes}: a rank ended well although another one was killed"
            if finished:
                break       # killed at its exit
        different += losses(place) != losses(folder / "untouched")
    return {"kills": done, "runs": runs, "unfinished_saves": unfinished, "longest_end": longest, "different": different}


def _stepped(place: Path) -> float:
    """When the last step was done, in seconds since 1970; 0: never."""
    try:
        return json.loads((place / "run" / "metrics.jsonl").read_text().splitlines()[-1])["time"]
    except (OSError, IndexError, ValueError):
        return 0.0


def _status(place: Path) -> dict:
    try:
        return json.loads((place / "run" / "status.json").read_text())
    except (OSError, ValueError):
        return {}


if __name__ == "__main__":
    for module in (*PRELOAD, "tests.training"):
        importlib.import_module(module)
    where, ranks, config, count, number = sys.argv[1:]
    print(json.dumps(drill(Path(where), int(ranks), json.loads(config), int(count), int(number))))
