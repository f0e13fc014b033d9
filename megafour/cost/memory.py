"""Bytes of a rank's weights, gradients, masters and moments under each stage of ZeRO."""

from __future__ import annotations

from dataclasses import dataclass

from megafour.config.parallel_schema import ParallelConfig


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
