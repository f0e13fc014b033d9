"""What each stage of ZeRO keeps on a rank, counted and resident, beside the formulas: dp 4 on gloo ranks, bf16."""

from __future__ import annotations

import argparse
import gc
import os
import resource
import sys
from typing import Any

import torch

from megafour.config.load import config_from
from megafour.config.rules import resolve
from megafour.config.schema import Config
from megafour.cost.memory import StateBytes, state_bytes
from megafour.trainer.setup import build_mesh, build_state
from megafour.trainer.step import TrainState, train_step
from megafour.trainer.traffic import formulas
from megafour.verify.pool import PRELOAD, Pool
from megafour.verify.toy import toy_batches

VOCAB = 8192
RANKS = 4


def config_of(stage: int, size: int | None, hidden: int, layers: int, precision: str) -> Config:
    """A Llama of `layers` layers on dp 4, three micro-batches a step."""
    return resolve(config_from({
        "model": {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": 8, "num_key_value_heads": 4,
                  "ffn_hidden_size": 3 * hidden, "vocab_size": VOCAB},
        "parallel": {"dp": RANKS, "zero_stage": stage, "zero_size": size}, "data": {"seq_length": 32},
        "train": {"steps": 4, "global_batch_size": 3 * RANKS, "micro_batch_size": 1, "precision": precision}}),
        RANKS, data=False)


def counted(state: TrainState) -> StateBytes:
    """Bytes of the storages of each kind, each storage once."""
    seen: set[int] = set()

    def size(tensors: Any) -> int:
        total = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.numel() and storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
        return total

    buckets, flat = state.buckets.buckets, list(state.optimizer.flat_states())
    return StateBytes(
        weights=size(t for b in buckets for t in (b.weights, b.weight_shard)),
        gradients=size(t for b in buckets for t in (b.grad_shard, b.grads) if t is not None),
        masters=size(t for kind, _, t in flat if kind == "weights"),
        moments=size(t for kind, _, t in flat if kind != "weights"))


def predicted(config: Config, state: TrainState) -> tuple[int, StateBytes]:
    """(elements of this rank's buckets, bytes by the formulas)."""
    step = formulas(config, state.mesh, state.stage.build.vocab_size)
    elements = sum(bucket.numel for bucket in step.buckets())
    return elements, state_bytes(elements, zero_stage=step.zero_stage, shares=step.shares, element=step.element,
                                 moments=2 if config.optimizer.name == "adamw" else 0)


def measure(rank: int, world: int, config: Config) -> tuple[int, StateBytes, StateBytes, int, int]:
    """(elements, counted, predicted, resident growth of the process at its peak, between steps) after two steps."""
    before = resident()
    mesh = build_mesh(config, torch.device("cpu"), ledger=False)
    state = build_state(config, mesh, VOCAB)
    for step in range(2):
        train_step(state, toy_batches(config, config, VOCAB, step, "all", dp_rank=mesh.group("dp").rank,
                                      positions=state.stage.build.positions), step, 1e-3)
    gc.collect()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    elements, want = predicted(config, state)
    return elements, counted(state), want, peak - before, resident() - before


def resident() -> int:
    """Resident bytes of this process (Linux)."""
    with open("/proc/self/statm", encoding="utf-8") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def main(arguments: list[str] | None = None) -> int:
    """Print a table; 1 if a counted number is not the formula's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--precision", default="bf16")
    args = parser.parse_args(arguments)
    print("| ZeRO | weights | gradients | masters | moments | counted, bytes a weight | formula | between steps, MiB | "
          "peak, MiB |\n|---|---|---|---|---|---|---|---|---|")
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"      # glibc keeps freed blocks otherwise, and they count as resident
    wrong = False
    for stage, size in ((0, None), (1, None), (2, None), (3, None), (3, 2)):
        config = config_of(stage, size, args.hidden, args.layers, args.precision)
        with Pool(RANKS, preload=PRELOAD) as pool:      # a new one: a process's peak never goes down
            found = pool.run(measure, RANKS, config, timeout=600)
        elements, got, want, peak, kept = found[0]
        wrong |= any(one[1] != one[2] for one in found)
        parts = [got.weights, got.gradients, got.masters, got.moments, got.total]
        print(f"| {stage}{f' over {size}' if size else ''} | "
              + " | ".join(f"{part / elements:.2f}" for part in parts)
              + f" | {want.total / elements:.2f} | {kept / 2**20:,.0f} | {peak / 2**20:,.0f} |", flush=True)
    print(f"{elements:,} weights with padding, {RANKS} ranks, {args.precision}; counted of rank 0, alike on all")
    return int(wrong)


if __name__ == "__main__":
    import zero_memory  # by its name: the ranks import what they run

    sys.exit(zero_memory.main())
