"""Bytes of a rank's weights, gradients, masters and moments under each stage of ZeRO, and of its activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megafour.architecture.sublayer import Sublayer
from megafour.config.parallel_schema import ParallelConfig
from megafour.cost.parameters import tensor_parallel

ELEMENT = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""`train.precision` -> bytes of an activation's or weight's element."""


def sharing(parallel: ParallelConfig) -> tuple[int, int]:
    """(stage of ZeRO that has an effect, ranks that share one copy) of a resolved `parallel`; (0, 1): none."""
    shares = (parallel.zero_size or int(parallel.dp) * parallel.cp) if parallel.zero_stage else 1
    return (int(parallel.zero_stage), shares) if shares > 1 else (0, 1)


@dataclass(frozen=True)
class StateBytes:
    """What one rank keeps between steps."""

    weights: int
    gradients: int
    masters: int
    moments: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.masters + self.moments


def state_bytes(elements: int, *, zero_stage: int, shares: int, element: int, moments: int = 2) -> StateBytes:
    """What a rank keeps of `elements` weights that `shares` ranks have alike, the sum of its padded buckets.

    With Ψ weights in 16 bits and AdamW, N ranks, the published bytes are 2Ψ weights, 2Ψ gradients and 12Ψ masters and
    moments, 16Ψ: 4Ψ + 12Ψ/N with ZeRO 1, 2Ψ + 14Ψ/N with ZeRO 2, 16Ψ/N with ZeRO 3 (Rajbhandari et al. 2020, figure 1).
    Gradients here are fp32, since they are sums over micro-batches, which adds 2 bytes wherever they lie: 18Ψ;
    6Ψ + 12Ψ/N; 2Ψ + 16Ψ/N; 18Ψ/N. fp32 and fp64 weights are their own masters: 16Ψ and 32Ψ without ZeRO.

    Args:
        zero_stage: 0 to 3; shares of one rank are the whole.
        shares: N, ranks that share one copy (`parallel.zero_size`).
        element: bytes of a weight.
        moments: flat copies that the optimizer keeps beside the masters: 2 for AdamW, 0 for SGD.
    """
    wide = max(4, element)

    def kept(first: int) -> int:
        """Elements that a rank keeps of what is shared from stage `first` on."""
        return elements // shares if zero_stage >= first else elements

    return StateBytes(weights=kept(3) * element, gradients=kept(2) * wide,
                      masters=kept(1) * wide if element < wide else 0, moments=kept(1) * wide * moments)


def activation_bytes(config: Any, layer: Sublayer) -> int:
    """What a layer keeps of one micro-batch for its backward, on each rank that holds it."""
    tokens = config.data.seq_length // config.parallel.cp * config.train.micro_batch_size
    saved = layer.saved(tensor_parallel(config), config.train.recompute)
    return int(tokens * saved * ELEMENT[config.train.precision])
