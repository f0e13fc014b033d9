"""Schedules of a user's own, from CSV, JSON and Python: run like the others, refused with the action at fault."""

import json

import pytest

from megafour.cli.main import main
from megafour.config.errors import ConfigError
from megafour.config.load import config_from
from megafour.config.rules import resolve
from megafour.parallel.pipeline.actions import ScheduleError
from megafour.parallel.pipeline.check import check
from megafour.parallel.pipeline.schedules import build
from megafour.parallel.pipeline.select import check_pipeline, find
from megafour.verify.matrix import parse_mesh
from megafour.verify.run import check as compare
from megafour.verify.shrink import user_cases

CSV = "F0,F1,,B0,B1\nF0,B0,F1,B1\n"
FUNCTION = """
from megafour.parallel.pipeline.actions import Action, Kind, Placement
from megafour.parallel.pipeline.transfers import with_transfers

def one_at_a_time(stages, microbatches, virtual_stages):
    order = [Action(kind, m) for m in range(microbatches) for kind in (Kind.FORWARD, Kind.BACKWARD)]
    return with_transfers([order] * stages, Placement.looped(stages), microbatches)
"""


def written(folder, name, text):
    (folder / name).write_text(text)
    return str(folder / name)


def words(table):
    return [[str(step.compute) for step in row if step.compute is not None] for row in table.steps]


def config(schedule, **model):
    return resolve(config_from({
        "model": {"num_layers": 8, "hidden_size": 32, "num_attention_heads": 4, **model},
        "parallel": {"pp": 2, "pipeline": {"schedule": schedule}}, "train": {"global_batch_size": 2}}), 2, data=False)


def test_a_written_schedule_is_the_schedule(tmp_path):
    for name, microbatches in (("1f1b", 4), ("interleaved_1f1b", 4), ("zb_v", 5), ("dualpipe_v", 4)):
        table = build(name, 2, microbatches)
        kind = "v" if table.placement.rank_of[-1] == 0 else "looped"
        path = written(tmp_path, f"{name}.json", json.dumps({"placement": kind, "orders": words(table)}))
        assert find(path, 2).table(microbatches) == table
    path = written(tmp_path, "a.csv", "\n".join(",".join(row) for row in words(build("zb_h1", 3, 4))))
    assert find(path, 3).table(4) == build("zb_h1", 3, 4)
    check(find(path, 3).table(2))    # a step with fewer micro-batches runs without the missing ones


@pytest.mark.parametrize("kind", ["csv", "py"])
def test_it_is_the_same_model(pool, tmp_path, kind):
    schedule = written(tmp_path, "own.csv", CSV) if kind == "csv" else (
        written(tmp_path, "own.py", FUNCTION) + ":one_at_a_time")
    outcome = compare(pool, user_cases(config(schedule), [parse_mesh("pp2")], 2)[0], 2)
    assert outcome.passed, outcome


@pytest.mark.parametrize(("name", "text", "said"), [
    ("a.csv", "F0,B0\nF0,X0\n", "rank 1: 'X0' is not an action"),
    ("a.csv", "F0,B0\n", "has rows for 1 ranks, and there are 2"),
    ("a.csv", "F0,I0,B1\nF0,B0\n", r"rank 0, step 2: B1 after nothing|micro-batch"),
    ("a.csv", "F0,I0,F1,B1\nF0,B0,F1,B1\n", "rank 0: W0 is missing"),
    ("a.csv", "F0,B0,F1,B1\nF1,B1,F0,B0\n", "waits for ever"),
    ("a.json", '{"orders": 3}', "is not {"),
    ("a.json", '{"placement": "ring", "orders": [["F0"], ["F0"]]}', "has the placement 'ring'"),
    ("a.json", '{"placement": "v", "orders": [["F0", "B0"], ["F0", "B0"]]}', "over a V"),
])
def test_refusals_before_anything_runs(tmp_path, name, text, said):
    with pytest.raises(ConfigError, match=said):
        check_pipeline(config(written(tmp_path, name, text)))


def test_other_refusals(tmp_path):
    with pytest.raises(ScheduleError, match="cannot be read"):
        find(str(tmp_path / "none.csv"), 2)
    (tmp_path / "binary.csv").write_bytes(b"\xb0\x00F0")
    with pytest.raises(ScheduleError, match="is no text in UTF-8"):
        find(str(tmp_path / "binary.csv"), 2)
    with pytest.raises(ScheduleError, match="no function other"):
        find(written(tmp_path, "own.py", FUNCTION) + ":other", 2)
    with pytest.raises(ScheduleError, match="has 2 micro-batches, and a step has 3"):
        find(written(tmp_path, "own.csv", CSV), 2).table(3)


def test_the_command(tmp_path, capsys):
    for name in ("zb_v", "dualpipe_v", written(tmp_path, "own.csv", CSV)):
        picture = tmp_path / "picture.svg"
        sizes = ["--stages", "2", "--micro-batches", "2"]
        assert main(["schedule", "--name", name, *sizes, "--times", "2,2,1,0.1", "--out", str(picture)]) == 0
        shown = capsys.readouterr().out
        assert "bubble" in shown and "live on a rank" in shown and "  1 |" in shown
        assert "<svg" in picture.read_text()
    assert main(["schedule", "--name", "zb_w"]) == 2
    assert main(["schedule", "--name", written(tmp_path, "b.csv", "F0,I0\nF0,B0\n"), "--stages", "2",
                 "--micro-batches", "1"]) == 1
    assert "rank 0: W0 is missing" in capsys.readouterr().err
    for option in ("--save", "--out"):
        assert main(["schedule", "--name", "zb_v", option, str(tmp_path / "none" / "a.svg")]) == 2
        assert f"error: {option} {tmp_path / 'none' / 'a.svg'}: cannot be written" in capsys.readouterr().err
    for wrong in (["--times", "nan,1,1,0"], ["--times", "1,inf,1,0"], ["--memory", "nan"], ["--memory", "-1"]):
        with pytest.raises(SystemExit, match="2"):
            main(["schedule", "--name", "zb_auto", *wrong])
