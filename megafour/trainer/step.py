"""One training step, top to bottom: the order of things, and nothing between."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from megafour.comm import primitives
from megafour.comm.ledger import CONTROL
from megafour.comm.waits import Wait
from megafour.data.batch import MicroBatch
from megafour.kernels.matmul import wide_dtype
from megafour.mesh import Mesh
from megafour.model.stage import Stage
from megafour.optim.optimizer import ShardedOptimizer
from megafour.parallel.data.buckets import GradientBuckets, squared_norm, sync_replicated
from megafour.parallel.data.reduction import Look
from megafour.parallel.pipeline.actions import Action, Kind
from megafour.parallel.pipeline.beside import Beside
from megafour.parallel.pipeline.executor import run_forward_only, run_schedule
from megafour.parallel.pipeline.record import Recorder
from megafour.parallel.pipeline.select import Pipeline
from megafour.parallel.pipeline.wire import Activation
from megafour.parallel.tensor.cross_entropy import IGNORE
from megafour.trainer.scaler import LossScaler
from megafour.trainer.spikes import SpikeGuard


@dataclass
class StepResult:
    """What a step tells: equal on every rank."""

    loss: float
    """Sum over all valid tokens of the global batch, divided by their number."""
    grad_norm: float
    """Global norm before clipping."""
    applied: bool
    """Whether the weights were updated; False when a gradient or the loss was not finite, or the norm a spike."""
    flags: float = 0.0
    """Sum over ranks of the flag that each passed (a stop was asked for)."""
    spike: str | None = None
    """Why a step with a finite norm was not applied, in words."""


@dataclass
class TrainState:
    """The parts that a step moves."""

    mesh: Mesh
    stage: Stage
    buckets: GradientBuckets
    optimizer: ShardedOptimizer
    pipeline: Pipeline
    scaler: LossScaler
    groups: dict
    """Groups by the names that pieces give (`tp`, `kv`, `embedding`)."""
    grad_clip: float
    recorder: Recorder | None = None
    """Takes the time of the pipeline's actions, in the step that is to be drawn."""
    spikes: SpikeGuard | None = None
    """Judges the norm of each step; None: every finite one is applied."""


def train_step(state: TrainState, batches: list[MicroBatch], step: int, lr: float,
               flag: Callable[[], float] | None = None,
               observe: Callable[[TrainState], None] | None = None) -> StepResult:
    """Train on this rank's micro-batches of the global batch. Every rank of the mesh calls it together.

    `flag` is asked at the end of the passes, so that a signal in a step ends the run after it.
    `observe` sees the state while its gradients are whole and not clipped yet.
    """
    valid = count_valid_tokens(batches, state.mesh)
    loss_part = forward_backward(state, batches, step, valid)
    state.buckets.finish_reduction()
    set_phase(state.mesh, "sync")
    sync_replicated(state.buckets.buckets, state.groups)
    if observe is not None:
        observe(state)
    loss, norm, flags = sum_over_world(state, loss_part, flag() if flag is not None else 0.0)
    norm = norm / state.scaler.scale
    finite = math.isfinite(loss) and math.isfinite(norm)
    spike = state.spikes.judge(norm) if finite and state.spikes is not None else None
    if finite and spike is None:
        set_phase(state.mesh, "optimizer")
        clip = min(1.0, state.grad_clip / (norm + 1e-6)) if state.grad_clip > 0 else 1.0
        state.optimizer.step(lr, clip / state.scaler.scale)
    state.scaler.update(finite)
    return StepResult(loss, norm, finite and spike is None, flags, spike)


def forward_backward(state: TrainState, batches: list[MicroBatch], step: int, valid: int, *,
                     look: Look | None = None) -> Tensor:
    """Run the schedule; gradients of (sum of losses) / `valid` accumulate in fp32. Returns this rank's part of it.

    `look` sees the gradients of this rank, in place of their sums over ranks.
    The division by the global number of valid tokens comes before backward, so that no later stage scales anything.
    """
    state.buckets.zero()
    stage, device = state.stage, state.mesh.device
    dtype = wide_dtype(stage.build.dtype)
    scale = torch.tensor(state.scaler.scale / max(valid, 1), dtype=dtype, device=device)

    def forward(chunk: int, index: int, x: Tensor | None) -> Tensor:
        return stage(batches[index], x, scale, step=step, train=True, chunk=chunk)

    def before(action: Action) -> None:
        set_phase(state.mesh, "forward" if action.kind is Kind.FORWARD else "backward")

    beside = Beside(state.mesh.lane, state.mesh.waits) if state.mesh.lane is not None else None
    state.buckets.start_reduction(len(batches), look)
    losses = run_schedule(state.pipeline.table(len(batches)), group=state.mesh.group("pp"), channels=state.mesh.channel,
                          chunks=[partial(forward, chunk) for chunk in range(len(stage.decoders))],
                          activation=wire(state, batches), deferral=state.buckets.deferral, before=before,
                          recorder=state.recorder, beside=beside)
    total = torch.stack(losses).double().sum() if losses else torch.zeros((), dtype=torch.float64, device=device)
    return total / state.scaler.scale


class Evaluated(Protocol):
    """What an evaluation needs of a `TrainState`: a model that is loaded for inference has no more."""

    mesh: Mesh
    stage: Stage
    pipeline: Pipeline


def wire(state: Evaluated, batches: list[MicroBatch]) -> Activation:
    """What travels between stages."""
    shape = state.stage.activation_shape(batches[0].tokens.shape[0])
    return Activation(shape, state.stage.build.dtype, state.mesh.device)


def count_valid_tokens(batches: list[MicroBatch], mesh: Mesh) -> int:
    """Trained tokens of the global batch, counted once, over dp×cp."""
    count = torch.stack([(b.labels != IGNORE).sum() for b in batches]).sum().to(mesh.device)
    return int(on_host(control_sum(count, mesh, "dp_cp"), mesh))


def sum_over_world(state: TrainState, loss_part: Tensor, flag: float) -> tuple[float, float, float]:
    """(loss, gradient norm, flags), each summed with every logical part counted once, in one small all-reduce."""
    mesh, squares = state.mesh, squared_norm(state.buckets.buckets, state.buckets.sizes.norm_row)
    counts_loss = state.stage.is_last and mesh.group("tp").rank == 0
    counts_norm = state.buckets.primary
    zero = torch.zeros((), dtype=torch.float64, device=mesh.device)
    parts = torch.stack([loss_part.double() if counts_loss else zero, squares if counts_norm else zero, zero + flag])
    # A part that is not counted may still be the one that is not finite: it must reach every rank.
    parts = torch.where(torch.isfinite(squares), parts, parts + torch.tensor([0.0, math.nan, 0.0]).to(parts))
    loss, square, flags = on_host(control_sum(parts, mesh, "world"), mesh)
    return loss, math.sqrt(square) if square >= 0 else math.nan, flags


def control_sum(x: Tensor, mesh: Mesh, group: str) -> Tensor:
    """All-reduce a control scalar, which the ledger keeps apart from the step's tensors."""
    doing, counted = mesh.waits.phase, mesh.ledger.phase if mesh.ledger else ""
    set_phase(mesh, CONTROL)
    primitives.all_reduce(x, mesh.group(group))
    set_phase(mesh, counted)
    mesh.waits.phase = doing
    return x


def on_host(x: Tensor, mesh: Mesh) -> Any:
    """The values of a tensor, once the device has come to it; on GPUs it is here that a rank waits for all others."""
    if x.device.type == "cpu":
        return x.tolist()
    with Wait(mesh.waits, "the device's work", "all axes", mesh.group("world").ranks):
        return x.tolist()


def set_phase(mesh: Mesh, phase: str) -> None:
    """Note what the rank is doing: for the ledger, if there is one, and for the report of a hang."""
    mesh.waits.phase = phase
    if mesh.ledger is not None:
        mesh.ledger.phase = phase


def evaluate_batch(state: Evaluated, batches: list[MicroBatch]) -> tuple[float, int]:
    """(sum of token losses, number of trained tokens) of one global batch, forward only through the pipeline."""
    stage, device = state.stage, state.mesh.device
    valid = count_valid_tokens(batches, state.mesh)
    one = torch.ones((), dtype=wide_dtype(stage.build.dtype), device=device)

    def forward(chunk: int, index: int, x: Tensor | None) -> Tensor:
        return stage(batches[index], x, one, step=0, train=False, chunk=chunk)

    losses = run_forward_only(len(batches), placement=state.pipeline.placement, group=state.mesh.group("pp"),
                              chunks=[partial(forward, chunk) for chunk in range(len(stage.decoders))],
                              activation=wire(state, batches), channels=state.mesh.channel)
    counted = stage.is_last and state.mesh.group("tp").rank == 0
    total = torch.zeros((), dtype=torch.float64, device=device)
    if counted:
        total = torch.stack(losses).double().sum()
    return float(on_host(control_sum(total, state.mesh, "world"), state.mesh)), valid
