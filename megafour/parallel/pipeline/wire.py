"""The transfers of one run on one rank: what was made and not yet sent, what was posted and not yet used."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megafour.comm.group import Group
from megafour.comm.primitives import Pending, send_recv
from megafour.parallel.pipeline.actions import Message, Step, Table

Channels = Callable[[int, int], Group]
"""(sending rank, receiving rank), as indices of the pipeline's group -> the group that carries what goes that way."""


@dataclass(frozen=True)
class Activation:
    """Shape, dtype and device of what travels between stages; its gradient has the same."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def empty(self) -> Tensor:
        """A fresh buffer to receive into."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def check(self, x: Tensor, message: Message) -> None:
        """Refuse a tensor that the receiver's buffer would not fit: the wire carries no shapes."""
        if tuple(x.shape) != tuple(self.shape) or x.dtype != self.dtype:
            raise ValueError(f"{message} is {tuple(x.shape)} {x.dtype}; the pipeline was set up for "
                             f"{tuple(self.shape)} {self.dtype}")


class Wire:
    """Posts a table's transfers, keeps tensors while they travel, and hands over what has arrived."""

    def __init__(self, table: Table, group: Group, activation: Activation, channels: Channels | None = None,
                 in_flight: int | None = None) -> None:
        self._table, self._group, self._activation = table, group, activation
        self._channels, self._in_flight = channels or (lambda source, target: group), in_flight
        self._made: dict[Message, Tensor] = {}
        self._posted: dict[Message, tuple[int, Pending, Tensor]] = {}
        self._sent: dict[int, deque[tuple[Message, Pending]]] = {}

    def give(self, message: Message | None, x: Tensor) -> None:
        """Keep `x` until the table sends it, or until the next stage, on this rank too, takes it."""
        if message is not None:
            self._activation.check(x, message)
            self._made[message] = x

    def post(self, step: Step) -> None:
        """Post the step's transfers; nothing is awaited (but see `in_flight`)."""
        for transfer in step.recvs:
            buffer, (channel, peer) = self._activation.empty(), self._way(transfer.peer, self._group.rank)
            self._posted[transfer.message] = (transfer.peer, send_recv([], [(buffer, peer)], channel), buffer)
        for transfer in step.sends:
            channel, peer = self._way(self._group.rank, transfer.peer)
            queue = self._sent.setdefault(transfer.peer, deque())
            while self._in_flight is not None and len(queue) >= self._in_flight:
                queue.popleft()[1].wait()
            queue.append((transfer.message, send_recv([(self._made.pop(transfer.message), peer)], [], channel)))

    def take(self, message: Message) -> Tensor:
        """The tensor of `message`, awaited if it is still on its way."""
        if message in self._made:
            return self._made.pop(message)
        peer, pending, buffer = self._posted.pop(message)
        pending.wait()
        self._let_go(peer, self._table.sent_at[message])
        return buffer

    def finish(self) -> None:
        """Await what is still in flight."""
        for queue in self._sent.values():
            while queue:
                queue.popleft()[1].wait()

    def _way(self, source: int, target: int) -> tuple[Group, int]:
        """The group from one rank to another, and the other rank's index in it."""
        channel = self._channels(source, target)
        other = target if source == self._group.rank else source
        return channel, channel.ranks.index(self._group.ranks[other])

    def _let_go(self, peer: int, step: int) -> None:
        """Free what `peer` had used before `step`, in which it sent what has just arrived: these sends are complete.

        gloo does not say whether a send is complete, and to wait for one that is not would be a wait that no checker
        has proved.
        """
        queue = self._sent.get(peer, deque())
        while queue and self._table.used_at[queue[0][0]] < step:
            queue.popleft()[1].wait()
