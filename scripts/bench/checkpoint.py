"""Saving and loading a large checkpoint on two ranks: time, rate against plain writers, and memory.

    torchrun --standalone --nproc-per-node 2 scripts/bench/checkpoint.py [--parameters 4e8] [--folder DIR] [--repeat 3]

Every rank holds half of a model's state, random: bf16 weights, and fp32 masters and moments cut flat as ZeRO cuts them,
which are what a checkpoint holds. Plain writers put the same bytes into one file a rank, with fsync, in turn with the
saves. Prints a table and, as JSON, its numbers; exits 1 where a bound of --check does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from megafour.checkpoint import store
from megafour.checkpoint.background import BackgroundSaver
from megafour.checkpoint.tensors import LogicalTensor, flat_parts

GIB = 2**30
WIDTH = 4096


class PeakMemory:
    """Largest resident memory of this process while the block runs, in bytes, sampled every few milliseconds."""

    def __enter__(self) -> PeakMemory:
        self.bytes, self._end = resident(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._end.wait(0.005):
            self.bytes = max(self.bytes, resident())

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text("utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def state(parameters: int, rank: int, world: int) -> tuple[torch.Tensor, list[LogicalTensor]]:
    """This rank's share: its bf16 weights, and its flat shard of masters and moments as logical tensors."""
    rows = max(parameters // (16 * WIDTH), world)         # sixteen matrices
    held, generator = [], torch.Generator().manual_seed(rank)
    for kind in ("weights", "exp_avg", "exp_avg_sq"):
        for layer in range(16):
            total = rows * WIDTH
            start, stop = total * rank // world, total * (rank + 1) // world
            flat = torch.randn(stop - start, generator=generator)
            held.append(LogicalTensor(f"{kind}/layers.{layer}.weight", (rows, WIDTH), torch.float32,
                                      flat_parts((0, 0), (rows, WIDTH), start, stop, flat)))
    weights = torch.zeros(16 * rows * WIDTH // world, dtype=torch.bfloat16)
    weights.fill_(1.0)
    return weights, held


def timed(work: Callable[[], object]) -> float:
    """Seconds of a piece of work, from the moment that all ranks begin until the last one is done."""
    dist.barrier()
    began = time.monotonic()
    work()
    dist.barrier()
    return time.monotonic() - began


def write_plain(path: Path, held: list[LogicalTensor]) -> None:
    """The same bytes as one file."""
    with open(path, "wb", buffering=0) as file:
        for tensor in held:
            for _, _, part in tensor.parts:
                view = memoryview(part.numpy()).cast("B")
                for first in range(0, len(view), 1 << 24):
                    file.write(view[first : first + (1 << 24)])
        os.fsync(file.fileno())


def measure(folder: Path, parameters: int, repeat: int) -> dict[str, float]:
    """All numbers, equal on every rank: medians over `repeat` rounds; memory is the largest of all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    empty = resident()
    weights, held = state(parameters, rank, world)
    share = weights.nbytes + sum(part.nbytes for one in held for _, _, part in one.parts)
    total = world * sum(part.nbytes for one in held for _, _, part in one.parts)
    plain, sync, load, behind, blocked = ([] for _ in range(5))
    plain_file = folder / f"plain-{rank}"
    with PeakMemory() as memory:
        for _ in range(repeat):
            plain.append(timed(lambda: write_plain(plain_file, held)))
            plain_file.unlink()
            sync.append(timed(lambda: store.save(folder, 1, held, {}, {}, dist.group.WORLD)))
            load.append(timed(lambda: store.load(store.step_path(folder, 1), held, dist.group.WORLD)))
    saver = BackgroundSaver(dist.group.WORLD)
    with PeakMemory() as behind_memory:
        for step in range(repeat + 1):
            blocked.append(timed(lambda: saver.start(folder, step, held, {}, {}, lambda path: None)))   # noqa: B023
            behind.append(timed(saver.wait))
    peaks = torch.tensor([memory.bytes - empty - share, behind_memory.bytes - empty - share, share],
                         dtype=torch.float64)
    dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    median = statistics.median
    return {
        "checkpoint_bytes": total, "share_bytes": float(peaks[2]), "plain_seconds": median(plain),
        "save_seconds": median(sync), "load_seconds": median(load), "background_seconds": median(behind[1:]),
        "save_rate_of_plain": median(plain) / median(sync), "load_rate_of_plain_write": median(plain) / median(load),
        "blocked_seconds": median(blocked[1:]), "blocked_share_of_save": median(blocked[1:]) / median(sync),
        "memory_over_share_gib": float(peaks[0]) / GIB, "background_memory_over_share_gib": float(peaks[1]) / GIB,
    }


def broken_bounds(found: dict[str, float]) -> list[str]:
    """What does not hold of: half a plain writer's rate, a share plus 1 GiB, 15 % of a save's time."""
    bounds = {
        "save_rate_of_plain >= 0.5": found["save_rate_of_plain"] >= 0.5,
        "load_rate_of_plain_write >= 0.5": found["load_rate_of_plain_write"] >= 0.5,
        "memory_over_share_gib <= 1": found["memory_over_share_gib"] <= 1,
        "background_memory_over_share_gib <= share + 1":
            found["background_memory_over_share_gib"] <= found["share_bytes"] / GIB + 1,
        "blocked_share_of_save <= 0.15": found["blocked_share_of_save"] <= 0.15,
    }
    return [text for text, holds in bounds.items() if not holds]


def main() -> int:
    """Measure on the ranks of this launch, in a folder that is removed afterwards."""
    parser = argparse.ArgumentParser(description="Time of saving and loading a checkpoint, and its memory.")
    parser.add_argument("--parameters", type=lambda text: int(float(text)), default=400_000_000)
    parser.add_argument("--folder", type=Path, default=Path("bench-checkpoint"), help="where to write; not there yet")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--check", action="store_true", help="exit 1 where a bound does not hold")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    if first:
        args.folder.mkdir(parents=True)
    dist.barrier()
    try:
        found = measure(args.folder, args.parameters, args.repeat)
    finally:
        if first:
            shutil.rmtree(args.folder, ignore_errors=True)
    if first:
        for name, value in found.items():
            print(f"{name:36} {value:,.3f}")
        print(json.dumps(found))
    wrong = broken_bounds(found) if args.check else []
    if wrong and first:
        print("does not hold: " + "; ".join(wrong), file=sys.stderr)
    dist.barrier()      # torchrun ends all ranks as soon as one exits with 1
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
