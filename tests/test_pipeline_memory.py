"""The memory of a long run through the real trainer: what is alive after 20 steps is what is alive after 200."""

import contextlib
import gc
import json
from pathlib import Path

import pytest
import torch

from megafour.trainer import loop
from tests import training

STEPS, EARLY = 200, 20
GROWTH = 16 << 20
"""Resident bytes that a process may gain between the two: its heap rises by up to 10 MB within a thousand steps and
stays there, while what it holds is the same."""


def alive() -> dict[str, int]:
    """Tensors that can be reached, bytes of their storages, and what the process has resident."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]
    storages = {}
    for x in tensors:
        with contextlib.suppress(RuntimeError):     # a wrapper without data of its own, which a save has left to gc
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"tensors": len(tensors), "bytes": sum(storages.values()), "resident": pages * 4096}


def watched(rank, world, values, leak=False):
    """What is alive after the early and the last step; `leak` keeps each step's micro-batches, as a bug would."""
    original, seen, kept = loop.train_step, [], []

    def step_and_look(state, batches, step, *rest):
        result = original(state, batches, step, *rest)
        if leak:
            kept.extend(batches)
        if step + 1 in (EARLY, values["train"]["steps"]):
            seen.append(alive())
        return result

    loop.train_step = step_and_look
    try:
        assert training.train(rank, world, values) == 0
    finally:
        loop.train_step = original
    return seen


def long_run(folder, schedule, steps, **data):
    training.write_corpus(folder / "corpus", documents=400)
    # No file is written between the two looks: a save holds buffers of its own.
    return training.settings(folder, {"pp": 2, "pipeline": {"schedule": schedule}}, train={"steps": steps},
                             checkpoint={"every": steps}, data=data)


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v", "dualpipe_v"])
def test_two_hundred_steps_are_flat(pool, tmp_path, schedule):
    values = long_run(tmp_path, schedule, STEPS, document_mask=True)
    for first, last in pool.run(watched, 2, values, timeout=900):
        print(json.dumps({"schedule": schedule, "early": first, "last": last}))
        # A control value or two (loss, norm, flag: 24 bytes) may still be held at either look; a leak is 180 of them.
        assert last["tensors"] <= first["tensors"] + 2 and last["bytes"] <= first["bytes"] + 100
        assert last["resident"] - first["resident"] <= GROWTH


def test_what_a_step_keeps_is_seen(pool, tmp_path):
    values = long_run(tmp_path, "zb_v", EARLY + 5)
    for first, last in pool.run(watched, 2, values, True):
        assert last["tensors"] > first["tensors"] and last["bytes"] > first["bytes"]
