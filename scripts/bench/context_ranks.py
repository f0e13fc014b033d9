"""What each rank of scripts/bench/context.py does; started by it, writes its answer as JSON."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megafour.comm.ledger import Ledger
from megafour.comm.primitives import send_recv
from megafour.kernels.attention import select_attention
from megafour.mesh import Mesh
from megafour.parallel.context import METHODS
from megafour.parallel.context.balance import balance
from megafour.parallel.context.blocks import Kernel, Places
from megafour.parallel.context.layout import Layout
from megafour.parallel.context.mask import Mask
from megafour.parallel.context.ring import RingAttention
from megafour.trainer.memory import keep_heap
from megafour.verify.reference import dense_attention

HEADS, KV_HEADS, SIZE = 8, 4, 64
SCALE = SIZE ** -0.5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Timed(Kernel):
    """A kernel that adds up the processor time of its own thread: other processes do not show in it."""

    spent: Any = None

    def forward(self, *args: Any) -> Any:
        """As `Kernel.forward`."""
        began = time.thread_time()
        result = super().forward(*args)
        self.spent[0] += time.thread_time() - began
        return result

    def backward(self, *args: Any) -> Any:
        """As `Kernel.backward`."""
        began = time.thread_time()
        result = super().backward(*args)
        self.spent[0] += time.thread_time() - began
        return result


def inputs(seq: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the output's gradient `[1, seq, heads, d]`, alike on every rank."""
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(1, seq, heads, SIZE, generator=gen).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]


def run(core: Callable[..., Tensor], tensors: list[Tensor], mask: Mask) -> list[Tensor]:
    """(out, dq, dk, dv)."""
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    out = core(q, k, v, mask=mask, scale=SCALE)
    out.backward(tensors[3])
    return [x.detach() for x in (out, q.grad, k.grad, v.grad) if x is not None]


def timed(work: Callable[[], object], wait: bool) -> float:
    """Seconds from when every rank begins until every rank (`wait`), or this one, has ended."""
    if wait and dist.is_initialized():
        dist.barrier()
    began = time.perf_counter()
    work()
    if wait and dist.is_initialized():
        dist.barrier()
    return time.perf_counter() - began


def attention(rank: int, world: int, cases: list[list[str]], seq: int, dtype: str, threads: int,
              repeats: int) -> dict[str, Any]:
    """Seconds, bytes and balance of each case; rank 0 also times one process with all threads, turn by turn."""
    whole, found = inputs(seq, DTYPES[dtype]), []
    backend = select_attention("auto", "cpu", DTYPES[dtype], dropout=False)
    alone = METHODS["ring"](Layout(seq, 1), Mesh.build(rank=0), Kernel(backend))
    for method, kind in cases:
        ledger, spent, layout = Ledger(), [0.0], Layout(seq, world, kind)
        ulysses = {"ulysses": world, "usp": 2}.get(method, 1)
        inner = 2 if method == "double_ring" else 1
        mesh = Mesh.build(cp=world, ulysses=ulysses, inner_ring=inner, ledger=ledger)
        core = METHODS[method](layout, mesh, Timed(backend, spent=spent))
        mask, own = Mask(), [x[:, layout.positions(mesh.cp_rank)].contiguous() for x in whole]
        run(core, own, mask)    # warms up, and sends what a pass sends
        rows, spent[0], split, single = ledger.rows(), 0.0, [], []
        for _ in range(repeats):
            torch.set_num_threads(threads)
            if rank == 0:
                single.append(timed(lambda: run(alone, whole, Mask()), wait=False))
            torch.set_num_threads(max(1, threads // world))
            split.append(timed(lambda core=core, own=own, mask=mask: run(core, own, mask), wait=True))
        found.append({"seconds": statistics.median(split or [0.0]), "alone": statistics.median(single or [0.0]),
                      "kernel": spent[0], "bytes": sum(row[-1] for row in rows),
                      "primitives": [f"{calls} {primitive}" for _, primitive, _, calls, _ in rows],
                      "predicted": balance(layout, mask, method, ulysses, inner).whole})
    return {"cases": found}


class Sleeping:
    """A backend that sleeps instead of computing, gives zeros, and notes when it was called."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls: list[float] = []

    def _sleep(self) -> None:
        self.calls.append(time.perf_counter())
        time.sleep(self.seconds)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        """As `AttentionBackend.forward`."""
        self._sleep()
        return torch.zeros_like(q), torch.zeros(q.shape[0], q.shape[2], q.shape[1])

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
                 **_: Any) -> tuple[Tensor, Tensor, Tensor]:
        """As `AttentionBackend.backward`."""
        self._sleep()
        return torch.zeros_like(q), torch.zeros(()), torch.zeros(())


def overlap(rank: int, world: int, mib: int, repeats: int) -> dict[str, Any]:
    """Seconds of a transfer alone and of a ring step, from one call of the kernel to the next, forward and backward.

    One query head, and K/V heads that fill the hop: adding parts up is compute, which the sleep stands for. A backward
    step moves K/V and dK/dV at once, so its transfer is both.
    """
    seq, heads = 1024 * world, mib * 2**20 // (2 * 4 * 1024 * SIZE)
    layout, group = Layout(seq, world, "zigzag"), Mesh.build(cp=world).group("ring")
    backend = Sleeping()
    core = RingAttention(group, Places.of([layout.positions(i) for i in range(world)]), Kernel(backend))
    q, k, v = (torch.zeros(1, 1024, n, SIZE, requires_grad=True) for n in (1, heads, heads))
    packed, other = torch.zeros(2, 2, 1, 1024, heads, SIZE)
    buffers = torch.zeros(2, 2, 1, 1024, heads, SIZE)

    def hop(parts: tuple[Tensor, ...]) -> None:
        posted = [send_recv([(x, (rank + 1) % world)], [(y, (rank - 1) % world)], group)
                  for x, y in zip(parts, buffers, strict=False)]
        for transfer in posted:
            transfer.wait()

    def seconds(work: Callable[[], object]) -> float:
        work()
        return statistics.median(timed(work, wait=True) for _ in range(repeats))

    found: dict[str, Any] = {}
    for phase, parts in (("forward", (packed,)), ("backward", (packed, other))):
        transfer = seconds(lambda parts=parts: hop(parts))
        longest = torch.tensor(transfer)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        backend.seconds = longest.item()
        found[phase] = {"transfer": transfer, "longer": backend.seconds}
        steps = []
        for _ in range(repeats + 1):
            backend.calls.clear()
            out = core(q, k, v, mask=Mask(), scale=1.0)
            if phase == "backward":
                backend.calls.clear()
                out.sum().backward()
            steps.append((backend.calls[-1] - backend.calls[0]) / (world - 1))    # zigzag: one block a step
            dist.barrier()
        found[phase]["step"] = statistics.median(steps[1:])
    return found


class Rounded(Kernel):
    """A kernel that rounds what it gives to 16 bits, as those of GPUs do."""

    def forward(self, *args: Any) -> tuple[Tensor, Tensor]:
        """As `Kernel.forward`."""
        out, lse = super().forward(*args)
        return out.to(torch.bfloat16), lse

    def backward(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        """As `Kernel.backward`."""
        dq, dk, dv = (x.to(torch.bfloat16) for x in super().backward(*args))
        return dq, dk, dv


def accuracy(rank: int, world: int, seq: int) -> dict[str, Any]:
    """Relative L2 error of out, dq, dk, dv against fp64, over all ranks' tokens."""
    whole, layout, found = inputs(seq, torch.bfloat16), Layout(seq, world, "zigzag"), {}
    here = layout.positions(rank)
    want = run(dense_attention, [x.double() for x in whole], Mask())
    backend = select_attention("auto", "cpu", torch.bfloat16, dropout=False)
    kernels = {"rounded": Rounded(backend), "auto": Kernel(backend), "fp32": Kernel(backend, fp32_blocks=True)}
    for blocks, kernel in kernels.items():
        core = METHODS["ring"](layout, Mesh.build(cp=world), kernel)
        got = run(core, [x[:, here].contiguous() for x in whole], Mask())
        squares = torch.tensor([float((a.double() - b[:, here]).square().sum())
                                for a, b in zip(got, want, strict=True)], dtype=torch.float64)
        if world > 1:
            dist.all_reduce(squares)
        norms = torch.stack([b.norm() for b in want])
        found[blocks] = dict(zip(("out", "dq", "dk", "dv"), (squares.sqrt() / norms).tolist(), strict=True))
    return found


def main() -> None:
    """Join the world, do the job, write the answer."""
    folder, job, arguments = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    keep_heap()    # as training does: fresh pages would be paid for in every pass
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world > 1:
        dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), world), rank=rank, world_size=world)
    answer = {"attention": attention, "overlap": overlap, "accuracy": accuracy}[job](rank, world, **arguments)
    (folder / f"answer-{rank}").write_text(json.dumps(answer), "utf-8")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
