"""One process against one mesh: run both on the same batches, compare losses, gradients and weights on every rank."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megafour.verify.compare import TOLERANCES, Compared, Tolerance, merged, rank_of, worst
from megafour.verify.pool import Pool, RankError
from megafour.verify.shrink import Case
from megafour.verify.walk import Plant, Walk, generated_rank, mesh_rank, reference_rank, resumed_rank


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
    moments: float | None = None
    """Of AdamW, after a step that was skipped; null under an optimizer without any."""
    evaluation: float | None = None
    """Of the loss of an evaluation."""
    resumed_on: str | None = None
    """The mesh that went on from what this one saved; its deviations are among those above."""
    generation: float | None = None
    """How far the logits of the generated tokens lie below the largest; null where no model was saved."""
    error: str | None = None
    gradients: dict[str, float] = field(default_factory=dict)
    """Deviation of every parameter's gradient."""


def check(pool: Pool, case: Case, steps: int, *, precision: str = "fp64", device: str = "cpu",
          plant: Plant | None = None, timeout: float = 300) -> Outcome:
    """Run the reference and the mesh of `case`, and go on from what was saved; a rank's error is a failed outcome."""
    begin = time.monotonic()
    outcome = Outcome(case.degrees.words, dict(case.options), False, 0.0)
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    with tempfile.TemporaryDirectory(prefix="megafour-verify-") as folder:
        walk = Walk(case, steps, Path(folder), precision, device, plant)
        try:
            pool.run(reference_rank, 1, walk, timeout=timeout)
            ranks = pool.run(mesh_rank, case.degrees.world, walk, timeout=timeout, backend=backend)
            shapes = {name: tuple(x.shape) for name, x in walk.read_reference().weights.items()}
            problem = what_is_missing(ranks, shapes)
            if case.resumed is not None:
                outcome.resumed_on = case.resumed[0].words
                resumed = pool.run(resumed_rank, case.resumed[0].world, walk, timeout=timeout, backend=backend)
                after = what_is_missing(resumed, shapes)
                problem = problem or (after and f"resumed on {outcome.resumed_on}: {after}")
                ranks += resumed
            if case.thorough:
                (outcome.generation,) = pool.run(generated_rank, 1, walk, timeout=timeout)
            summarise(outcome, ranks, TOLERANCES[precision])
            if problem:
                outcome.passed, outcome.error = False, problem
        except (RankError, TimeoutError) as error:
            outcome.error = (f"rank {error.rank}: {error.kind}: {error.text}" if isinstance(error, RankError)
                             else str(error))
    outcome.seconds = time.monotonic() - begin
    return outcome


def summarise(outcome: Outcome, ranks: Iterable[Compared], tolerance: Tolerance) -> None:
    """Note the worst of all ranks; what is not a number is worse than any number."""
    ranks = list(ranks)
    gradients, weights = merged(r.gradients for r in ranks), merged(r.weights for r in ranks)
    moments = merged(r.moments for r in ranks)
    outcome.loss, outcome.grad_norm = worst(r.loss for r in ranks), worst(r.grad_norm for r in ranks)
    evaluations = [r.evaluation for r in ranks if r.evaluation is not None]
    outcome.evaluation = worst(evaluations) if evaluations else None
    outcome.gradients, outcome.moments = gradients, worst(moments.values()) if moments else None
    outcome.worst_gradient = max(gradients, key=lambda name: rank_of(gradients[name]))
    outcome.worst_weight = max(weights, key=lambda name: rank_of(weights[name]))
    outcome.gradient, outcome.weights = gradients[outcome.worst_gradient], weights[outcome.worst_weight]
    outcome.passed = (
        outcome.loss <= tolerance.loss and (outcome.evaluation or 0.0) <= tolerance.loss
        and outcome.grad_norm <= tolerance.grad_norm and outcome.gradient <= tolerance.gradient
        and outcome.weights <= tolerance.weights and (outcome.moments or 0.0) <= tolerance.gradient
        and (outcome.generation or 0.0) <= tolerance.weights)


def what_is_missing(ranks: list[Compared], shapes: dict[str, tuple[int, ...]]) -> str | None:
    """What some rank found wrong besides deviations, or what no rank compared, in words."""
    problem = next((f"rank {i}: {rank.problem}" for i, rank in enumerate(ranks) if rank.problem), None)
    missing = not_held(ranks, shapes)
    return problem or (f"no rank holds all of {', '.join(missing)}" if missing else None)


def not_held(ranks: Iterable[Compared], shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Logical tensors of which some element was compared on no rank."""
    masks = {name: np.zeros(shape, dtype=bool) for name, shape in shapes.items()}
    for rank in ranks:
        for name, offset, size, a, b in rank.held:
            part = np.zeros(size, dtype=bool)
            part.reshape(-1)[a:b] = True
            masks[name][tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))] |= part
    return [name for name, mask in masks.items() if not mask.all()]
