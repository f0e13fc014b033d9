"""One process against one mesh: run both on the same batches, compare losses, gradients and weights on every rank."""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megafour.optim.lr_schedule import learning_rate
from megafour.parallel.pieces import Piece, pieces_of
from megafour.trainer.setup import build_mesh, build_state
from megafour.trainer.step import TrainState, train_step
from megafour.verify.pool import Pool, RankError
from megafour.verify.reference import Reference, run_reference, start
from megafour.verify.shrink import VOCAB, Case
from megafour.verify.toy import toy_batches

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Tolerance:
    """The largest deviations that pass; those of 16 and 32 bits are what rounding alone does to the toy, with room."""

    loss: float
    grad_norm: float
    gradient: float
    weights: float
    gradient_floor: float = 1e-6
    """A gradient is compared on a scale of at least this share of the model's largest: GPT-2's key bias has none at
    all, but what rounding leaves of it."""
    weight_floor: float = 1.0
    """A weight is compared on a scale of at least so many times the sum of the learning rates used: AdamW moves one
    whose gradient is nothing but rounding by up to the whole rate, in either direction."""


TOLERANCES = {"fp64": Tolerance(1e-9, 1e-9, 1e-9, 1e-9), "fp32": Tolerance(1e-5, 1e-4, 1e-3, 1e-3, 1e-4, 10),
              "bf16": Tolerance(1e-2, 5e-2, 0.25, 1e-1, 1e-2, 10)}

Plant = Callable[[], AbstractContextManager[Any]]
"""Enters a fault on a rank and takes it out again; how the tests prove that faults are found."""


@dataclass
class Compared:
    """What one rank found: deviations from the reference, and which elements it holds."""

    loss: float
    grad_norm: float
    gradients: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    held: list[tuple[str, tuple[int, ...], tuple[int, ...], int, int]] = field(default_factory=list)
    """Name, offset and size of a rectangle, and the flat range of it, whose gradients were here."""


@dataclass
class Outcome:
    """One line of the table. Deviations are null where the mesh did not finish."""

    mesh: str
    options: dict[str, str]
    passed: bool
    seconds: float
    loss: float | None = None
    grad_norm: float | None = None
    gradient: float | None = None
    worst_gradient: str | None = None
    weights: float | None = None
    worst_weight: str | None = None
    error: str | None = None
    gradients: dict[str, float] = field(default_factory=dict)
    """Deviation of every parameter's gradient."""


def check(pool: Pool, case: Case, steps: int, *, precision: str = "fp64", device: str = "cpu",
          plant: Plant | None = None, timeout: float = 300) -> Outcome:
    """Run `steps` steps of the reference and of the mesh of `case`; a rank's error is a failed outcome."""
    begin = time.monotonic()
    options = dict(case.options)
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    with tempfile.TemporaryDirectory(prefix="megafour-verify-") as folder:
        path = str(Path(folder) / "reference.pt")
        try:
            pool.run(reference_rank, 1, case, steps, path, precision, device, timeout=timeout)
            ranks = pool.run(mesh_rank, case.degrees.world, case, steps, path, precision, device, plant,
                             timeout=timeout, backend=backend)
        except (RankError, TimeoutError) as error:
            text = f"rank {error.rank}: {error.kind}: {error.text}" if isinstance(error, RankError) else str(error)
            return Outcome(case.degrees.words, options, False, time.monotonic() - begin, error=text)
        shapes = {name: tuple(x.shape) for name, x in torch.load(path, weights_only=False).weights.items()}
    outcome = summarise(ranks, TOLERANCES[precision])
    outcome.mesh, outcome.options, outcome.seconds = case.degrees.words, options, time.monotonic() - begin
    missing = not_held(ranks, shapes)
    if missing:
        outcome.passed, outcome.error = False, f"no rank holds all of {', '.join(missing)}"
    return outcome


def summarise(ranks: Iterable[Compared], tolerance: Tolerance) -> Outcome:
    """The worst of all ranks; what is not a number is worse than any number."""
    ranks = list(ranks)
    gradients = merged(r.gradients for r in ranks)
    weights = merged(r.weights for r in ranks)
    loss, norm = worst(r.loss for r in ranks), worst(r.grad_norm for r in ranks)
    named_gradient = max(gradients, key=lambda name: _rank(gradients[name]))
    named_weight = max(weights, key=lambda name: _rank(weights[name]))
    gradient, weight = gradients[named_gradient], weights[named_weight]
    passed = (loss <= tolerance.loss and norm <= tolerance.grad_norm and gradient <= tolerance.gradient
              and weight <= tolerance.weights)
    return Outcome("", {}, passed, 0.0, loss, norm, gradient, named_gradient, weight, named_weight,
                   gradients=gradients)


def _rank(x: float) -> float:
    return math.inf if math.isnan(x) else x


def worst(numbers: Iterable[float]) -> float:
    """The maximum; NaN, which compares with nothing, wins."""
    return max(numbers, key=_rank)


def merged(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    """The worst number of each name."""
    out: dict[str, float] = {}
    for part in parts:
        for name, x in part.items():
            out[name] = worst((x, out.get(name, 0.0)))
    return out


def not_held(ranks: Iterable[Compared], shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Logical tensors of which some element was compared on no rank."""
    masks = {name: np.zeros(shape, dtype=bool) for name, shape in shapes.items()}
    for rank in ranks:
        for name, offset, size, a, b in rank.held:
            part = np.zeros(size, dtype=bool)
            part.reshape(-1)[a:b] = True
            masks[name][tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))] |= part
    return [name for name, mask in masks.items() if not mask.all()]


def reference_rank(rank: int, world: int, case: Case, steps: int, path: str, precision: str, device: str) -> None:
    """On one rank of the pool: run the reference and leave it at `path`."""
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    torch.save(run_reference(case.config, VOCAB, steps, case.valid, where, DTYPES[precision]), path)


def mesh_rank(rank: int, world: int, case: Case, steps: int, path: str, precision: str, device: str,
              plant: Plant | None) -> Compared:
    """On every rank of a mesh: train `steps` steps and compare with the reference at `path`."""
    where = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    reference: Reference = torch.load(path, weights_only=False)
    with plant() if plant is not None else contextlib.nullcontext():
        return _compare(case, steps, reference, precision, where)


def _compare(case: Case, steps: int, reference: Reference, precision: str, device: torch.device) -> Compared:
    config = case.config
    mesh = build_mesh(config, device, ledger=False)
    state = build_state(config, mesh, VOCAB)
    state.buckets.fill(partial(start, seed=config.run.seed, dtype=DTYPES[precision]))
    state.optimizer.reset_masters()
    found = Compared(0.0, 0.0)
    for step in range(steps):
        batches = [b.to(device) for b in toy_batches(
            config, config, VOCAB, step, case.valid, dp_rank=mesh.group("dp").rank,
            positions=state.stage.build.positions)]
        rate = learning_rate(config.optimizer, config.lr_schedule, step, int(config.train.steps or 0))
        result = train_step(state, batches, step, rate,
                            observe=lambda s, step=step: _gradients(  # type: ignore[misc]
                                s, reference.grads[step], found, TOLERANCES[precision].gradient_floor))
        found.loss = worst((found.loss, deviation(result.loss, reference.losses[step])))
        found.grad_norm = worst((found.grad_norm, deviation(result.grad_norm, reference.norms[step])))
    floor = TOLERANCES[precision].weight_floor * sum(reference.learning_rates)
    for bucket in state.buckets.buckets:
        with state.buckets.whole(bucket):
            for param in bucket.params:
                _weights(param, reference.weights, found, floor)
    return found


def _weights(param: torch.nn.Parameter, wanted: dict[str, Tensor], found: Compared, floor: float) -> None:
    """Compare a parameter, on a scale of at least `floor`."""
    for piece in pieces_of(param):
        want = wanted[piece.name]
        part = _difference(piece.view(param), _rectangle(want, piece))
        scaled = part / max(float(want.abs().max()), floor)
        found.weights[piece.name] = worst((scaled, found.weights.get(piece.name, 0.0)))


def deviation(got: float, want: float) -> float:
    """|got - want| / |want|."""
    return abs(got - want) / max(abs(want), 1e-300) if got != want else 0.0


def _gradients(state: TrainState, wanted: dict[str, Tensor], found: Compared, share: float) -> None:
    """Compare this rank's shards of the summed gradients, on a scale of at least `share` of the model's largest."""
    found.held = []
    floor = max(share * max(float(g.abs().max()) for g in wanted.values()), 1e-300)
    for bucket in state.buckets.buckets:
        for param, piece, a, b in bucket.shard_ranges():
            begin = piece.flat_range(tuple(param.shape))[0] + bucket.starts[param] - bucket.shard.start
            want = wanted[piece.name]
            part = _difference(bucket.grad_shard[a:b], _rectangle(want, piece).reshape(-1)[a - begin:b - begin])
            scaled = part / max(float(want.abs().max()), floor)
            found.gradients[piece.name] = worst((scaled, found.gradients.get(piece.name, 0.0)))
            found.held.append((piece.name, piece.offset, piece.size, a - begin, b - begin))


def _rectangle(whole: Tensor, piece: Piece) -> Tensor:
    """A piece's part of a logical tensor."""
    return whole[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.size, strict=True))]


def _difference(got: Tensor, want: Tensor) -> float:
    return float((got.detach().cpu().double() - want.double()).abs().max())
