"""logging.timeline on a whole run: the second step's actions of every rank, and what was predicted above them."""

import json

import pytest

from megafour.parallel.pipeline.schedules import build
from tests import training
from tests.training import losses, settings, write_corpus


@pytest.mark.parametrize("schedule", ["zb_v", "dualpipe_v"])
def test_a_run_leaves_its_timeline(pool, tmp_path, schedule):
    write_corpus(tmp_path / "corpus")
    values = settings(tmp_path, {"pp": 2, "dp": 2, "pipeline": {"schedule": schedule}}, logging={"timeline": True},
                      train={"steps": 3}, checkpoint={"every": 0})
    assert pool.run(training.train, 4, values) == [0, 0, 0, 0]
    logs = tmp_path / "run" / "logs"
    found = json.loads((logs / "timeline.json").read_text())
    table = build(schedule, 2, 4)
    assert found["schedule"] == schedule
    assert [[word for word, _, _ in row] for row in found["ranks"]] == [
        [str(step.compute) for step in row if step.compute is not None] for row in table.steps]
    assert "<svg" in (logs / "timeline.svg").read_text()
    text = (logs / "rank-0.log").read_text()
    assert "timeline of step 2" in text and text.index(f"{schedule}: 2 ranks") < text.index("measured: ")
    assert len(losses(tmp_path)) == 3
