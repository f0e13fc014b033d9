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


@settings(max_examples=40)
@given(st.integers(1, 8), st.integers(1, 24), st.integers(1, 16), DURATION, DURATION, DURATION, st.integers(0, 2),
       st.sampled_from((0.0, 0.37, 1.0)))
def test_within_memory_and_no_worse(ranks, microbatches, memory, forward, backward, weight, transfer, kept):
    times = Times(forward, backward, weight, transfer)
    table = search(ranks, microbatches, times, memory, kept=kept)
    report = check(table, times)
    assert max(peak_live(table, kept)) <= memory
    for name in ("zb_h1", "zb_h2"):
        other = build(name, ranks, microbatches)
        if max(peak_live(other, kept)) <= memory:
            assert report.bubble <= check(other, times).bubble + 1e-9


def test_what_a_waiting_weight_gradient_keeps():
    table = build("zb_h2", 2, 3)    # rank 0: F0 F1 F2 I0 W0 I1 W1 I2 W2; rank 1: F0 I0 F1 I1 F2 I2 and then three W
    assert peak_live(table) == (3, 3) and peak_live(table, 0.5) == (3, 2) and peak_live(table, 0.0) == (3, 1)


SMALL, LARGE = 32 / (34 + 5 * 24 * 1024 / 2304), 32 / (34 + 5 * 40 * 1024 / 5120)
"""Of the models with 1.5B (24 heads, hidden 2304) and 14.6B (40, 5120), 1024 tokens: Qi et al. 2023, table 1."""


@pytest.mark.parametrize(("ranks", "microbatches", "times", "kept", "rates"), [
    (8, 24, Times(18.522, 18.086, 9.337, 0.601), SMALL, (0.1585, 0.0433)),
    (8, 32, Times(18.513, 18.086, 9.331, 0.626), SMALL, (0.1242, 0.0039)),
    pytest.param(8, 64, Times(18.546, 18.097, 9.321, 0.762), SMALL, (0.0674, 0.0026), marks=pytest.mark.full),
    pytest.param(16, 48, Times(11.347, 11.248, 8.132, 0.377), LARGE, (0.1397, 0.0066), marks=pytest.mark.full),
    pytest.param(16, 64, Times(11.307, 11.254, 8.101, 0.379), LARGE, (0.1088, 0.0054), marks=pytest.mark.full)])
def test_published_rates(ranks, microbatches, times, kept, rates):
    """Qi et al. 2023, table 5: ZB-1p and ZB-2p, the memory of p and of 2p micro-batches."""
    for memory, rate in zip((ranks, 2 * ranks), rates, strict=True):
        assert check(search(ranks, microbatches, times, memory, kept=kept), times).bubble <= rate + 0.005


def test_where_all_is_kept_no_table_is_much_better():
    """The last rank runs m forwards and input gradients, and m - 2p weight gradients for their memory, before its last
    input gradient; that one has a way of p - 1 ranks and a weight gradient before it."""
    times, p, m = Times(18.522, 18.086, 9.337, 0.601), 8, 24
    last = (p - 1) * (18.522 + 0.601) + m * (18.522 + 18.086) + (m - 2 * p) * 9.337 + (p - 1) * (18.086 + 0.601) + 9.337
    found = check(search(p, m, times, 2 * p), times).bubble
    assert 1 - m * times.work / last - 1e-9 <= found <= 1 - m * times.work / last + 0.005


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
        assert find(str(path), 3, 6).table(6) == search(3, 6, times, 3, int(chunks))
    assert main(["schedule", "--name", "zb_auto", "--memory", "0.1"]) == 2
    with pytest.raises(SystemExit, match="2"):
        main(["schedule", "--name", "zb_auto", "--kept", "1.5"])
