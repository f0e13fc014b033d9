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
PAIRS = "F0,F1&B0,I1,W1\nF0,B0,F1,I1,W1\n"
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
        assert find(path, 2, microbatches).table(microbatches) == table
    path = written(tmp_path, "pairs.csv", PAIRS)
    assert words(find(path, 2, 2).table(2)) == [["F0", "F1&B0", "I1", "W1"], ["F0", "B0", "F1", "I1", "W1"]]
    path = written(tmp_path, "a.csv", "\n".join(",".join(row) for row in words(build("zb_h1", 3, 4))))
    assert find(path, 3, 4).table(4) == build("zb_h1", 3, 4)
    check(find(path, 3, 4).table(2))    # a step with fewer micro-batches runs without the missing ones


@pytest.mark.parametrize("kind", ["csv", "pairs", "py"])
def test_it_is_the_same_model(pool, tmp_path, kind):
    schedule = written(tmp_path, "own.py", FUNCTION) + ":one_at_a_time" if kind == "py" else (
        written(tmp_path, "own.csv", CSV if kind == "csv" else PAIRS))
    outcome = compare(pool, user_cases(config(schedule), [parse_mesh("pp2")], 2)[0], 2)
    assert outcome.passed, outcome


@pytest.mark.parametrize(("name", "text", "said"), [
    ("a.csv", "F0,B0\nF0,X0\n", "rank 1: 'X0' is not an action"),
    ("a.csv", "F0,B0\n", "has rows for 1 ranks, and there are 2"),
    ("a.csv", "F0,I0,B1\nF0,B0\n", r"rank 0, step 2: B1 after nothing|micro-batch"),
    ("a.csv", "F0,I0,F1,B1\nF0,B0,F1,B1\n", "rank 0: W0 is missing"),
    ("a.csv", "F0,B0,F1,B1\nF1,B1,F0,B0\n", "waits for ever"),
    ("a.csv", "F0,F9,B0,B9\nF0,B0,F9,B9\n", "has actions of micro-batch 9 and none of micro-batch 1"),
    ("a.csv", "F0.99999999,B0.99999999\nF0,B0\n", "has actions of stage 99999999 and none of stage 1"),
    ("a.json", '{"orders": 3}', "is not {"),
    ("a.json", '{"orders": ["F0B0", "F0B0"]}', "is not {"),
    ("a.json", '{"placment": "v", "orders": [["F0", "B0"], ["F0", "B0"]]}', "is not {"),
    ("a.json", "[" * 100_000, "is not {"),
    ("a.json", '{"placement": "ring", "orders": [["F0"], ["F0"]]}', "has the placement 'ring'"),
    ("a.json", '{"placement": "v", "orders": [["F0", "B0"], ["F0", "B0"]]}', "over a V"),
])
def test_refusals_before_anything_runs(tmp_path, name, text, said):
    with pytest.raises(ConfigError, match=said):
        check_pipeline(config(written(tmp_path, name, text)))


@pytest.mark.parametrize(("partition", "said"), [
    ([4, 3], r"4 \+ 3 = 7 ≠ model.num_layers 8"), ([9, -1], "gives stage 1 -1 layers"), ([8], "there are 2 stages")])
def test_counts_of_layers_are_held_against_its_stages(tmp_path, partition, said):
    asked = config(written(tmp_path, "own.csv", CSV)).replace({"parallel.pipeline.partition": partition})
    with pytest.raises(ConfigError, match=said):
        check_pipeline(asked)


def test_other_refusals(tmp_path):
    with pytest.raises(ScheduleError, match="cannot be read"):
        find(str(tmp_path / "none.csv"), 2, 1)
    (tmp_path / "binary.csv").write_bytes(b"\xb0\x00F0")
    with pytest.raises(ScheduleError, match="is no text in UTF-8"):
        find(str(tmp_path / "binary.csv"), 2, 1)
    with pytest.raises(ScheduleError, match="no function other"):
        find(written(tmp_path, "own.py", FUNCTION) + ":other", 2, 1)
    with pytest.raises(ScheduleError, match="has 2 micro-batches, and a step has 3"):
        find(written(tmp_path, "own.csv", CSV), 2, 3)


FAULTY = """
from dataclasses import replace
from megafour.parallel.pipeline.actions import Placement, Table
from megafour.parallel.pipeline.schedules import build

def raises(ranks, microbatches, virtual_stages):
    return {}["depth"]

def too_few(ranks, microbatches):
    return build("1f1b", ranks, microbatches)

def leaves(ranks, microbatches, virtual_stages):
    raise SystemExit(0)

def words(ranks, microbatches, virtual_stages):
    table = build("1f1b", ranks, microbatches)
    return replace(table, steps=(table.steps[0], ("F0", "B0")))

def nowhere(ranks, microbatches, virtual_stages):
    return Table(Placement((1,)), microbatches, ((), ()))

def elsewhere(ranks, microbatches, virtual_stages):
    return build("zb_v", ranks, microbatches).steps
"""


@pytest.mark.parametrize(("function", "said"), [
    ("raises", r"own.py, line 7: KeyError: 'depth'"), ("too_few", "own.py: TypeError: too_few.. takes 2 positional"),
    ("leaves", "own.py, line 13: SystemExit: 0"), ("words", "rank 1, step 0: 'F0' is not a Step"),
    ("elsewhere", "does not return a Table"), ("nowhere", "2 ranks, each with a stage"), ("", "has no function")])
def test_what_a_function_does_wrong_is_a_fault_of_the_schedule(tmp_path, function, said):
    with pytest.raises(ConfigError, match=said):
        check_pipeline(config(written(tmp_path, "own.py", FAULTY) + f":{function}"))
    with pytest.raises(ScheduleError, match=r"bad.py, line 1: SyntaxError"):
        find(written(tmp_path, "bad.py", "def f(:\n") + ":f", 2, 1)


def test_a_function_is_asked_for_the_micro_batches_of_the_step_alone(pool, tmp_path):
    text = FUNCTION + """
def only_six(stages, microbatches, virtual_stages):
    if microbatches != 6:
        raise ValueError(f"no table for {microbatches} micro-batches")
    return one_at_a_time(stages, microbatches, virtual_stages)
"""
    schedule = written(tmp_path, "own.py", text) + ":only_six"
    six = config(schedule).replace({"train.global_batch_size": 6})
    check_pipeline(six)
    outcome = compare(pool, user_cases(six, [parse_mesh("pp2")], 1)[0], 1)
    assert outcome.passed, outcome


UNEVEN = """
from megafour.parallel.pipeline.actions import Action, Kind, Placement
from megafour.parallel.pipeline.transfers import with_transfers

def three_and_two(ranks, microbatches, virtual_stages):
    orders = [[], []]
    for m in range(microbatches):
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            for rank, chunk in ((0, 0), (1, 0), (0, 1), (1, 1), (0, 2))[::1 if kind is Kind.FORWARD else -1]:
                orders[rank].append(Action(kind, m, chunk))
    return with_transfers(orders, Placement((0, 1, 0, 1, 0)), microbatches)
"""


def test_ranks_may_hold_unequal_numbers_of_stages(pool, tmp_path):
    asked = config(written(tmp_path, "own.py", UNEVEN) + ":three_and_two")
    case = user_cases(asked, [parse_mesh("pp2")], 1)[0]
    assert case.config.model.num_layers >= 5
    outcome = compare(pool, case, 1)
    assert outcome.passed, outcome
    with pytest.raises(ConfigError, match="mesh pp4: .*4 ranks, each with a stage"):
        user_cases(asked, [parse_mesh("pp4")], 1)


def test_a_table_saved_by_a_spreadsheet(tmp_path):
    (tmp_path / "own.csv").write_bytes(b"\xef\xbb\xbf" + CSV.replace("\n", "\r\n").encode())
    assert find(str(tmp_path / "own.csv"), 2, 2).table(2) == find(written(tmp_path, "b.csv", CSV), 2, 2).table(2)


def test_the_command(tmp_path, capsys):
    for name in ("zb_v", "dualpipe_v", written(tmp_path, "own.csv", CSV), written(tmp_path, "pairs.csv", PAIRS)):
        picture = tmp_path / "picture.svg"
        sizes = ["--stages", "2", "--micro-batches", "2"]
        assert main(["schedule", "--name", name, *sizes, "--times", "2,2,1,0.1", "--out", str(picture)]) == 0
        shown = capsys.readouterr().out
        assert "bubble" in shown and "live on a rank" in shown and "  1 |" in shown
        assert "<svg" in picture.read_text()
    for option, name in (("--save", "a.json"), ("--out", "a.svg")):
        assert main(["schedule", "--name", "zb_v", option, str(tmp_path / "none" / name)]) == 2
        assert f"error: {option} {tmp_path / 'none' / name}: cannot be written" in capsys.readouterr().err
    assert main(["schedule", "--name", "zb_v", "--times", "1e-12,0,1e12"]) == 0
    for wrong in (["--times", "nan,1,1,0"], ["--times", "1,inf,1,0"], ["--times", "1e308,1e308,1"],
                  ["--times", "0,0,0"], ["--times", "1e-320,1e-320,1e-320"], ["--times=-1,1,1"],
                  ["--memory", "nan"], ["--memory", "-1"], ["--stages", "0"], ["--stages", "x"],
                  ["--save", "a.csv"], ["--out", "a.pdf"], ["--save", ".json"], ["--out", ".svg"]):
        with pytest.raises(SystemExit, match="2"):
            main(["schedule", "--name", "zb_auto", *wrong])
        assert capsys.readouterr().err.startswith("error: argument --")


@pytest.mark.parametrize("text", ["F0,I0\nF0,B0\n", "F0,B0,B0\nF0,B0\n", "F0,B0\n", "F0,X0\nF0,B0\n", "F0,B0\nB0,F0\n"])
def test_every_fault_of_a_table_is_a_wrong_argument(tmp_path, capsys, text):
    path = written(tmp_path, "b.csv", text)
    assert main(["schedule", "--name", path, "--stages", "2", "--micro-batches", "1"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: --name {path}: ") and said.count("\n") == 1


@pytest.mark.parametrize(("wrong", "said"), [
    (["--name", "zb_w"], "unknown pipeline schedule 'zb_w'"),
    (["--name", "zb_w"], "dualpipe_v, zb_auto, and PATH.csv"),
    (["--name", "zb_v", "--memory", "3"], "--memory 3 bounds the search of zb_auto and has no effect on --name zb_v"),
    (["--name", "1f1b", "--kept", "0.5"], "--kept 0.5 bounds the search"),
    (["--name", "1f1b", "--stages", "1000000"], "lower one of them"),
    (["--name", "zb_v", "--virtual-stages", "3"], "has 2 stages a rank")])
def test_arguments_that_do_not_go_together(capsys, wrong, said):
    assert main(["schedule", *wrong]) == 2
    assert said in capsys.readouterr().err
