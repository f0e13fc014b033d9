"""Diagnosis of numbers that are not finite: which tensor, on which rank, from which samples; and every norm."""

from __future__ import annotations

import math
from functools import partial

import torch

from megafour.comm.objects import gather_objects
from megafour.data.batch import MicroBatch
from megafour.parallel.data.bucket import Bucket
from megafour.parallel.data.buckets import sync_replicated
from megafour.parallel.pieces import named_pieces, pieces_of
from megafour.trainer.step import TrainState, count_valid_tokens, forward_backward, sum_over_world


def not_finite(state: TrainState, batches: list[MicroBatch], step: int) -> str:
    """Name the first tensor, rank and samples whose gradient is not finite, alike on all ranks.

    After the reduction every rank holds the sum, so the step's passes are run once more without it: the dropout bits
    are addressed, so they give the same values. Each micro-batch is run alone, to tell the samples apart. Where that
    finds nothing the step is computed as it was, with the sums, to tell what only they make from what does not recur.
    """
    mine: tuple[str, str, list[int]] | None = None
    for batch in batches:
        valid = count_valid_tokens([batch], state.mesh)
        bad: set[str] = set()
        forward_backward(state, [batch], step, valid, look=partial(_look, bad))
        state.buckets.finish_reduction()
        # The first in the order in which backward makes them.
        name = next((p.name for _, p in reversed(list(named_pieces(state.stage))) if p.name in bad), None)
        if name is not None and mine is None:
            mine = (state.mesh.describe(), name, batch.samples.tolist())
    found = gather_objects(mine, state.mesh.group("world"))
    named = [f for f in found if f is not None]
    again = None if named else _again(state, batches, step)
    state.buckets.zero()
    if again is not None:
        return again
    rank, name, samples = named[0]
    more = f", and {len(named) - 1} more ranks" if len(named) > 1 else ""
    return f"gradient of {name} on {rank}, samples {', '.join(map(str, samples))}{more}"


def _again(state: TrainState, batches: list[MicroBatch], step: int) -> str:
    """What computing the step again says, where no rank's gradient of any micro-batch is not finite."""
    loss = forward_backward(state, batches, step, count_valid_tokens(batches, state.mesh))
    state.buckets.finish_reduction()
    sync_replicated(state.buckets.buckets, state.groups)
    total, norm, _ = sum_over_world(state, loss, 0.0)
    if not math.isfinite(norm):
        what = "ranks" if state.mesh.world > 1 else "micro-batches"
        return f"not finite in the sum over {what} only, where it overflows"
    if not math.isfinite(total):
        return "the loss alone is not finite, every gradient is finite"
    return "it did not recur when the step was computed again"


def _look(bad: set[str], bucket: Bucket) -> None:
    """Note the logical names of a bucket's gradients that are not finite on this rank."""
    for param in bucket.params:
        bad.update(piece.name for piece in pieces_of(param)
                   if not bool(torch.isfinite(bucket.grad_of(param)[piece.rows]).all()))


def samples(state: TrainState, batches: list[MicroBatch]) -> str:
    """The numbers of the global batch's samples, as data.skip_samples takes them: `40-47`. All ranks call it."""
    mine = [int(number) for batch in batches for number in batch.samples]
    numbers = sorted({number for part in gather_objects(mine, state.mesh.group("world")) for number in part})
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def parameter_norms(state: TrainState) -> list[str]:
    """Lines `name: weight norm, gradient norm` over all ranks, each logical parameter once."""
    local: dict[str, tuple[float, float]] = {}
    seen = state.buckets.primary
    for _, bucket, master in (s for s in state.optimizer.flat_states() if s[0] == "weights"):
        grads = bucket.grad_shard
        for _, piece, a, b in bucket.shard_ranges():
            if piece.counted and seen:
                w, g = local.get(piece.name, (0.0, 0.0))
                local[piece.name] = (w + float(master[a:b].double().square().sum()),
                                     g + float(grads[a:b].double().square().sum()))
    total: dict[str, tuple[float, float]] = {}
    for part in gather_objects(local, state.mesh.group("world")):
        for name, (w, g) in part.items():
            old = total.get(name, (0.0, 0.0))
            total[name] = (old[0] + w, old[1] + g)
    return [f"{name}: weight norm {w**0.5:.6g}, gradient norm {g**0.5:.6g}" for name, (w, g) in sorted(total.items())]
