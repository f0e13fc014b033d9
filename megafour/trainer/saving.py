"""What a checkpoint of a run holds: logical tensors of weights and moments, and a small state beside them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megafour.checkpoint.tensors import LogicalTensor, flat_parts
from megafour.parallel.data.buckets import Bucket
from megafour.trainer.step import TrainState


def logical_tensors(state: TrainState, *, optimizer: bool = True) -> list[LogicalTensor]:
    """This rank's part of every logical tensor, as views: saving reads them, loading writes into them.

    `weights/NAME` are the masters (fp32, or fp64 in fp64 runs), from which 16-bit weights follow by rounding: so a
    checkpoint does not depend on the precision. `exp_avg/NAME` and `exp_avg_sq/NAME` are AdamW's moments.
    """
    found: dict[str, LogicalTensor] = {}
    written = state.buckets.sharded or state.mesh.group("dp_cp").rank == 0
    for kind, bucket, flat in state.optimizer.flat_states():
        if kind != "weights" and not optimizer:
            continue
        for name, shape, primary, parts in _parts(bucket, flat):
            key = f"{kind}/{name}"
            if key in found:
                found[key].parts.extend(parts)
            else:
                found[key] = LogicalTensor(key, shape, flat.dtype, parts, primary and written)
    return list(found.values())


def _parts(bucket: Bucket, flat: torch.Tensor) -> Iterator[tuple[str, tuple[int, ...], bool, list[Any]]]:
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
                scaler=state.scaler.state_dict())


def restore_small_state(state: TrainState, saved: dict[str, Any]) -> None:
    """After tensors were loaded into the masters: counters, scaler, and the model's weights from the masters."""
    state.optimizer.set_updates(int(saved["optimizer_updates"]))
    state.scaler.load_state_dict(saved["scaler"])
    state.optimizer.publish()
