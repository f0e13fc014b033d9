#!/usr/bin/env python3
"""Training speed: megafour against plain PyTorch (plain_llama.py), run in turn on the same machine.

  python scripts/bench/train.py                      the whole table, fp32 and bf16, medians of 3 repeats
  python scripts/bench/train.py --only 1p,dp2 --dtype bf16 --repeats 1
  python scripts/bench/train.py --flat               memory of a 100-step run instead

The model is a Llama 512×8 (8 heads, 4 K/V heads, ffn 1408, vocabulary 32,000), sequence 1024, global batch 4 in
micro-batches of 1, random tokens, AdamW. One process has all threads, two processes half of them each. bf16 means
bf16 weights with fp32 masters on both sides (`plain_llama.py --dtype mixed`). Keep the machine quiet meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parents[2]
SEQ, BATCH, VOCAB = 1024, 4, 32000

CASES: dict[str, tuple[int, dict]] = {
    "1p": (1, {}),
    "dp2": (2, {"dp": 2}),
    "tp2": (2, {"tp": 2, "sequence_parallel": False}),
    "tp2-sp": (2, {"tp": 2, "sequence_parallel": True}),
    "pp2": (2, {"pp": 2, "pipeline": {"schedule": "1f1b"}}),
    "cp2": (2, {"cp": 2}),
}
"""Each case's processes and `parallel` section. tp2 counts as whichever of its two forms is faster."""


@dataclass
class Sample:
    """One run: tokens per second, seconds from launch to the end of the first step, peak resident GiB of one process
    over its steps (the largest of them; the checkpoint that a run writes at its end is not in it)."""

    speed: float
    start: float
    memory: float


def launch(command: list[str], threads: int, log: Path) -> float:
    """Run a command to its end. Returns the wall time of its launch."""
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
    env = {k: v for k, v in env.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    began = time.time()
    with log.open("w", encoding="utf-8") as out:
        code = subprocess.run(command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT).returncode
    if code:
        sys.exit(f"error: `{' '.join(command)}` ended with {code}:\n{log.read_text('utf-8')[-3000:]}")
    return began


def run_plain(dtype: str, args: argparse.Namespace, work: Path, keep_heap: bool) -> Sample:
    """One run of the yardstick."""
    log = work / "plain.log"
    command = [sys.executable, str(ROOT / "scripts/bench/plain_llama.py"), "--threads", str(args.threads),
               "--dtype", {"fp32": "fp32", "bf16": "mixed"}[dtype], "--steps", str(args.steps)]
    launch(command + ["--keep-heap"] * keep_heap, args.threads, log)
    answer = json.loads(log.read_text("utf-8").splitlines()[-1])
    return Sample(answer["tok_s"], answer["startup_s"], answer["rss_gib"])


def run_product(case: str, dtype: str, args: argparse.Namespace, work: Path) -> Sample:
    """One run of megafour on a mesh; its speed is the median over the steps after the first."""
    world, parallel = CASES[case]
    metrics, began = train(world, config(work, dtype, args.steps + 1, parallel), args.threads // world, work)
    speed = statistics.median(line["tokens_per_second"] for line in metrics[1:])
    return Sample(speed, metrics[0]["time"] - began, metrics[-1]["peak_memory_bytes"] / 2**30)


def train(world: int, settings: dict, threads: int, work: Path) -> tuple[list[dict], float]:
    """Train with `settings` on `world` processes. Returns the metrics and the time of the launch."""
    run = Path(settings["run"]["dir"])
    shutil.rmtree(run, ignore_errors=True)
    path = work / "bench.yaml"
    path.write_text(yaml.safe_dump(settings), "utf-8")
    starter = [sys.executable] if world == 1 else \
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    began = launch([*starter, "train.py", "--config", str(path)], max(1, threads), work / "train.log")
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    shutil.rmtree(run)
    return metrics, began


def config(work: Path, dtype: str, steps: int, parallel: dict) -> dict:
    """The yardstick's model and batch as a megafour configuration."""
    return {
        "run": {"name": "bench", "dir": str(work / "run"), "device": "cpu"},
        "model": {"num_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4,
                  "ffn_hidden_size": 1408, "vocab_size": VOCAB},
        "parallel": parallel,
        "data": {"train": [{"path": str(work / "random")}], "seq_length": SEQ},
        "train": {"steps": steps, "global_batch_size": BATCH, "micro_batch_size": 1, "precision": dtype},
        "lr_schedule": {"name": "constant"},
        "checkpoint": {"every": 0, "resume": "never"},
        "logging": {"tensorboard": False},
    }


def random_corpus(prefix: Path, samples: int) -> None:
    """Write random tokens as a Megatron-format dataset, large enough for `samples` samples."""
    from megafour.data.indexed import IndexedWriter

    rng = np.random.default_rng(0)
    with IndexedWriter(prefix, VOCAB) as writer:
        for _ in range(samples):
            writer.add(rng.integers(0, VOCAB, SEQ + 1))


def flat(args: argparse.Namespace, work: Path) -> None:
    """Print the memory of a small 100-step run as it goes on."""
    settings = config(work, "fp32", 100, {})
    settings["model"] |= {"num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 352}
    settings["data"]["seq_length"] = 256
    metrics, _ = train(1, settings, args.threads, work)
    for step in (2, 10, 25, 50, 75, 100):
        print(f"step {step:3d}: peak {metrics[step - 1]['peak_memory_bytes'] / 2**20:8.1f} MiB")


def table(title: str, columns: list[str], rows: list[tuple[str, list[str]]]) -> None:
    """Print a Markdown table."""
    print(f"\n{title}\n\n| | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for name, cells in rows:
        print(f"| {name} | {' | '.join(cells)} |")


def report(results: dict[str, dict[str, list[Sample]]], cases: list[str], repeats: int) -> None:
    """Print speeds, ratios, start-up and memory of every dtype."""
    def median(samples: list[Sample], field: str) -> float:
        return statistics.median(getattr(s, field) for s in samples)

    names = ["plain", "plain --keep-heap", *cases]
    for dtype, runs in results.items():
        rows = []
        for name in names:
            speeds = [s.speed for s in runs[name]]
            ratios = [f"{median(runs[name], 'speed') / median(runs[base], 'speed'):.2f}" for base in names[:2]]
            memory = median(runs[name], "memory")
            rows.append((name, [f"{statistics.median(speeds):.0f} ({min(speeds):.0f}–{max(speeds):.0f})", *ratios,
                                f"{median(runs[name], 'start'):.1f}", f"{memory:.2f}",
                                f"{memory / median(runs[names[1]], 'memory'):.2f}"]))
        table(f"**{dtype}**, medians of {repeats}", ["tokens/s (range)", "÷ plain", "÷ plain --keep-heap",
                                                   "launch to first step, s", "peak GiB of a process",
                                                   "÷ plain --keep-heap"], rows)


def main() -> None:
    """Run the yardstick and the product in turn, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES), help=f"cases, of {','.join(CASES)}")
    parser.add_argument("--dtype", default="fp32,bf16", help="fp32, bf16 or both")
    parser.add_argument("--repeats", type=int, default=3, help="times that the whole round is run")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a run, after one that is not")
    parser.add_argument("--threads", type=int, default=2, help="threads of one process; two get half each")
    parser.add_argument("--flat", action="store_true", help="show the memory of a 100-step run instead")
    parser.add_argument("--json", type=Path, help="also write every single figure here")
    args = parser.parse_args()
    cases, dtypes = args.only.split(","), args.dtype.split(",")
    unknown = [c for c in cases if c not in CASES] + [d for d in dtypes if d not in ("fp32", "bf16")]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    with tempfile.TemporaryDirectory(prefix="megafour-bench-") as folder:
        work = Path(folder)
        random_corpus(work / "random", samples=BATCH * max(args.steps + 1, 25))
        if args.flat:
            return flat(args, work)
        results: dict[str, dict[str, list[Sample]]] = {d: {} for d in dtypes}
        for turn in range(args.repeats):
            for dtype in dtypes:
                for name in ("plain", "plain --keep-heap", *cases):
                    sample = run_plain(dtype, args, work, "keep" in name) if name.startswith("plain") \
                        else run_product(name, dtype, args, work)
                    results[dtype].setdefault(name, []).append(sample)
                    print(f"turn {turn + 1} {dtype} {name:18s} {sample.speed:8.0f} tokens/s"
                          f"   start {sample.start:5.1f} s   {sample.memory:5.2f} GiB", file=sys.stderr, flush=True)
        report(results, cases, args.repeats)
        if args.json:
            args.json.write_text(json.dumps({d: {n: [vars(s) for s in r] for n, r in runs.items()}
                                             for d, runs in results.items()}, indent=1), "utf-8")


if __name__ == "__main__":
    main()
