"""The search for a zero-bubble table: within its memory, never worse than the named schedules, and usable as a file."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megafour.cli.main import main
from megafour.parallel.pipeline.actions import ScheduleError
from megafour.parallel.pipeline.auto import search
from megafour.parallel.pipeline.check import check, peak_live
from megafour.parallel.pipeline.schedules import build
from megafour.parallel.pipeline.select import find
from megafour.parallel.pipeline.simulate import Times

DURATION = st.integers(1, 9)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.integers(1, 24), st.integers(1, 16), DURATION, DURATION, DURATION, st.integers(0, 2))
def test_within_memory_and_no_worse(ranks, microbatches, memory, forward, backward, weight, transfer):
    times = Times(forward, backward, weight, transfer)
    table = search(ranks, microbatches, times, memory)
    report = check(table, times)
    assert max(report.peak_live) <= memory
    for name in ("zb_h1", "zb_h2"):
        other = build(name, ranks, microbatches)
        if max(peak_live(other)) <= memory:
            assert report.bubble <= check(other, times).bubble + 1e-9


def test_published_rate_at_the_memory_of_1f1b():
    """Qi et al. 2023, table 5, ZB-1p at p 8, m 24."""
    times = Times(18.522, 18.086, 9.337, 0.601)
    assert check(search(8, 24, times, 8), times).bubble == pytest.approx(0.1585, abs=0.005)


def test_over_a_v_and_refusals():
    assert max(peak_live(search(4, 8, Times(), 2, 2))) == 2
    assert check(search(4, 8, Times(), 4, 2)).bubble == pytest.approx(0)
    with pytest.raises(ScheduleError, match="no table holds at most 1 micro-batches on a rank; the least is 2"):
        search(4, 8, Times(), 1, 2)
    with pytest.raises(ScheduleError, match="one and two stages a rank"):
        search(4, 8, Times(), 4, 3)


def test_the_saved_table_is_a_schedule(tmp_path, capsys):
    path = tmp_path / "best.json"
    for chunks in ("1", "2"):
        assert main(["schedule", "--name", "zb_auto", "--stages", "3", "--micro-batches", "6", "--times", "3,3,1,0.1",
                     "--virtual-stages", chunks, "--save", str(path)]) == 0
        times = Times(3, 3, 1, 0.1)
        assert find(str(path), 3).table(6) == search(3, 6, times, 3, int(chunks))
    assert main(["schedule", "--name", "zb_auto", "--memory", "0.1"]) == 2
