#!/usr/bin/env python3
"""The ledger against the kernel: bytes that the ledger counts beside those that cross a loopback of its own.

  python scripts/bench/traffic.py                  every case; exit code 1 if one that is judged is off by more than 5%
  python scripts/bench/traffic.py --only ring,pp   cases whose name begins so
  python scripts/bench/traffic.py --markdown       the table for docs/traffic.md

Runs itself again in a private network namespace (`unshare --net`, as root or with user namespaces; Linux with
iproute2), where nothing else can use the loopback. There gloo's ranks talk over TCP, and /proc/net/dev says how many
bytes `lo` transmitted. The ledger's sum over all ranks must be that, but for TCP/IP headers and acknowledgements.
Collectives that a backend may carry out in another way than the convention says are shown, but not judged.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TOKENS, HEADS, KV_HEADS, SIZE, REPEATS = 2048, 8, 4, 64, 3
"""One attention: the sequence, query and K/V heads, head size; and how often it runs between two readings."""

LIMIT = 0.05
"""The largest deviation that passes: headers and acknowledgements of large messages are far below it."""

CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "ring zigzag cp2": ("ring", 2, {}), "ring zigzag cp4": ("ring", 4, {}),
    "ring striped cp4": ("ring", 4, {"layout": "striped"}),
    "ring contiguous cp4": ("ring", 4, {"layout": "contiguous"}),
    "ring zigzag cp4, window 256": ("ring", 4, {"window": 256}),
    "double_ring cp4": ("double_ring", 4, {"inner_ring": 2}),
    "ulysses cp2": ("ulysses", 2, {"ulysses": 2}), "ulysses cp4": ("ulysses", 4, {"ulysses": 4}),
    "ulysses cp4, 1 K/V head": ("ulysses", 4, {"ulysses": 4, "kv_heads": 1}),
    "usp cp4": ("usp", 4, {"ulysses": 2}),
    "all_gather cp4": ("all_gather", 4, {}),
    "pp2 1f1b": ("pipeline", 2, {"schedule": "1f1b"}), "pp4 1f1b": ("pipeline", 4, {"schedule": "1f1b"}),
    "pp4 gpipe": ("pipeline", 4, {"schedule": "gpipe"}),
}
"""What runs, on how many ranks, with which options."""

BY_CONVENTION = ("all_gather",)
"""Beginnings of cases that are shown but not judged: gloo's reduce-scatter costs as much as an all-reduce, twice what
the convention counts."""


def lo_bytes() -> int:
    """Bytes that the loopback has transmitted; every one of them it has also received."""
    line = next(text for text in Path("/proc/net/dev").read_text("utf-8").splitlines()
                if text.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def measure(rank: int, world: int, what: str, options: dict[str, Any]) -> tuple[float, int]:
    """(bytes by this rank's ledger, bytes that `lo` transmitted meanwhile); a first run makes the connections."""
    import torch.distributed as dist

    from megafour.comm.ledger import Ledger

    ledger = Ledger()
    run = (pipeline if what == "pipeline" else attention)(world, what, options, ledger)
    run()
    dist.barrier()
    ledger.reset()
    before = lo_bytes()
    dist.barrier()
    for _ in range(REPEATS):
        run()
    dist.barrier()
    after = lo_bytes()
    dist.barrier()
    return sum(entry.nbytes for entry in ledger.counts.values()), after - before


def attention(world: int, what: str, options: dict[str, Any], ledger: Any) -> Any:
    """One attention, forward and backward, split as `what` says."""
    import torch

    from megafour.kernels.attention import select_attention
    from megafour.mesh import Mesh
    from megafour.parallel.context import METHODS
    from megafour.parallel.context.blocks import Kernel
    from megafour.parallel.context.layout import Layout
    from megafour.parallel.context.mask import Mask

    mesh = Mesh.build(cp=world, ulysses=options.get("ulysses", 1), inner_ring=options.get("inner_ring", 1),
                      ledger=ledger)
    layout = Layout(TOKENS, world, options.get("layout", "zigzag"))
    core = METHODS[what](layout, mesh, Kernel(select_attention("auto", "cpu", torch.float32, False)))
    kv_heads, mask = options.get("kv_heads", KV_HEADS), Mask(options.get("window"))
    q, k, v = (torch.randn(1, layout.local_length, h, SIZE, requires_grad=True) for h in (HEADS, kv_heads, kv_heads))
    return lambda: core(q, k, v, mask=mask, scale=SIZE**-0.5).sum().backward()


def pipeline(world: int, what: str, options: dict[str, Any], ledger: Any) -> Any:
    """One training step of a small model whose layers are spread over the ranks."""
    from dataclasses import replace

    import torch

    from megafour.config.load import config_from
    from megafour.config.rules import resolve
    from megafour.trainer.setup import build_mesh, build_state
    from megafour.trainer.step import train_step
    from megafour.verify.toy import toy_batches

    config = resolve(config_from({
        "model": {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "ffn_hidden_size": 256,
                  "vocab_size": 256},
        "parallel": {"dp": 1, "pp": world, "pipeline": {"schedule": options["schedule"]}},
        "data": {"seq_length": 512}, "train": {"steps": 9, "global_batch_size": 4, "precision": "fp32"}}),
        world, data=False)
    mesh = build_mesh(config, torch.device("cpu"), ledger=True)
    mesh = replace(mesh, ledger=ledger, groups={n: replace(g, ledger=ledger) for n, g in mesh.groups.items()})
    state = build_state(config, mesh, 256)
    batches = toy_batches(config, config, 256, 0, "all", dp_rank=0, positions=state.stage.build.positions)
    return lambda: train_step(state, batches, 0, 1e-3)


def inside(only: list[str], markdown: bool) -> int:
    """Every case, on a loopback that nobody else uses. Returns the exit code."""
    from traffic import measure as on_a_rank  # by the module's name: the ranks are other processes

    from megafour.verify.pool import Pool

    if lo_bytes() != 0:
        print("error: the loopback is not new", file=sys.stderr)
        return 1
    head, row = (("| case | ledger, bytes | loopback, bytes | loopback / ledger |\n|---|---:|---:|---:|",
                  "| {} | {:,} | {:,} | {:.4f} |") if markdown else
                 (f"{'case':<30}{'ledger':>16}{'loopback':>16}{'ratio':>9}", "{:<30}{:>16,}{:>16,}{:>9.4f}"))
    print(head)
    worst = 0.0
    with Pool(max(world for _, world, _ in CASES.values())) as pool:
        for name, (what, world, options) in CASES.items():
            if only and not any(name.startswith(part) for part in only):
                continue
            ranks = pool.run(on_a_rank, world, what, options)
            counted, seen = round(sum(nbytes for nbytes, _ in ranks)), max(lo for _, lo in ranks)
            print(row.format(name, counted, seen, seen / counted), flush=True)
            if not name.startswith(BY_CONVENTION):
                worst = max(worst, abs(seen / counted - 1))
    print(f"\nworst deviation of what is judged: {worst:.2%} (at most {LIMIT:.0%})")
    return 0 if worst <= LIMIT else 1


def main() -> int:
    """Enter the namespace, once, and measure there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="comma-separated beginnings of names")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.insert(1, str(ROOT))
    if args.inside:
        subprocess.run([find("ip"), "link", "set", "lo", "up"], check=True)
        return inside([part for part in args.only.split(",") if part], args.markdown)
    command = [find("unshare"), "--net", *([] if os.geteuid() == 0 else ["--map-root-user"]),
               sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--inside"]
    return subprocess.run(command, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"}).returncode


def find(tool: str) -> str:
    """Where a tool lies; ordinary users often lack /sbin in their path."""
    path = shutil.which(tool, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if path is None:
        sys.exit(f"error: `{tool}` is missing; on Debian: apt-get install util-linux iproute2")
    return path


if __name__ == "__main__":
    sys.exit(main())
