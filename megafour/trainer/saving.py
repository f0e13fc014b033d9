"""What a checkpoint of a run holds, and how the run saves it: at once, or while training goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megafour.checkpoint import store
from megafour.checkpoint.agreement import rank_in
from megafour.checkpoint.background import BackgroundSaver
from megafour.checkpoint.errors import CheckpointError
from megafour.checkpoint.folder import size_of
from megafour.checkpoint.tensors import LogicalTensor, flat_parts
from megafour.config.schema import CheckpointConfig
from megafour.parallel.data.bucket import Bucket
from megafour.trainer.logs import RankLog
from megafour.trainer.step import TrainState


class Saver:
    """Saves a run's checkpoints and prunes old ones; every rank calls each method together."""

    def __init__(self, config: CheckpointConfig, folder: Path, group: ProcessGroup | None, log: RankLog) -> None:
        self.config, self.folder, self.group, self.log = config, Path(folder), group, log
        self._background = BackgroundSaver(group) if config.asynchronous else None
        self._blocked = 0.0

    def save(self, step: int, held: list[LogicalTensor], state: dict[str, Any], files: dict[str, Path | str],
             unless: Callable[[], bool] | None = None) -> bool:
        """Save a step; when asynchronous, begin to, once the save before has ended and if `unless` then says no.

        Returns:
            whether it did.
        Raises:
            CheckpointError: on all ranks alike; when asynchronous, of the save before.
        """
        began = time.monotonic()
        if self._background is None:
            path = store.save(self.folder, step, held, state, files, self.group)
            self._prune(path)
            self._say(step, time.monotonic() - began)
            return True
        self.wait()
        if unless is not None and unless():
            return False
        self._background.start(self.folder, step, held, state, files, self._prune)
        self._blocked = time.monotonic() - began
        return True

    @property
    def failed(self) -> bool:
        """Whether this rank knows of a save in the background that has failed."""
        return self._background is not None and self._background.failed

    @property
    def under_way(self) -> bool:
        """Whether a save in the background has not ended on this rank."""
        return self._background is not None and self._background.step is not None and not self._background.done

    def look(self) -> None:
        """Say that a save in the background has ended, if one has; never waits and raises nothing."""
        if self._background is not None and self._background.done and not self._background.failed:
            self.wait()

    def wait(self) -> None:
        """Wait for a save in the background.

        Raises:
            CheckpointError: on all ranks alike, when it failed.
        """
        step = self._background.wait() if self._background is not None else None
        if step is not None and self._background is not None:
            self._say(step, self._background.seconds, self._blocked)

    def fail(self) -> None:
        """Some rank's save in the background has failed: raise its error on every rank."""
        self.wait()
        raise CheckpointError("a save in the background failed on another rank")

    def _prune(self, path: Path) -> None:
        if rank_in(self.group) == 0:
            store.prune(self.folder, self.config.keep, self.config.keep_every)

    def _say(self, step: int, seconds: float, blocked: float | None = None) -> None:
        """One line a save: its time, its size and rate."""
        if not self.log.console:
            return
        size = size_of(store.step_path(self.folder, step))
        behind = "" if blocked is None else f" in the background, training stood still for {blocked:.2f} s"
        self.log.say(f"saved step {step} in {seconds:.2f} s ({size / 1e6:,.1f} MB, {size / 1e6 / seconds:,.1f} MB/s)"
                     f"{behind}")


def logical_tensors(state: TrainState, *, optimizer: bool = True) -> list[LogicalTensor]:
    """This rank's part of every logical tensor, as views: saving reads them, loading writes into them.

    `weights/NAME` are the masters (fp32, or fp64 in fp64 runs), from which 16-bit weights follow by rounding: so a
    checkpoint does not depend on the precision. `exp_avg/NAME` and `exp_avg_sq/NAME` are AdamW's moments.
    """
    found: dict[str, LogicalTensor] = {}
    written = state.buckets.primary
    for kind, bucket, flat in state.optimizer.flat_states():
        if kind != "weights" and not optimizer:
            continue
        for name, shape, primary, parts in shard_parts(bucket, flat):
            key = f"{kind}/{name}"
            if key in found:
                found[key].parts.extend(parts)
            else:
                found[key] = LogicalTensor(key, shape, flat.dtype, parts, primary and written)
    return list(found.values())


def shard_parts(bucket: Bucket, flat: torch.Tensor) -> Iterator[tuple[str, tuple[int, ...], bool, list[Any]]]:
    """(name, logical shape, counted, rectangles) of each piece that the flat shard holds something of."""
    for param, piece, a, b in bucket.shard_ranges():
        start, _ = piece.flat_range(tuple(param.shape))
        begin = a + bucket.shard.start - bucket.starts[param] - start
        parts = flat_parts(piece.offset, piece.size, begin, begin + b - a, flat[a:b])
        yield piece.name, piece.shape, piece.counted, parts


def small_state(state: TrainState, step: int, consumed_samples: int, consumed_tokens: int,
                skipped_steps: int) -> dict[str, Any]:
    """All that must survive besides tensors, ready for JSON."""
    return dict(step=step, consumed_samples=consumed_samples, consumed_tokens=consumed_tokens,
                skipped_steps=skipped_steps, optimizer_updates=state.optimizer.updates,
                scaler=state.scaler.state_dict(),
                spikes=None if state.spikes is None else state.spikes.state_dict())


def restore_small_state(state: TrainState, saved: dict[str, Any]) -> None:
    """After tensors were loaded into the masters: counters, scaler, norms, and the model's weights from the masters."""
    state.optimizer.set_updates(int(saved["optimizer_updates"]))
    state.scaler.load_state_dict(saved["scaler"])
    if state.spikes is not None and saved.get("spikes"):
        state.spikes.load_state_dict(saved["spikes"])
    state.optimizer.publish()
