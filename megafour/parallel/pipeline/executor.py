"""Runs one rank's row of a schedule table: compute through autograd, transfers in the order that the table gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megafour.comm.group import Group
from megafour.parallel.grads import Deferral
from megafour.parallel.pipeline.actions import Action, Kind, Message, Pair, Placement, ScheduleError, Table
from megafour.parallel.pipeline.beside import Beside
from megafour.parallel.pipeline.record import Recorder
from megafour.parallel.pipeline.schedules import forward_only
from megafour.parallel.pipeline.wire import Activation, Channels, Wire

StageForward = Callable[[int, Tensor | None], Tensor]
"""(micro-batch, input activation or None on the first stage) -> output activation; on the last stage a scalar loss."""
BeforeAction = Callable[[Action], None]
"""Told of each action before it runs."""


def run_schedule(table: Table, *, group: Group, chunks: Sequence[StageForward], activation: Activation,
                 channels: Channels | None = None, deferral: Deferral | None = None,
                 before: BeforeAction | None = None, recorder: Recorder | None = None,
                 beside: Beside | None = None) -> list[Tensor]:
    """Run this rank's row of `table`; gradients accumulate in the parameters.

    `group` is the pipeline's, its rank the row; `chunks` holds one forward per stage of this rank; `channels` gives
    the group for each direction between two ranks (without it, all transfers go over `group`). Where the table splits
    a backward, the weight gradients that the layers hand to `deferral` wait for their own action; those of other
    layers come with the input's. The forward of a pair runs on the thread of `beside` while this one runs the
    backward; without it, the forward runs first. A loss carries its scale already: it is differentiated with gradient
    1. Returns the detached losses by micro-batch on the rank that holds the last stage, an empty list elsewhere.
    """
    run = _Run(table, group, chunks, Wire(table, group, activation, channels), deferral or Deferral())
    for step in table.steps[group.rank]:
        run.wire.post(step)
        if step.compute is None:
            continue
        run.fetch(step.parts)
        if recorder is not None:
            recorder.start()
        if isinstance(step.compute, Pair) and beside is not None:
            run.together(step.compute, beside, before)
        else:
            for action in step.parts:
                if before is not None:
                    before(action)
                run.act(action)
        if recorder is not None:
            recorder.stop(step.compute)
    run.wire.finish()
    return run.losses()


@torch.no_grad()
def run_forward_only(microbatches: int, *, placement: Placement, group: Group, chunks: Sequence[StageForward],
                     activation: Activation, channels: Channels | None = None) -> list[Tensor]:
    """Pass `microbatches` through the pipeline without gradients: evaluation.

    Returns the last stage's outputs (any shape) by micro-batch on the rank that holds it, an empty list elsewhere.
    """
    table = forward_only(placement, microbatches)
    # On a chain every send waits only for ranks further down, so a rank may wait for its old sends before it goes on;
    # without that a fast first stage would keep every output of a long evaluation in memory.
    chain = placement.stages == placement.ranks
    wire = Wire(table, group, activation, channels, in_flight=2 if chain else None)
    run = _Run(table, group, chunks, wire, Deferral())
    for step in table.steps[group.rank]:
        wire.post(step)
        run.fetch(step.parts)
        for action in step.parts:
            run.act(action)
    wire.finish()
    return run.losses()


class _Run:
    """The live micro-batches of one run on one rank."""

    def __init__(self, table: Table, group: Group, chunks: Sequence[StageForward], wire: Wire,
                 deferral: Deferral) -> None:
        held = len(table.placement.stages_of[group.rank]) if group.rank < table.placement.ranks else 0
        if table.placement.ranks != group.size or held != len(chunks):
            raise ScheduleError(f"a table for {table.placement.ranks} ranks with {held} stages on rank {group.rank} "
                                f"cannot run on a group of {group.size} with {len(chunks)} stages here")
        self._table, self._rank, self._chunks, self._deferral = table, group.rank, chunks, deferral
        self.wire = wire
        self._inputs: dict[Message, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}
        self._live: dict[tuple[int, int], tuple[Tensor | None, Tensor | GradientEdge]] = {}
        self._weights: dict[tuple[int, int], list[Callable[[], object]]] = {}

    def fetch(self, actions: Sequence[Action]) -> None:
        """Wait for everything that the actions of a step need."""
        for action in actions:
            source = self._source(action)
            if source is not None:
                self._inputs[source] = self.wire.take(source)

    def act(self, action: Action) -> None:
        """Run one action whose input is here."""
        if action.kind is Kind.FORWARD:
            self._hand_on(action, *self._forward(action))
        elif action.kind is Kind.BACKWARD:
            self._backward(action)
        elif action.kind is Kind.BACKWARD_INPUT:
            with self._deferral.collect() as waiting:
                self._backward(action)
            self._weights[action.microbatch, action.chunk] = waiting
        else:
            self._backward_weight(action)

    def together(self, pair: Pair, beside: Beside, before: BeforeAction | None) -> None:
        """Run the halves of a pair at the same time; both results are there when it ends."""
        if before is not None:
            for action in pair.parts:
                before(action)
        result = beside.start(partial(self._forward, pair.forward))
        self.act(pair.backward)
        self._hand_on(pair.forward, *result())

    def losses(self) -> list[Tensor]:
        """What the last stage gave, by micro-batch; empty on a rank that does not hold it."""
        return [self._outputs[m] for m in sorted(self._outputs)]

    def _forward(self, action: Action) -> tuple[Tensor | None, Tensor]:
        """One micro-batch through one stage: (its input, its output)."""
        source = self._source(action)
        x = None if source is None else self._inputs.pop(source)
        if x is not None and torch.is_grad_enabled():
            x.requires_grad_()
        return x, self._chunks[action.chunk](action.microbatch, x)

    def _hand_on(self, action: Action, x: Tensor | None, y: Tensor) -> None:
        """Keep what the backward needs, and give the output on.

        Of an output that is sent only its edge in the autograd graph is kept: its memory goes as soon as it has
        left, unless the graph itself saved it.
        """
        product = self._product(action)
        if torch.is_grad_enabled():
            kept = y if product is None else get_gradient_edge(y)
            self._live[action.microbatch, action.chunk] = (x, kept)
        if product is None:
            self._outputs[action.microbatch] = y.detach()
        else:
            self.wire.give(product, y.detach().contiguous())

    def _backward(self, action: Action) -> None:
        """The backward of one micro-batch on one stage, of all that does not wait; frees its activations."""
        source, product = self._source(action), self._product(action)
        gradient = None if source is None else self._inputs.pop(source)
        x, y = self._live.pop((action.microbatch, action.chunk))
        torch.autograd.backward(y, gradient)
        if x is not None:
            dx = torch.zeros_like(x) if x.grad is None else x.grad
            self.wire.give(product, dx.contiguous())

    def _backward_weight(self, action: Action) -> None:
        """The weight gradients that waited, each freed as soon as it is accumulated."""
        waiting = self._weights.pop((action.microbatch, action.chunk))
        with torch.no_grad():
            while waiting:
                waiting.pop(0)()

    def _source(self, action: Action) -> Message | None:
        return self._table.placement.source(action.kind, action.microbatch, self._table.stage(self._rank, action))

    def _product(self, action: Action) -> Message | None:
        return self._table.placement.product(action.kind, action.microbatch, self._table.stage(self._rank, action))
