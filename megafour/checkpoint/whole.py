"""Which of a run's checkpoints is whole: the newest first, with a line for each one that is damaged."""

from __future__ import annotations

from pathlib import Path

from torch.distributed import ProcessGroup

from megafour.checkpoint import store
from megafour.checkpoint.errors import CheckpointError


def first_whole(points: list[Path], group: ProcessGroup | None) -> tuple[Path, list[str]]:
    """The first of several checkpoints whose every byte is what was saved. Every rank of the group calls it together.

    Args:
        points: at least one, the one that is wanted most first.
        group: all ranks that are to use it; None: this process alone.
    Returns:
        the checkpoint, and what is wrong with each one before it.
    Raises:
        CheckpointError: on all ranks alike, where none is whole.
    """
    damaged: list[str] = []
    for point in points:
        try:
            store.verify(point, group)
            return point, damaged
        except CheckpointError as error:
            if len(points) == 1:
                raise
            damaged.append(str(error))
    raise _none_whole(damaged)


def sound_at_a_glance(points: list[Path]) -> tuple[list[Path], list[str]]:
    """Those of several checkpoints whose small files (config, tokenizer) and all sizes are right, before a mesh exists.

    What the shards hold is not read here. A single one is not looked at: it was named itself, or has no other to take
    its place, and is checked where it is read.

    Returns:
        them, in the same order, and what is wrong with each other one.
    Raises:
        CheckpointError: where there are several and none is sound.
    """
    if len(points) == 1:
        return points, []
    sound: list[Path] = []
    damaged: list[str] = []
    for point in points:
        try:
            store.check_small(point)
            sound.append(point)
        except CheckpointError as error:
            damaged.append(str(error))
    if not sound:
        raise _none_whole(damaged)
    return sound, damaged


def _none_whole(damaged: list[str]) -> CheckpointError:
    return CheckpointError(f"none of {len(damaged)} checkpoints is whole: {'; '.join(damaged)}")
