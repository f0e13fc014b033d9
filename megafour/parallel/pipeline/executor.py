"""Runs one rank's row of a schedule table: compute through autograd, transfers in the order that the table gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megafour.comm.group import Group
from megafour.comm.primitives import Pending, send_recv
from megafour.parallel.pipeline.actions import Action, Kind, Message, Placement, ScheduleError, Step, Table
from megafour.parallel.pipeline.schedules import forward_only

StageForward = Callable[[int, Tensor | None], Tensor]
"""(micro-batch, input activation or None on the first stage) -> output activation; on the last stage a scalar loss."""
BeforeBackward = Callable[[int, bool], None]
"""(micro-batch, is_last): is_last when no later backward of the same chunk follows, so its gradients become final."""


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


def run_schedule(table: Table, *, group: Group, chunks: Sequence[StageForward], activation: Activation,
                 before_backward: BeforeBackward | None = None) -> list[Tensor]:
    """Run this rank's row of `table`; gradients accumulate in the parameters.

    `group` is the pipeline's, its rank the row; `chunks` holds one forward per stage of this rank (one, without
    virtual stages). A loss carries its scale already: it is differentiated with gradient 1. Returns the detached
    losses by micro-batch on the rank that holds the last stage, an empty list elsewhere.
    """
    run = _Run(table, group, chunks, activation)
    steps = table.steps[group.rank]
    last = {step.compute.chunk: index for index, step in enumerate(steps)
            if step.compute is not None and step.compute.kind is Kind.BACKWARD}
    for index, step in enumerate(steps):
        run.wire.post(step)
        action = step.compute
        if action is None:
            continue
        if action.kind is Kind.FORWARD:
            run.forward(action)
        elif action.kind is Kind.BACKWARD:
            if before_backward is not None:
                before_backward(action.microbatch, index == last[action.chunk])
            run.backward(action)
        else:
            raise ScheduleError(f"rank {group.rank}, step {index}: {action} splits the backward; only F and B run here")
    run.wire.finish()
    return [run.outputs[m] for m in sorted(run.outputs)]


@torch.no_grad()
def run_forward_only(microbatches: int, *, placement: Placement, group: Group, chunks: Sequence[StageForward],
                     activation: Activation) -> list[Tensor]:
    """Pass `microbatches` through the pipeline without gradients: evaluation.

    Returns the last stage's outputs (any shape) by micro-batch on the rank that holds it, an empty list elsewhere.
    """
    table = forward_only(placement, microbatches)
    # On a chain every send waits only for ranks further down, so a rank may wait for its old sends before it goes on;
    # without that a fast first stage would keep every output of a long evaluation in memory.
    chain = placement.stages == placement.ranks
    run = _Run(table, group, chunks, activation, in_flight=2 if chain else None)
    for step in table.steps[group.rank]:
        run.wire.post(step)
        if step.compute is not None:
            run.forward(step.compute)
    run.wire.finish()
    return [run.outputs[m] for m in sorted(run.outputs)]


class _Wire:
    """The transfers of one run: what was produced and not yet sent, what was posted and not yet used."""

    def __init__(self, group: Group, activation: Activation, in_flight: int | None) -> None:
        self._group, self._activation, self._in_flight = group, activation, in_flight
        self._produced: dict[Message, Tensor] = {}
        self._posted: dict[Message, tuple[int, Tensor]] = {}
        self._batches: list[Pending | None] = []
        self._done = 0

    def give(self, message: Message | None, x: Tensor) -> None:
        """Keep `x` until the table sends it, or until the next stage, on this rank too, takes it."""
        if message is not None:
            self._activation.check(x, message)
            self._produced[message] = x

    def post(self, step: Step) -> None:
        """Post the step's transfers as one batch; nothing is awaited (but see `in_flight`)."""
        if not step.sends and not step.recvs:
            return
        if self._in_flight is not None:
            self._await(len(self._batches) - self._in_flight)
        sends = [(self._produced.pop(transfer.message), transfer.peer) for transfer in step.sends]
        recvs = [(self._activation.empty(), transfer.peer) for transfer in step.recvs]
        for transfer, (buffer, _) in zip(step.recvs, recvs, strict=True):
            self._posted[transfer.message] = (len(self._batches), buffer)
        self._batches.append(send_recv(sends, recvs, self._group))

    def take(self, message: Message | None) -> Tensor | None:
        """The tensor of `message`, awaited if it is still on its way; None for no message."""
        if message is None:
            return None
        if message in self._produced:
            return self._produced.pop(message)
        batch, buffer = self._posted.pop(message)
        self._await(batch)
        return buffer

    def finish(self) -> None:
        """Await what is still in flight."""
        self._await(len(self._batches) - 1)

    def _await(self, batch: int) -> None:
        """Await batches in the order posted, as they complete; that also lets go of the tensors that were sent."""
        while self._done <= batch:
            pending = self._batches[self._done]
            if pending is not None:
                pending.wait()
            self._batches[self._done] = None
            self._done += 1


class _Run:
    """The live micro-batches of one run on one rank."""

    def __init__(self, table: Table, group: Group, chunks: Sequence[StageForward], activation: Activation,
                 in_flight: int | None = None) -> None:
        held = len(table.placement.stages_of[group.rank])
        if table.placement.ranks != group.size or held != len(chunks):
            raise ScheduleError(f"a table for {table.placement.ranks} ranks with {held} stages on rank {group.rank} "
                                f"cannot run on a group of {group.size} with {len(chunks)} stages here")
        self._table, self._rank, self._chunks = table, group.rank, chunks
        self.wire = _Wire(group, activation, in_flight)
        self.outputs: dict[int, Tensor] = {}
        self._live: dict[tuple[int, int], tuple[Tensor | None, Tensor | GradientEdge]] = {}

    def forward(self, action: Action) -> None:
        """One micro-batch through one stage.

        Of an output that is sent only its edge in the autograd graph is kept: its memory goes as soon as it has
        left, unless the graph itself saved it.
        """
        placement, stage = self._table.placement, self._table.stage(self._rank, action)
        x = self.wire.take(placement.source(action.kind, action.microbatch, stage))
        training = torch.is_grad_enabled()
        if x is not None and training:
            x.requires_grad_()
        y = self._chunks[action.chunk](action.microbatch, x)
        last = stage == placement.stages - 1
        if training:
            self._live[action.microbatch, action.chunk] = (x, y if last else get_gradient_edge(y))
        if last:
            self.outputs[action.microbatch] = y.detach()
        else:
            self.wire.give(placement.product(action.kind, action.microbatch, stage), y.detach().contiguous())

    def backward(self, action: Action) -> None:
        """The whole backward of one micro-batch on one stage; frees its activations."""
        placement, stage = self._table.placement, self._table.stage(self._rank, action)
        gradient = self.wire.take(placement.source(action.kind, action.microbatch, stage))
        x, y = self._live.pop((action.microbatch, action.chunk))
        torch.autograd.backward(y, gradient)
        if x is not None:
            dx = torch.zeros_like(x) if x.grad is None else x.grad
            self.wire.give(placement.product(action.kind, action.microbatch, stage), dx.contiguous())
