"""Ranks that succeed or fail together: work done by the first one, its error raised on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megafour.checkpoint.errors import CheckpointError

T = TypeVar("T")


def rank_in(group: ProcessGroup | None) -> int:
    """This process's index in the group; 0 when `group` is None, which means this process alone."""
    return 0 if group is None else dist.get_rank(group)


def collect(value: T, group: ProcessGroup | None) -> list[T] | None:
    """Every rank's value, in rank order, on the group's first rank; None elsewhere."""
    if group is None:
        return [value]
    values: list[Any] | None = [None] * dist.get_world_size(group) if rank_in(group) == 0 else None
    dist.gather_object(value, values, dst=dist.get_global_rank(group, 0), group=group)
    return values


def share(value: T | None, group: ProcessGroup | None) -> T:
    """The first rank's value, on every rank."""
    if group is None:
        return cast(T, value)
    box = [value]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    return cast(T, box[0])


def first_does(work: Callable[[], T], group: ProcessGroup | None, what: str) -> T:
    """Let the group's first rank do the work, and give its result, or raise its error, on every rank.

    Args:
        work: called on the first rank only.
        group: a process group, or None for this process alone.
        what: names the work in an error's message, such as `saving runs/a/step-00000100`.
    Raises:
        CheckpointError: on all ranks, with the same message.
    """
    result: T | None = None
    error: str | None = None
    cause: Exception | None = None
    if rank_in(group) == 0:
        try:
            result = work()
        except Exception as caught:
            error, cause = message(caught, what), caught
    error, result = share((error, result), group)
    if error is not None:
        raise CheckpointError(error) from cause
    return cast(T, result)


def message(error: BaseException, what: str, rank: int | None = None) -> str:
    """One line for an error: a `CheckpointError` speaks for itself, any other gets its type and what was done."""
    if isinstance(error, CheckpointError):
        return str(error)
    where = "" if rank is None else f" on rank {rank}"
    return f"{what} failed{where}: {type(error).__name__}: {error}"
