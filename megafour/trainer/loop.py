"""The training loop: steps, evaluations and checkpoints in their order, until the end or a request to stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megafour.checkpoint.errors import CheckpointError
from megafour.comm import primitives
from megafour.config.load import to_yaml
from megafour.config.schema import Config
from megafour.cost.flops import mfu, model_flops
from megafour.data.batch import MicroBatch
from megafour.data.dataset import Datasets
from megafour.data.loader import BatchLoader
from megafour.data.progress import go_on, positions
from megafour.data.tokenizer import Tokenizer
from megafour.optim.lr_schedule import learning_rate
from megafour.parallel.pipeline.record import Recorder
from megafour.trainer import diagnose, traffic
from megafour.trainer.logs import RankLog
from megafour.trainer.memory import peak_bytes
from megafour.trainer.metrics import Metrics
from megafour.trainer.slow import SlowRanks
from megafour.trainer.step import (
    StepResult,
    TrainState,
    control_sum,
    evaluate_batch,
    on_host,
    set_phase,
    train_step,
)
from megafour.trainer.watch import HangWatch

if TYPE_CHECKING:
    from megafour.trainer.saving import Saver


class TrainingError(Exception):
    """Training cannot go on; one line says why."""


@dataclass
class Progress:
    """Where the run stands; survives in every checkpoint."""

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0


@dataclass
class Run:
    """One training run on one rank."""

    config: Config
    state: TrainState
    datasets: Datasets
    tokenizer: Tokenizer | None
    log: RankLog
    stop_asked: Callable[[], bool]
    """Whether this process was asked to stop (a signal, the stop file)."""
    peak_tflops: float | None = None
    watch: HangWatch | None = None
    """Ends a run that hangs."""
    metrics: Metrics | None = None
    progress: Progress = field(default_factory=Progress)
    saved_step: int = -1
    flags: float = 0.0
    """What the ranks last agreed on: above 0 when any was asked to stop, above their number when a save failed."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """All ranks, for checkpoints; None in a world of one."""
        return self.state.mesh.group("world").pg

    @cached_property
    def saver(self) -> Saver:
        """Writes this run's checkpoints. All ranks make it together, for it may make a process group."""
        # Here and below: no start should wait half a second for the import of torch.distributed.checkpoint.
        from megafour.trainer.saving import Saver

        return Saver(self.config.checkpoint, Path(self.config.checkpoint_dir), self.group, self.log)

    @cached_property
    def flops_per_token(self) -> float:
        """Model FLOPs of a trained token (causal attention counted half)."""
        return model_flops(self.state.stage.build.architecture, self.config.data.seq_length).per_token

    # --- data ---------------------------------------------------------------------------------------------------

    def loader(self, dataset: Any, start: int = 0, workers: int = 0) -> BatchLoader:
        """This rank's micro-batches of a dataset, from global sample `start`."""
        mesh, cfg = self.state.mesh, self.config
        return BatchLoader(dataset, dp_rank=mesh.group("dp").rank, dp_size=mesh.dp,
                           global_batch_size=cfg.train.global_batch_size, micro_batch_size=cfg.train.micro_batch_size,
                           positions=self.state.stage.build.positions, start_sample=start, workers=workers,
                           skip_samples=cfg.data.skip_samples if dataset is self.datasets.train else (),
                           document_mask=cfg.data.document_mask)

    def _on_device(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        device = self.state.mesh.device
        return batches if device.type == "cpu" else [b.to(device) for b in batches]

    # --- the loop -----------------------------------------------------------------------------------------------

    def train(self) -> str:
        """Train to train.steps and save the last step; returns `finished`, or `preempted` when asked to stop."""
        cfg, progress = self.config, self.progress
        if cfg.checkpoint.asynchronous:
            self.saver.look()       # makes its group now: to meet for it later, ranks would wait for one that has died
        steps = iter(self.loader(self.datasets.train, progress.consumed_samples, cfg.data.workers))
        total = int(cfg.train.steps or 0)
        outcome, first_step, enough = "finished", True, False
        slow = SlowRanks(self.state.mesh, cfg.logging.slow_ranks)
        world = self.state.mesh.world
        while progress.step < total:
            started = time.perf_counter()
            slow.begin()
            self._now("data", progress.step + 1)
            batches = self._on_device(next(steps))
            result, lr = self._one_step(batches, total)
            line = self._metrics(result, lr, time.perf_counter() - started)
            if not first_step:      # which has start-up in it
                for text in slow.end(time.perf_counter() - started):
                    self.log.say(text)
            else:
                first_step = False
                if self.watch is not None:
                    self.watch.shorten()
            self.flags, paused = result.flags, False
            if cfg.eval.every and progress.step % cfg.eval.every == 0 and not self.flags:
                paused = True
                line.update(self.evaluate())
            if self.metrics is not None:
                self.metrics.write(line)
            if cfg.checkpoint.every and progress.step % cfg.checkpoint.every == 0 and not self.flags:
                paused, enough = True, not self.save(self._asked if self._saving() else None)
            if cfg.checkpoint.asynchronous:
                self.saver.look()
            if paused and not self.flags:
                self.flags = self._agree()
            if self.flags > world:
                self.saver.fail()
            if self.flags > 0:
                outcome = "preempted"
                break
        if outcome == "finished" or not (enough or self._saving()):
            self.save()
        self.saver.wait()
        return outcome

    def _saving(self) -> bool:
        """Whether a save in the background is under way on any rank.

        A run that is asked to stop meanwhile ends with that one: to wait for it and then for another would take twice
        as long, which the one who asks may not grant, and it is younger than a save is long.
        """
        mine = torch.tensor(float(self.saver.under_way), dtype=torch.float64, device=self.state.mesh.device)
        return self.config.checkpoint.asynchronous and bool(on_host(control_sum(mine, self.state.mesh, "world"),
                                                                    self.state.mesh))

    def _flag(self) -> float:
        """What this rank adds to the sum over ranks: 1 when it was asked to stop, more than all those when a save of
        its own in the background has failed."""
        failed = self.config.checkpoint.asynchronous and self.saver.failed
        return float(self.stop_asked()) + (self.state.mesh.world + 1) * failed

    def _agree(self) -> float:
        """The sum of all ranks' flags now, outside a step: an evaluation or a save may have taken long."""
        mine = torch.tensor(self._flag(), dtype=torch.float64, device=self.state.mesh.device)
        return float(on_host(control_sum(mine, self.state.mesh, "world"), self.state.mesh))

    def _asked(self) -> bool:
        """Whether any rank was asked to stop by now."""
        self.flags = self._agree()
        return self.flags > 0

    def _now(self, phase: str, step: int) -> None:
        """Note what this rank is about to do, for the report of a hang."""
        self.state.mesh.waits.step = step
        set_phase(self.state.mesh, phase)

    def _one_step(self, batches: list[MicroBatch], total: int) -> tuple[StepResult, float]:
        cfg, progress, state = self.config, self.progress, self.state
        lr = learning_rate(cfg.optimizer, cfg.lr_schedule, progress.step, total)
        if state.mesh.ledger is not None:
            state.mesh.ledger.reset()
        drawn = cfg.logging.timeline and progress.step == min(1, total - 1)    # the first step has start-up in it
        state.recorder = Recorder(state.mesh.device) if drawn else None
        started = time.perf_counter()
        with self._profile():
            result = train_step(state, batches, progress.step, lr, self._flag)
        if state.mesh.ledger is not None and (progress.step == 0 or (progress.step + 1) % cfg.logging.every == 0):
            table = traffic.table(cfg, state, batches, time.perf_counter() - started, updated=result.applied)
            self.log.say(f"traffic of {state.mesh.describe()} in step {progress.step + 1}\n{table}")
        if state.recorder is not None:
            self._timeline(state.recorder, len(batches))
        if not result.applied:
            self._skipped(batches, result)
        else:
            progress.skipped_in_a_row = 0
        progress.step += 1
        progress.consumed_samples += cfg.train.global_batch_size
        progress.consumed_tokens += cfg.train.global_batch_size * cfg.data.seq_length
        if cfg.logging.parameter_norms and progress.step % cfg.logging.parameter_norms == 0:
            for text in diagnose.parameter_norms(state):
                self.log.say(text)
        return result, lr

    def _skipped(self, batches: list[MicroBatch], result: StepResult) -> None:
        """Count a step that was not applied, say what was not finite or how far out, stop when it goes on."""
        progress = self.progress
        progress.skipped_steps += 1
        progress.skipped_in_a_row += 1
        if result.spike is not None:
            self.log.say(f"step {progress.step + 1} skipped: {result.spike}; samples "
                         f"{diagnose.samples(self.state, batches)}")
        elif self.state.scaler.may_overflow and math.isfinite(result.loss):
            self.log.say(f"step {progress.step + 1} skipped: gradients overflow in fp16, loss scale now "
                         f"{self.state.scaler.scale:g}")
        else:
            found = diagnose.not_finite(self.state, batches, progress.step)
            self.log.say(f"step {progress.step + 1} skipped: loss {result.loss}, gradient norm {result.grad_norm}; "
                         f"{found}")
        limit = self.config.train.max_skipped_steps
        if progress.skipped_in_a_row >= limit:
            self.saver.wait()       # all ranks raise alike: what is being saved is not lost
            raise TrainingError(f"{limit} steps in a row were skipped (train.max_skipped_steps={limit}): the last was "
                                f"step {progress.step + 1}, loss {result.loss}, gradient norm {result.grad_norm}")

    def _timeline(self, recorder: Recorder, microbatches: int) -> None:
        from megafour.trainer.timeline import save_timeline

        self.state.recorder = None
        text = save_timeline(self.state, recorder, microbatches, self.config.parallel.pipeline.schedule,
                             Path(self.config.run_dir) / "logs")
        if text is not None:
            self.log.say(f"timeline of step {self.progress.step + 1}\n{text}")

    def _profile(self) -> Any:
        from contextlib import nullcontext

        if self.config.logging.profile is None or self.progress.step + 1 != self.config.logging.profile:
            return nullcontext()
        path = Path(self.config.run_dir) / "logs" / f"trace-rank-{self.state.mesh.rank}.json"
        return torch.profiler.profile(on_trace_ready=lambda p: p.export_chrome_trace(str(path)))

    def _metrics(self, result: StepResult, lr: float, seconds: float) -> dict[str, Any]:
        """The line of this step, keys as documented; the peak is the maximum over ranks."""
        cfg, mesh, progress = self.config, self.state.mesh, self.progress
        peak = torch.tensor(float(peak_bytes(mesh.device)), dtype=torch.float64, device=mesh.device)
        primitives.all_reduce(peak, mesh.group("world"), op="max")
        peak_memory = int(on_host(peak, mesh))
        rate = cfg.train.global_batch_size * cfg.data.seq_length / seconds
        return dict(
            step=progress.step, time=time.time(), loss=result.loss, grad_norm=result.grad_norm, lr=lr,
            consumed_tokens=progress.consumed_tokens, consumed_samples=progress.consumed_samples,
            tokens_per_second=rate, tokens_per_second_per_gpu=rate / mesh.world, step_seconds=seconds,
            mfu=mfu(rate, self.flops_per_token, self.peak_tflops, mesh.world), peak_memory_bytes=peak_memory,
            skipped_steps=progress.skipped_steps)

    # --- evaluation ---------------------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """`valid_loss/NAME` of every validation set over at most eval.batches global batches; changes nothing.

        Empty when a rank was asked to stop meanwhile: a part of a set is no measure of it.
        """
        losses = {}
        self._now("evaluation", self.progress.step)
        for name, dataset in self.datasets.valid.items():
            total, tokens = 0.0, 0
            for index, batches in enumerate(self.loader(dataset)):
                if index == self.config.eval.batches:
                    break
                part, valid = evaluate_batch(self.state, self._on_device(batches))
                total, tokens = total + part, tokens + valid
                self.flags = self._agree()
                if self.flags:
                    return {}
            losses[f"valid_loss/{name}"] = total / max(tokens, 1)
        return losses

    # --- checkpoints --------------------------------------------------------------------------------------------

    def save(self, unless: Callable[[], bool] | None = None) -> bool:
        """Save this step (or begin to), unless it is saved already, and prune old ones.

        `unless`: asked once the save before has ended. Returns False when it said so and nothing was saved.
        """
        cfg, progress = self.config, self.progress
        if self.saved_step == progress.step:
            return True
        from megafour.trainer.saving import logical_tensors, small_state

        self._now("save", progress.step)
        files: dict[str, Path | str] = {"config.yaml": to_yaml(cfg)}
        if self.tokenizer is not None:
            files.update(self.tokenizer.files())
        small = small_state(self.state, progress.step, progress.consumed_samples, progress.consumed_tokens,
                            progress.skipped_steps)
        small.update(skipped_in_a_row=progress.skipped_in_a_row, tokenizer=self.datasets.tokenizer,
                     data=positions(self.datasets.train, progress.consumed_samples),
                     valid={name: [source.identity for source in dataset.sources]
                            for name, dataset in self.datasets.valid.items()})
        if not self.saver.save(progress.step, logical_tensors(self.state), small, files, unless):
            return False
        self.saved_step = progress.step
        return True

    def restore(self, path: Path, *, verified: bool = False) -> None:
        """Go on from a checkpoint of any mesh; `verified`: it has been read and found whole already."""
        from megafour.checkpoint import store
        from megafour.trainer.saving import logical_tensors, restore_small_state

        saved = store.load(path, logical_tensors(self.state), self.group, cast=True,
                           verified=verified)
        try:
            restore_small_state(self.state, saved)
            self.progress = Progress(int(saved["step"]), int(saved["consumed_samples"]), int(saved["consumed_tokens"]),
                                     int(saved["skipped_steps"]), int(saved.get("skipped_in_a_row", 0)))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: its state.json is no run's: {type(error).__name__}: {error}") from None
        if "data" in saved:
            for line in go_on(self.datasets.train, saved["data"], self.progress.consumed_samples):
                self.log.say(line)
        own = path.resolve().parent == Path(self.config.checkpoint_dir).resolve()
        self.saved_step = self.progress.step if own else -1     # another run's checkpoint is not this run's
