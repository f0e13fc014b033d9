"""Floating-point operations of the model per token: what MFU divides by and the pipeline's partition balances.

Convention: a parameter that multiplies a token's activations costs 6 FLOPs a token (2 forward, 4 backward), so 6·N
with N every parameter but the looked-up embeddings (a tied embedding counts once, as the head). Attention's two
products over the sequence cost 12·L·H·S a token when every pair of tokens is counted and half of that, 6·L·H·S, when
only the causal half is, which is what is computed; H = heads × head size. A window of W tokens counts W·(2 - W/S) of
S in place of S. Recomputation is not counted, and packed documents are counted as one text: model FLOPs.
"""

from __future__ import annotations

from dataclasses import dataclass

from megafour.architecture.model import Architecture
from megafour.architecture.sublayer import Flops

PEAK_TFLOPS = {"H200": 989.0, "H100 PCIe": 756.0, "H100": 989.0, "B200": 2250.0, "A100": 312.0, "L40S": 362.0,
               "A10": 125.0}
"""Dense bf16 peak of a GPU by a part of its name, TFLOP/s, from the vendor's data sheets."""


@dataclass(frozen=True)
class ModelFlops:
    """Model FLOPs a token, forward and backward together."""

    layers: tuple[Flops, ...]
    """Of each layer; its pairs are those of attention, the causal half: 6·H·S without a window."""
    head: int
    """6 × the parameters of the output projection and the last norm."""
    embedding: int
    """The lookup: no multiplication; counted as reading, adding and accumulating one row (3·hidden)."""

    @property
    def per_token(self) -> int:
        """The whole model, causal attention counted half; the lookup is left out, as everybody does."""
        return sum(layer.total for layer in self.layers) + self.head


def model_flops(architecture: Architecture, seq_length: int) -> ModelFlops:
    """FLOPs a token of a model at `seq_length` tokens."""
    return ModelFlops(tuple(layer.flops(seq_length) for layer in architecture.layers),
                      architecture.head().flops(seq_length).total, architecture.embedding().flops(seq_length).total)


def known_peak(device: str) -> float | None:
    """The peak of a device by its name, TFLOP/s; None where no data sheet is listed."""
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in device), None)


def mfu(tokens_per_second: float, flops_per_token: float, peak_tflops: float | None, world: int) -> float | None:
    """Model FLOPs utilisation: the share of `world` devices' peak that the model's own FLOPs take; None without a peak.

    `tokens_per_second` is global, `peak_tflops` is one device's, in 10¹² FLOP/s.
    """
    if not peak_tflops:
        return None
    return tokens_per_second * flops_per_token / (peak_tflops * 1e12 * world)
