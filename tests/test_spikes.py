"""Loss spikes: a step whose gradient norm stands far out is skipped, on every mesh alike, and after a resume too."""

from collections import deque
from types import SimpleNamespace
from unittest import mock

import pytest

from megafour.config.errors import ConfigError
from megafour.config.load import load_config
from megafour.mesh import Mesh
from megafour.trainer import loop
from megafour.trainer.diagnose import samples
from megafour.trainer.spikes import SpikeGuard
from tests import training
from tests.training import losses, metrics, settings, write_corpus


def planted(rank, world, values, bad, die_after=None):
    """Train; in the steps `bad` (counted from 1) every token is the same, and so is every label."""
    real = loop.Run._on_device

    def on_device(self, batches):
        if self.progress.step + 1 in bad:
            for batch in batches:
                batch.tokens.fill_(3)
                batch.labels.fill_(5)
        return real(self, batches)

    with mock.patch.object(loop.Run, "_on_device", on_device):
        return training.train(rank, world, values, die_after)


def run(pool, folder, parallel, world, bad, die_after=None, precision="fp64", **train):
    folder.mkdir(exist_ok=True)
    write_corpus(folder / "corpus")
    values = settings(folder, parallel, checkpoint={"every": 4},
                      train={"precision": precision, "spike_deviations": 6, "spike_window": 6, **train})
    return pool.run(planted, world, values, bad, die_after)


MESHES = [pytest.param({"dp": 2, "pp": 2, "tp": 2}, 8, marks=pytest.mark.full),
          ({"cp": 2, "dp": 2, "zero_stage": 1}, 4)]


@pytest.mark.parametrize(("parallel", "world"), MESHES)
def test_a_bad_batch_is_skipped_on_every_mesh_and_after_a_resume(pool, tmp_path, parallel, world):
    """Killed after step 8 and resumed on another mesh: the norms before step 9 come from the checkpoint alone."""
    assert run(pool, tmp_path / "one", {"dp": 1}, 1, [9]) == [0]
    assert set(run(pool, tmp_path / "many", parallel, world, [9], die_after=8)) == {-9}
    assert run(pool, tmp_path / "many", {"tp": 2}, 2, [9]) == [0, 0]
    one, many = metrics(tmp_path / "one"), metrics(tmp_path / "many")
    assert [line["skipped_steps"] for line in one] == [line["skipped_steps"] for line in many]
    assert one[8]["skipped_steps"] == one[7]["skipped_steps"] + 1 == one[9]["skipped_steps"]
    assert one[8]["grad_norm"] > 2 * one[7]["grad_norm"]      # it is logged as it was, before clipping
    for a, b in zip(one, many, strict=True):
        assert abs(a["loss"] - b["loss"]) <= 1e-9 * a["loss"]
        assert abs(a["grad_norm"] - b["grad_norm"]) <= 1e-9 * a["grad_norm"]
    log = (tmp_path / "many" / "run" / "logs" / "rank-1.log").read_text()
    assert "step 9 skipped: gradient norm " in log and "mean of the last 6 steps" in log and "; samples 64-71" in log


def test_a_resume_is_bit_exact(pool, tmp_path):
    assert run(pool, tmp_path / "whole", {"dp": 2}, 2, [7, 10], precision="fp32") == [0, 0]
    assert run(pool, tmp_path / "cut", {"dp": 2}, 2, [7, 10], 8, precision="fp32") == [-9, -9]
    assert run(pool, tmp_path / "cut", {"dp": 2}, 2, [7, 10], precision="fp32") == [0, 0]
    assert losses(tmp_path / "whole") == losses(tmp_path / "cut")
    assert [line["skipped_steps"] for line in metrics(tmp_path / "cut")] == [0] * 6 + [1] * 3 + [2] * 3


def test_steps_like_the_others_are_all_applied_and_a_new_level_stops_the_run(pool, tmp_path):
    assert run(pool, tmp_path / "level", {"dp": 2}, 2, [], spike_deviations=30) == [0, 0]
    assert metrics(tmp_path / "level")[-1]["skipped_steps"] == 0
    assert run(pool, tmp_path / "risen", {"dp": 2}, 2, range(8, 13), max_skipped_steps=3) == [1, 1]
    assert "3 steps in a row were skipped" in (tmp_path / "risen" / "run" / "status.json").read_text()


def test_steps_skipped_in_a_row_are_counted_on_after_a_resume(pool, tmp_path):
    assert run(pool, tmp_path / "run", {"dp": 2}, 2, range(7, 13), 8, max_skipped_steps=3) == [-9, -9]
    assert run(pool, tmp_path / "run", {"dp": 2}, 2, range(7, 13), max_skipped_steps=3) == [1, 1]
    status = (tmp_path / "run" / "run" / "status.json").read_text()
    assert "3 steps in a row were skipped" in status and "the last was step 9," in status


def test_the_rule():
    guard = SpikeGuard(3.0, deque(maxlen=4))
    for norm in (1.0, 3.0, 100.0, 1.0):     # the window is not full: nothing is judged
        assert guard.judge(norm) is None
    guard.load_state_dict({"norms": [1.0, 3.0, 1.0, 3.0]})      # mean 2, deviation 1
    assert "5.5 standard deviations above the mean of the last 4 steps (mean 2, deviation 1" in guard.judge(7.5)
    assert guard.judge(5.0) is None and list(guard.norms) == [3.0, 1.0, 3.0, 5.0]
    level = SpikeGuard(2.0, deque([1.0] * 4, maxlen=4))
    assert level.judge(1.0 + 1e-9) is None and level.judge(1.1) is not None


@pytest.mark.parametrize("word", ["train.spike_deviations=0", "train.spike_deviations=-3", "train.spike_window=1",
                                  "train.spike_deviations=nan", "train.spike_deviations=.inf"])
def test_nonsense_is_refused(word):
    with pytest.raises(ConfigError, match=word.split("=")[0]):
        load_config(None, [word])


def test_samples_in_words():
    alone = SimpleNamespace(mesh=Mesh.single())

    class Batch:
        def __init__(self, *numbers):
            self.samples = numbers

    assert samples(alone, [Batch(7, 8), Batch(9), Batch(12)]) == "7-9, 12"
