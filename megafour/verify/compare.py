"""What one rank holds against the reference: gradients, weights and moments, each on its own scale."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megafour.architecture.pieces import Piece
from megafour.parallel.pieces import pieces_of
from megafour.trainer.saving import logical_tensors
from megafour.trainer.step import TrainState
from megafour.verify.reference import Reference

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Tolerance:
    """The largest deviations that pass; those of 16 and 32 bits are what rounding alone does to the toy, with room."""

    loss: float
    """Of the training loss, and of the loss of an evaluation."""
    grad_norm: float
    gradient: float
    """Of gradients, and of AdamW's moments, which are sums of them."""
    weights: float
    gradient_floor: float = 1e-6
    """A gradient is compared on a scale of at least this share of the model's largest: GPT-2's key bias has none at
    all, but what rounding leaves of it."""
    weight_floor: float = 1.0
    """A weight is compared on a scale of at least so many times the sum of the learning rates used: AdamW moves one
    whose gradient is nothing but rounding by up to the whole rate, in either direction."""


TOLERANCES = {"fp64": Tolerance(1e-9, 1e-9, 1e-9, 1e-9), "fp32": Tolerance(1e-5, 1e-4, 1e-3, 1e-3, 1e-4, 10),
              "bf16": Tolerance(1e-2, 5e-2, 0.25, 1e-1, 1e-2, 10)}


@dataclass
class Compared:
    """What one rank found: deviations from the reference, and which elements it holds."""

    loss: float
    grad_norm: float
    gradients: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    held: list[tuple[str, tuple[int, ...], tuple[int, ...], int, int]] = field(default_factory=list)
    """Name, offset and size of a rectangle, and the flat range of it, whose gradients were here."""
    moments: dict[str, float] = field(default_factory=dict)
    evaluation: float | None = None
    problem: str | None = None
    """What else is wrong, in words."""


def worst(numbers: Iterable[float]) -> float:
    """The maximum; NaN, which compares with nothing, wins."""
    return max(numbers, key=rank_of)


def rank_of(x: float) -> float:
    """What is not a number is worse than any number."""
    return math.inf if math.isnan(x) else x


def merged(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    """The worst number of each name."""
    out: dict[str, float] = {}
    for part in parts:
        for name, x in part.items():
            out[name] = worst((x, out.get(name, 0.0)))
    return out


def deviation(got: float, want: float) -> float:
    """|got - want| / |want|."""
    return abs(got - want) / max(abs(want), 1e-300) if got != want else 0.0


def compare_gradients(state: TrainState, reference: Reference, step: int, found: Compared, share: float) -> None:
    """Compare this rank's shards of the summed gradients.

    The scale of a tensor is the largest of its own gradients, of `share` of the model's largest, and of what rounding
    does to it (`Reference.rounding`).
    """
    wanted, rounding = reference.grads[step], reference.rounding
    found.held = []
    floor = max(share * max(float(g.abs().max()) for g in wanted.values()), 1e-300)
    for bucket in state.buckets.buckets:
        for param, piece, a, b in bucket.shard_ranges():
            begin = piece.flat_range(tuple(param.shape))[0] + bucket.starts[param] - bucket.shard.start
            want = wanted[piece.name]
            part = _difference(bucket.grad_shard[a:b], _rectangle(want, piece).reshape(-1)[a - begin:b - begin])
            scaled = part / max(float(want.abs().max()), floor, rounding.get(piece.name, 0.0))
            found.gradients[piece.name] = worst((scaled, found.gradients.get(piece.name, 0.0)))
            found.held.append((piece.name, piece.offset, piece.size, a - begin, b - begin))


def compare_weights(state: TrainState, wanted: dict[str, Tensor], found: Compared, floor: float) -> None:
    """Compare every parameter as the forward reads it, on a scale of at least `floor`."""
    for bucket in state.buckets.buckets:
        with state.buckets.whole(bucket):
            for param in bucket.params:
                for piece in pieces_of(param):
                    want = wanted[piece.name]
                    part = _difference(param[piece.rows], _rectangle(want, piece))
                    scaled = part / max(float(want.abs().max()), floor)
                    found.weights[piece.name] = worst((scaled, found.weights.get(piece.name, 0.0)))


def compare_moments(state: TrainState, reference: Reference, steps: int, found: Compared, share: float) -> None:
    """Compare AdamW's moments after `steps` updates, and its count of them.

    The second moment is compared by its root, so that both are on the scale of gradients: at least `share` of the
    model's largest.
    """
    count = state.optimizer.updates
    if reference.moments and count != steps and found.problem is None:
        found.problem = f"AdamW counts {count} updates after {steps}"
    for kind, wanted in reference.moments.items():
        floor = max(share * max(float(_rooted(kind, x).abs().max()) for x in wanted.values()), 1e-300)
        for held in logical_tensors(state):
            prefix, name = held.name.split("/", 1)
            if prefix != kind:
                continue
            want = _rooted(kind, wanted[name])
            scale = max(float(want.abs().max()), floor, reference.rounding.get(name, 0.0))
            for offset, size, part in held.parts:
                there = want[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
                key = f"{kind}/{name}"
                found.moments[key] = worst((_difference(_rooted(kind, part), there) / scale,
                                            found.moments.get(key, 0.0)))


def _rooted(kind: str, x: Tensor) -> Tensor:
    return x.sqrt() if kind == "exp_avg_sq" else x


def _rectangle(whole: Tensor, piece: Piece) -> Tensor:
    """A piece's part of a logical tensor."""
    return whole[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.size, strict=True))]


def _difference(got: Tensor, want: Tensor) -> float:
    return float((got.detach().cpu().double() - want.double()).abs().max())
