#!/usr/bin/env python3
"""Context parallelism measured: one attention, split by every method, against one process.

  python scripts/bench/context.py                 time of forward + backward at equal total work, bytes, slowest/mean
  python scripts/bench/context.py --bytes         bytes and slowest/mean alone: the same on any machine, however busy
  python scripts/bench/context.py --overlap       a ring step, the kernel replaced by a sleep as long as the transfer
  python scripts/bench/context.py --accuracy      bf16 against fp64, with 16-bit blocks and with fp32_blocks
  python scripts/bench/context.py --memory        training steps at 131,072 and 32,768 tokens: peak memory of a rank

Attention: 8 heads, 4 K/V heads, head size 64, causal, one sample. `ratio` is the time of one process with all threads
over the time of the ranks, which share the same threads, at least one each; both are taken in turn, so that a load
that comes and goes meets both. Keep the machine quiet for every time; bytes and errors do not depend on it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

CASES = [("ring", "zigzag"), ("ring", "striped"), ("ring", "contiguous"), ("double_ring", "zigzag"),
         ("ulysses", "zigzag"), ("usp", "zigzag"), ("all_gather", "zigzag")]
"""(method, layout) of each row; usp and double_ring need cp 4."""


def launch(world: int, job: str, omp: int, **arguments: object) -> list[dict]:
    """Run `job` of context_ranks.py on `world` fresh processes. Returns each rank's answer."""
    with tempfile.TemporaryDirectory(prefix="megafour-bench-") as folder:
        ranks = []
        for rank in range(world):
            env = {**os.environ, "OMP_NUM_THREADS": str(omp), "PYTHONPATH": str(ROOT),
                   "RANK": str(rank), "WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": "lo"}
            command = [sys.executable, str(ROOT / "scripts/bench/context_ranks.py"), folder, job, json.dumps(arguments)]
            with Path(folder, f"log-{rank}").open("w", encoding="utf-8") as log:
                ranks.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
        codes = [rank.wait() for rank in ranks]
        for rank, code in enumerate(codes):
            if code:
                said = Path(folder, f"log-{rank}").read_text("utf-8")
                sys.exit(f"error: rank {rank} of {job} ended with {code}:\n{said}")
        return [json.loads(Path(folder, f"answer-{rank}").read_text("utf-8")) for rank in range(world)]


def table(header: list[str], rows: list[list[str]]) -> None:
    """Print a Markdown table."""
    for cells in (header, ["---"] * len(header), *rows):
        print(f"| {' | '.join(cells)} |", flush=True)


def speed(args: argparse.Namespace) -> None:
    """Time, ratio, bytes and balance of every method."""
    print(f"\nforward + backward, {args.seq:,} tokens, {args.dtype}, {args.threads} threads in all; medians of "
          f"{args.repeats}; bytes: the ledger's, sent by the busiest rank\n")
    rows = []
    for world in args.cp:
        cases = CASES[:1] if world == 1 else [c for c in CASES if world >= 4 or c[0] not in ("usp", "double_ring")]
        answers = launch(world, "attention", args.threads, cases=cases, seq=args.seq, dtype=args.dtype,
                         threads=args.threads, repeats=0 if args.bytes else args.repeats)
        for i, (method, layout) in enumerate(cases):
            found = [answer["cases"][i] for answer in answers]
            cells = [str(world), method if world > 1 else "one process", layout if world > 1 else ""]
            if not args.bytes:
                split, alone, busy = found[0]["seconds"], found[0]["alone"], [f["kernel"] for f in found]
                level = f"{max(busy) * world / sum(busy):.3f}"
                cells += [f"{split * 1e3:.0f}", f"{alone / split:.2f}", level]
            rows.append([*cells, f"{found[0]['predicted']:.3f}", f"{max(f['bytes'] for f in found):,}",
                         " + ".join(found[0]["primitives"])])
    times = [] if args.bytes else ["ms", "ratio", "slowest/mean, measured"]
    table(["cp", "method", "layout", *times, "slowest/mean, predicted", "bytes", "primitives"], rows)


def overlap(args: argparse.Namespace) -> None:
    """A ring step against the longer of sleep and transfer."""
    print("\none ring step / the longer of its transfer and its sleep, which are as long as each other; without "
          "overlap it would be 2\n")
    rows = []
    for world in [n for n in args.cp if n > 1]:
        answers = launch(world, "overlap", 1, mib=args.mib, repeats=args.repeats)
        rows += [[str(world), phase, f"{args.mib}", *(f"{max(a[phase][key] for a in answers) * 1e3:.1f}"
                                                      for key in ("transfer", "step")),
                  f"{max(a[phase]['step'] / a[phase]['longer'] for a in answers):.3f}"]
                 for phase in ("forward", "backward")]
    table(["cp", "", "MiB a hop", "transfer, ms", "step, ms", "step / longer"], rows)


def accuracy(args: argparse.Namespace) -> None:
    """Relative L2 errors, and the targets."""
    print("\nbf16, 2,048 tokens, ring, zigzag: |x - fp64| / |fp64|, and over that of cp 1. Blocks: `rounded` to bf16,\n"
          "as a 16-bit kernel returns them; `auto`, this machine's; `fp32`, parallel.context.fp32_blocks=true\n")
    rows, base = [], {}
    for world in (1, 2, 4, 8):
        found = launch(world, "accuracy", 1, seq=2048)[0]
        for blocks, errors in found.items():
            base = base or errors
            rows.append([str(world), blocks, *(f"{e:.3e} ({e / base[name]:.3f})" for name, e in errors.items())])
    table(["cp", "blocks", "out", "dq", "dk", "dv"], sorted(rows, key=lambda row: row[1]))


def memory(args: argparse.Namespace) -> None:
    """Peak memory of a rank over a training step, and what of it grows with the sequence."""
    import context_memory

    print(f"\n{context_memory.MODEL}, fp32, a step of one sample; peak resident memory of the largest rank\n")
    rows = []
    for world, seq in ((1, 32768), (4, 32768), (4, 131072)):
        small, large = (context_memory.peak(world, length, args.threads) for length in (1024, seq))
        rows.append([str(world), f"{seq:,}", f"{large / 2**20:.0f}", f"{small / 2**20:.0f}",
                     f"{(large - small) / 2**20:.0f}"])
    table(["cp", "tokens", "peak, MiB", "peak at 1,024 tokens, MiB", "difference: activations, MiB"], rows)


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    for name in ("overlap", "accuracy", "memory", "bytes"):
        what.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--seq", type=int, default=8192, help="tokens of the timed attention")
    parser.add_argument("--cp", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4])
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of all ranks together")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--mib", type=int, default=16, help="K and V of a hop in --overlap")
    args = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load "
          f"{os.getloadavg()[0]:.1f} at the start")
    for name, measure in (("overlap", overlap), ("accuracy", accuracy), ("memory", memory)):
        if getattr(args, name):
            return measure(args)
    speed(args)


if __name__ == "__main__":
    main()
