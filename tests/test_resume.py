"""Save on one mesh, go on on another, again and again: the losses are those of one uninterrupted process."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests import training
from tests.training import losses, metrics, settings, write_corpus

VIRTUAL = {"schedule": "interleaved_1f1b", "virtual_stages": 2}
CHAINS: dict[str, list[dict[str, Any]]] = {
    "dp, tp, pp, cp": [{"dp": 2}, {"tp": 2}, {"pp": 2}, {"cp": 2}],
    "8 ranks to 8 others": [{"dp": 2, "tp": 2, "pp": 2}, {"dp": 4, "cp": 2}],
    "ZeRO 1, 3, 0": [{"dp": 2, "zero_stage": 1}, {"dp": 4, "zero_stage": 3}, {"dp": 2, "zero_stage": 0}],
    "ZeRO 3, 2, hybrid 3": [{"dp": 2, "pp": 2, "zero_stage": 3}, {"cp": 2, "tp": 2, "zero_stage": 2},
                            {"dp": 2, "cp": 2, "zero_stage": 3, "zero_size": 2}],
    "pp 4, virtual stages": [{"pp": 4}, {"pp": 2, "pipeline": VIRTUAL}, {"dp": 2, "pp": 2, "zero_stage": 3,
                                                                          "pipeline": {"schedule": "zb_v"}}],
}


@pytest.fixture(scope="module")
def uninterrupted(pool, tmp_path_factory) -> dict[bool, dict[int, float]]:
    """Losses of 9 steps of one process in fp64, with and without a tied embedding."""
    found = {}
    for tied in (False, True):
        folder = tmp_path_factory.mktemp(f"tied-{tied}")
        write_corpus(folder / "corpus")
        values = settings(folder, {"dp": 1}, model={"tie_embeddings": tied}, train={"steps": 9})
        assert pool.run(training.train, 1, values) == [0]
        found[tied] = losses(folder)
    return found


@pytest.mark.parametrize("name", CHAINS)
def test_goes_on_on_another_mesh(pool, tmp_path, uninterrupted, name) -> None:
    """Each mesh but the last is killed a step after a save; the tied embedding has one copy or two on the way."""
    tied = name.startswith(("ZeRO 3", "pp 4"))
    write_corpus(tmp_path / "corpus")
    chain = CHAINS[name]
    for leg, parallel in enumerate(chain):
        last = leg == len(chain) - 1
        values = settings(tmp_path, parallel, model={"tie_embeddings": tied}, checkpoint={"every": 2},
                          train={"micro_batch_size": 1 + leg % 2, "steps": 9})
        world = math.prod(parallel.get(axis, 1) for axis in ("dp", "pp", "tp", "cp"))
        assert set(pool.run(training.train, world, values, None if last else 2 * leg + 3)) == {0 if last else -9}
    assert [line["step"] for line in metrics(tmp_path)] == list(range(1, 10))
    got = losses(tmp_path)
    assert all(abs(got[step] - loss) <= 1e-9 * loss for step, loss in uninterrupted[tied].items())


def test_hybrid_zero_3_goes_on_bit_equal_in_bf16(pool, tmp_path) -> None:
    """The shares of the 16-bit weights follow from the masters."""
    mesh, runs = {"dp": 4, "zero_stage": 3, "zero_size": 2}, []
    for name, kills in (("whole", [None]), ("killed", [5, None])):
        (tmp_path / name).mkdir()
        write_corpus(tmp_path / name / "corpus")
        for die_after in kills:
            pool.run(training.train, 4, settings(tmp_path / name, mesh, checkpoint={"every": 4},
                                                 train={"precision": "bf16", "steps": 7}), die_after)
        runs.append([(line["loss"], line["grad_norm"]) for line in metrics(tmp_path / name)])
    assert len(runs[0]) == 7 and runs[0] == runs[1]
