"""What a rank does in a verification: train, skip a step, evaluate, save; on another mesh resume; generate."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megafour.checkpoint import store
from megafour.config.schema import Config
from megafour.inference.generate import generate
from megafour.inference.load import load_stage
from megafour.mesh import Mesh
from megafour.optim.lr_schedule import learning_rate
from megafour.trainer.saving import logical_tensors, restore_small_state, small_state
from megafour.trainer.setup import build_mesh, build_state
from megafour.trainer.step import TrainState, evaluate_batch, train_step
from megafour.verify.compare import (
    DTYPES,
    TOLERANCES,
    Compared,
    compare_gradients,
    compare_moments,
    compare_weights,
    deviation,
    worst,
)
from megafour.verify.reference import ONE_PROCESS, Reference, run_reference, start
from megafour.verify.shrink import Case
from megafour.verify.toy import EVALUATION, prompt_of, toy_batches

Plant = Callable[[], AbstractContextManager[Any]]
"""Enters a fault on a rank and takes it out again; how the tests prove that faults are found."""


@dataclass(frozen=True)
class Walk:
    """What every rank of one row is told."""

    case: Case
    steps: int
    folder: Path
    """Where the reference lies, and the checkpoint is saved."""
    precision: str
    device: str
    plant: Plant | None = None

    def device_of(self, rank: int) -> torch.device:
        """Where a rank computes; on GPUs it is made the current one."""
        if self.device != "cuda":
            return torch.device(self.device)
        torch.cuda.set_device(rank)
        return torch.device("cuda", rank)

    def read_reference(self) -> Reference:
        """What `reference_rank` has left."""
        found = torch.load(self.folder / "reference.pt", weights_only=False, mmap=True)    # once for all ranks
        assert isinstance(found, Reference)
        return found

    def planted(self) -> AbstractContextManager[Any]:
        """Inside, the fault is there."""
        return self.plant() if self.plant is not None else contextlib.nullcontext()


def reference_rank(rank: int, world: int, walk: Walk) -> None:
    """On one rank of the pool: run the reference and leave it in the walk's folder."""
    torch.save(run_reference(walk.case, walk.case.vocab_size, walk.steps, walk.device_of(0), DTYPES[walk.precision]),
               walk.folder / "reference.pt")


def mesh_rank(rank: int, world: int, walk: Walk) -> Compared:
    """On every rank of a mesh: train and compare; a thorough case also skips a step, evaluates and saves."""
    device, reference = walk.device_of(rank), walk.read_reference()
    with walk.planted():
        run = _Run(walk, walk.case.config, device, reference)
        run.state.buckets.fill(partial(start, seed=run.config.run.seed, dtype=DTYPES[walk.precision],
                                       tile_size=walk.case.sizes.init_tile))
        run.state.optimizer.reset_masters()
        for step in range(walk.steps):
            if step == walk.steps - 1 and walk.case.thorough:
                run.skip(step)
            run.train(step)
        run.compare(reference.weights, reference.learning_rates[:walk.steps])
        compare_moments(run.state, reference, walk.steps, run.found, run.tolerance.gradient_floor)
        if walk.case.thorough:
            run.evaluate()
            store.save(walk.folder, walk.steps, logical_tensors(run.state), small_state(run.state, walk.steps, 0, 0, 1),
                       {}, run.state.mesh.group("world").pg, walk.case.sizes)
    return run.found


def resumed_rank(rank: int, world: int, walk: Walk) -> Compared:
    """On every rank of another mesh: read what the first one has saved, evaluate, and take one more step."""
    device, reference = walk.device_of(rank), walk.read_reference()
    assert walk.case.resumed is not None
    with walk.planted():
        run = _Run(walk, walk.case.resumed[1], device, reference)
        saved = store.load(store.step_path(walk.folder, walk.steps), logical_tensors(run.state),
                           run.state.mesh.group("world").pg, sizes=walk.case.sizes)
        restore_small_state(run.state, saved)
        compare_moments(run.state, reference, walk.steps, run.found, run.tolerance.gradient_floor)
        run.evaluate()
        run.train(walk.steps)
        run.compare(reference.resumed_weights, reference.learning_rates)
    return run.found


def generated_rank(rank: int, world: int, walk: Walk) -> float:
    """On one rank: continue a prompt from what the mesh has saved. Returns how far the logit of the chosen token lies
    below the largest, as a share of it: 0 where all tokens are the reference's."""
    device, reference = walk.device_of(0), walk.read_reference()
    config = walk.case.config.replace({**ONE_PROCESS, "run.device": walk.device})
    with walk.planted():
        stage = load_stage(store.step_path(walk.folder, walk.steps), config, Mesh.single(device)).stage
        tokens, found = prompt_of(walk.case.vocab_size, config.data.seq_length), [0.0]
        for token, logits in reference.generated:
            chosen = next(generate(stage, tokens, 1, temperature=0.0))
            found.append(float((logits.max() - logits[chosen]) / logits.abs().max()))
            tokens.append(token)
    return worst(found)


class _Run:
    """One mesh's state beside the reference."""

    def __init__(self, walk: Walk, config: Config, device: torch.device, reference: Reference) -> None:
        self.walk, self.config, self.device, self.reference = walk, config, device, reference
        self.state = build_state(config, build_mesh(config, device, ledger=False), walk.case.vocab_size,
                                 sizes=walk.case.sizes)
        self.found, self.tolerance = Compared(0.0, 0.0), TOLERANCES[walk.precision]

    def _batches(self, step: int, valid: str) -> list[Any]:
        return [b.to(self.device) for b in toy_batches(
            self.walk.case.config, self.config, self.walk.case.vocab_size, step, valid,
            dp_rank=self.state.mesh.group("dp").rank, positions=self.state.stage.build.positions)]

    def _step(self, step: int, observe: Callable[[TrainState], None]) -> Any:
        rate = learning_rate(self.config.optimizer, self.config.lr_schedule, step, int(self.config.train.steps or 0))
        return train_step(self.state, self._batches(step, self.walk.case.valid), step, rate, observe=observe)

    def train(self, step: int) -> None:
        """One step, compared."""
        result = self._step(step, lambda state: compare_gradients(
            state, self.reference, step, self.found, self.tolerance.gradient_floor))
        self.found.loss = worst((self.found.loss, deviation(result.loss, self.reference.losses[step])))
        self.found.grad_norm = worst((self.found.grad_norm, deviation(result.grad_norm, self.reference.norms[step])))

    def skip(self, step: int) -> None:
        """A step in which one rank's gradients are not finite: nothing may change on any rank."""
        before = self._everything()
        result = self._step(step, self._poison)
        changed = sorted({name for name, value in self._everything().items()
                          if not torch.equal(value, before[name])})
        if result.applied or changed:
            self.found.problem = ("a step with a gradient that is not finite on one rank "
                                  + ("was applied" if result.applied else f"changed {changed[0]}"))

    def _poison(self, state: TrainState) -> None:
        """NaN in what the last rank holds of the gradients, and on no other."""
        if not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1:
            state.buckets.buckets[-1].grad_shard[0] = math.nan

    def _everything(self) -> dict[str, Tensor]:
        """A copy of all that a step moves."""
        found = {f"the model's weights, bucket {i}": bucket.weight_shard.clone()
                 for i, bucket in enumerate(self.state.buckets.buckets)}
        for i, (kind, _, flat) in enumerate(self.state.optimizer.flat_states()):
            found[f"{kind}, shard {i}"] = flat.clone()
        for i, master in enumerate(self.state.optimizer.masters):
            held = self.state.optimizer.optimizer.state.get(master, {})
            if "step" in held:
                found[f"AdamW's count of updates, shard {i}"] = held["step"].clone()
        return found

    def compare(self, weights: dict[str, Tensor], rates: list[float]) -> None:
        """Compare the weights after steps at these rates."""
        compare_weights(self.state, weights, self.found, self.tolerance.weight_floor * sum(rates))

    def evaluate(self) -> None:
        """The mean loss of a batch of which the ranks have uneven parts."""
        total, valid = evaluate_batch(self.state, self._batches(*EVALUATION))
        self.found.evaluation = deviation(total / max(valid, 1), self.reference.evaluation)
