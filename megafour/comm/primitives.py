"""The nine communication primitives, each explicit in its group and counted by the group's ledger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megafour.comm.group import UNTIMED, Group

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

# torch 2.13 renamed these and warns on every call of the old name; 2.11 has only the old one.
_reduce_scatter_flat: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather_flat: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Pending:
    """A collective in flight; `wait()` returns its result and keeps every buffer alive until then."""

    def __init__(self, result: Any, works: Sequence[Any] = (), finish: Callable[[Any], Any] | None = None,
                 keep: Sequence[Tensor] = (), clock: AbstractContextManager[object] = UNTIMED) -> None:
        self._result, self._works, self._finish, self._keep, self._clock = result, works, finish, keep, clock

    def wait(self) -> Any:
        """Block until the transfer is complete and return its result; a second call returns it again."""
        if self._works:
            with self._clock:
                for work in self._works:
                    work.wait()
        self._works, self._keep = (), ()
        if self._finish is not None:
            self._result, self._finish = self._finish(self._result), None
        return self._result


class _Posting:
    """A batch that another thread is posting."""

    def __init__(self, posted: Future[list[Any]]) -> None:
        self._posted = posted

    def wait(self) -> None:
        """Block until the batch is posted and complete."""
        for work in self._posted.result():
            work.wait()


def _deliver(pending: Pending, async_op: bool) -> Any:
    return pending if async_op else pending.wait()


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def all_reduce(x: Tensor, group: Group, op: str = "sum", async_op: bool = False) -> Any:
    """Reduce `x` in place over the group (`op`: sum, max or min); `x` must be contiguous. Returns x, or a `Pending`."""
    group = group.here
    if group.size == 1:
        return _deliver(Pending(x), async_op)
    group.record("all_reduce", 2 * (group.size - 1) / group.size * _nbytes(x))
    with (clock := group.timed("all_reduce")):
        work = dist.all_reduce(x, op=_REDUCE_OPS[op], group=group.pg, async_op=async_op)
    return Pending(x, [work], keep=[x], clock=clock) if async_op else x


def all_gather(x: Tensor, group: Group, dim: int = 0, out: Tensor | None = None, async_op: bool = False) -> Any:
    """Concatenate every rank's `x` (equal shapes) along `dim`; `out` may give the buffer when dim is 0."""
    group = group.here
    if group.size == 1:
        if out is not None and out.data_ptr() != x.data_ptr():
            out.copy_(x)
        return _deliver(Pending(x if out is None else out), async_op)
    x = x.contiguous()
    group.record("all_gather", (group.size - 1) * _nbytes(x))
    if out is None:
        out = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
    with (clock := group.timed("all_gather")):
        work = _all_gather_flat(out, x, group=group.pg, async_op=async_op)

    def join(flat: Tensor) -> Tensor:
        return flat if dim == 0 else torch.cat(flat.chunk(group.size, 0), dim=dim)

    return _deliver(Pending(out, [work] if async_op else [], join, keep=[x], clock=clock), async_op)


def reduce_scatter(x: Tensor, group: Group, dim: int = 0, out: Tensor | None = None, async_op: bool = False) -> Any:
    """Sum `x` over the group and keep this rank's slice along `dim` (its length divisible by the group's size)."""
    group = group.here
    if group.size == 1:
        if out is not None and out.data_ptr() != x.data_ptr():
            out.copy_(x)
        return _deliver(Pending(x if out is None else out), async_op)
    if dim != 0:
        x = torch.cat(x.chunk(group.size, dim), 0)
    x = x.contiguous()
    if out is None:
        out = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    group.record("reduce_scatter", (group.size - 1) * _nbytes(out))
    with (clock := group.timed("reduce_scatter")):
        work = _reduce_scatter_flat(out, x, group=group.pg, async_op=async_op)
    return _deliver(Pending(out, [work] if async_op else [], keep=[x], clock=clock), async_op)


def broadcast(x: Tensor, group: Group, src: int = 0, async_op: bool = False) -> Any:
    """Overwrite `x` in place with group rank `src`'s; counted at the sender."""
    group = group.here
    if group.size == 1:
        return _deliver(Pending(x), async_op)
    if group.rank == src:
        group.record("broadcast", (group.size - 1) * _nbytes(x))
    with (clock := group.timed("broadcast")):
        work = dist.broadcast(x, src=group.ranks[src], group=group.pg, async_op=async_op)
    return Pending(x, [work], keep=[x], clock=clock) if async_op else x


def reduce(x: Tensor, group: Group, dst: int = 0, op: str = "sum") -> Tensor:
    """Reduce `x` onto group rank `dst`, in place there; elsewhere the content of `x` is undefined afterwards."""
    group = group.here
    if group.size > 1:
        if group.rank != dst:
            group.record("reduce", _nbytes(x))
        with group.timed("reduce"):
            dist.reduce(x, dst=group.ranks[dst], op=_REDUCE_OPS[op], group=group.pg)
    return x


def scatter(x: Tensor, group: Group, src: int = 0, dim: int = 0) -> Tensor:
    """Split group rank `src`'s `x` along `dim`, one slice a rank; all ranks pass an `x` of the full shape."""
    group = group.here
    if group.size == 1:
        return x
    pieces = [piece.contiguous() for piece in x.chunk(group.size, dim)]
    out = torch.empty_like(pieces[0])
    if group.rank == src:
        group.record("scatter", _nbytes(x) - _nbytes(out))
    with group.timed("scatter"):
        dist.scatter(out, pieces if group.rank == src else None, src=group.ranks[src], group=group.pg)
    return out


def gather(x: Tensor, group: Group, dst: int = 0, dim: int = 0) -> Tensor | None:
    """Concatenate every rank's `x` along `dim` at group rank `dst`; None elsewhere."""
    group = group.here
    if group.size == 1:
        return x
    x = x.contiguous()
    pieces = [torch.empty_like(x) for _ in range(group.size)] if group.rank == dst else None
    if group.rank != dst:
        group.record("gather", _nbytes(x))
    with group.timed("gather"):
        dist.gather(x, pieces, dst=group.ranks[dst], group=group.pg)
    return torch.cat(pieces, dim=dim) if pieces is not None else None


def all_to_all(x: Tensor, group: Group) -> Tensor:
    """Send the i-th of `size` equal blocks of dim 0 to rank i; block j of the result came from rank j."""
    group = group.here
    if group.size == 1:
        return x
    x = x.contiguous()
    received = torch.empty_like(x)
    group.record("all_to_all", _nbytes(x) * (group.size - 1) / group.size)
    with group.timed("all_to_all"):
        dist.all_to_all_single(received, x, group=group.pg)
    return received


def send_recv(sends: Sequence[tuple[Tensor, int]], recvs: Sequence[tuple[Tensor, int]], group: Group) -> Pending:
    """Post point-to-point transfers as one batch, so that no order of peers can deadlock.

    `sends`: (contiguous tensor, peer's index in the group); `recvs`: (contiguous buffer, peer's index). Between two
    ranks, transfers match in the order posted. `wait()` returns the list of receive buffers. A tensor that is sent
    must not change before.
    """
    group = group.here
    buffers = [buffer for buffer, _ in recvs]
    ops = []
    for buffer, peer in recvs:
        ops.append(dist.P2POp(dist.irecv, buffer, group.ranks[peer], group.pg))
    for tensor, peer in sends:
        group.record("send_recv", _nbytes(tensor))
        ops.append(dist.P2POp(dist.isend, tensor, group.ranks[peer], group.pg))
    if not ops:
        return Pending(buffers)
    with (clock := group.timed("send_recv", [peer for _, peer in (*recvs, *sends)])):
        if group.poster is not None:
            works: list[Any] = [_Posting(group.poster.submit(dist.batch_isend_irecv, ops))]
        else:
            works = dist.batch_isend_irecv(ops)
    return Pending(buffers, works, keep=[tensor for tensor, _ in sends], clock=clock)
