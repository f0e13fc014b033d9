"""Zero-bubble schedules with one stage a rank (Qi et al. 2023): weight gradients wait until a rank would be idle."""

from __future__ import annotations

from megafour.parallel.pipeline.actions import Action, Kind, Placement, Table
from megafour.parallel.pipeline.classic import require
from megafour.parallel.pipeline.transfers import Order, with_transfers


def zb_h1(stages: int, microbatches: int, virtual_stages: int = 1) -> Table:
    """ZB-H1: the memory of 1F1B, p micro-batches; the bubble is (p−1)(T_F+T_B−T_W)."""
    require("zb_h1", stages, microbatches, virtual_stages, chunks=1)
    orders = [_order(microbatches, stages - 1 - rank, rank) for rank in range(stages)]
    return with_transfers(orders, Placement.looped(stages), microbatches)


def zb_h2(stages: int, microbatches: int, virtual_stages: int = 1) -> Table:
    """ZB-H2: 2p−1 micro-batches; the bubble is (p−1)(T_F+T_B−2T_W), and none is left at T_F = T_B = T_W."""
    require("zb_h2", stages, microbatches, virtual_stages, chunks=1)
    orders = [_order(microbatches, 2 * (stages - 1 - rank), 2 * rank) for rank in range(stages)]
    return with_transfers(orders, Placement.looped(stages), microbatches)


def _order(microbatches: int, warmup: int, delay: int) -> Order:
    """`warmup` forwards; then F and B in turn, each followed by the W of the micro-batch `delay` before; then what is
    left, B and W in turn, so that a W fills the gap until the next gradient arrives. Live: warmup + 1 + delay."""
    order = [Action(Kind.FORWARD, m) for m in range(min(warmup, microbatches))]
    waiting: list[Action] = []
    for m in range(microbatches):
        if m + warmup < microbatches:
            order.append(Action(Kind.FORWARD, m + warmup))
        order.append(Action(Kind.BACKWARD_INPUT, m))
        waiting.append(Action(Kind.BACKWARD_WEIGHT, m))
        if len(waiting) > delay or m + warmup >= microbatches:
            order.append(waiting.pop(0))
    return order + waiting
