"""Small Python values of every rank, exchanged outside the ledger; the wait for them is a wait like any other."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

from megafour.comm.group import Group
from megafour.comm.waits import Wait

T = TypeVar("T")


def gather_objects(value: T, group: Group) -> list[T]:
    """Every rank's value, in rank order, on every rank. All ranks of the group call it together.

    Values travel pickled between ranks that run the same program: for names and findings, never for tensors of a step.
    """
    if group.size == 1:
        return [value]
    values: list[T] = [value] * group.size
    with Wait(group.waits, "all_gather_object", group.name, group.ranks):
        dist.all_gather_object(values, value, group=group.pg)
    return values
