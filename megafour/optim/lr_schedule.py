"""Learning rate schedules as pure functions of the step."""

from __future__ import annotations

import math
from typing import Any

NAMES = ("cosine", "linear", "wsd", "constant")


def learning_rate(optimizer: Any, schedule: Any, step: int, total_steps: int) -> float:
    """The learning rate of one update.

    `optimizer.lr` is the peak; `schedule` has `name`, `warmup_steps`, `decay_steps` and `min_lr`. `step` is the number
    of updates already done, so the first update of a run has step 0 and the last total_steps − 1.

    Every schedule warms up linearly: update n (from 1) of the warm-up uses lr·n/warmup_steps. Then `cosine` and
    `linear` fall to min_lr, which they reach at update `decay_steps`, counted from the start of the run (null:
    total_steps). `wsd` (Hu et al. 2024) holds the peak and falls linearly over the last `decay_steps` updates (null: a
    tenth of the run). `constant` holds the peak. After its decay a schedule stays at min_lr.
    """
    peak, floor, warmup = float(optimizer.lr), float(schedule.min_lr), int(schedule.warmup_steps)
    update = step + 1
    if update <= warmup:
        return peak * update / warmup
    if schedule.name == "constant":
        return peak
    if schedule.name == "wsd":
        length = max(1, total_steps // 10) if schedule.decay_steps is None else int(schedule.decay_steps)
        begin, end = max(warmup, total_steps - length), total_steps
    elif schedule.name in ("cosine", "linear"):
        begin, end = warmup, total_steps if schedule.decay_steps is None else int(schedule.decay_steps)
    else:
        raise ValueError(f"unknown lr_schedule.name {schedule.name!r}; known: {', '.join(NAMES)}")
    if update >= end:
        return floor
    share = max(0.0, (update - begin) / (end - begin))  # below `begin` only in the plateau of wsd
    if schedule.name == "cosine":
        return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * share))
    return peak + (floor - peak) * share
