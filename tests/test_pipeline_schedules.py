"""Schedules proved over many sizes, bubble and memory against formulas and published rates, bad tables refused."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megafour.config import rules_pipeline
from megafour.parallel.pipeline.actions import (
    Action,
    Kind,
    Message,
    Pair,
    Payload,
    Placement,
    ScheduleError,
    Step,
    Table,
    Transfer,
)
from megafour.parallel.pipeline.check import check, peak_live
from megafour.parallel.pipeline.schedules import SCHEDULES, build, forward_only
from megafour.parallel.pipeline.simulate import Times
from megafour.parallel.pipeline.transfers import with_transfers

STAGES, MICROBATCHES = st.integers(1, 16), st.integers(1, 64)
DURATION = st.integers(1, 50)

PEAKS = {"1f1b": lambda p: p, "zb_h1": lambda p: p, "zb_v": lambda p: p, "zb_h2": lambda p: 2 * p - 1,
         "v_half": lambda p: (p + 2) // 2, "v_min": lambda p: (p + 4) // 3, "dualpipe_v": lambda p: p + 0.5}
"""The most activations live on a rank, in micro-batches of its whole share of the model."""


def virtual(name):
    return st.integers(1, 4) if name == "interleaved_1f1b" else st.just(2 if name in rules_pipeline.VEE else 1)


NAMED = st.sampled_from(sorted(SCHEDULES)).flatmap(lambda name: st.tuples(st.just(name), virtual(name)))


@settings(max_examples=60)
@given(NAMED, STAGES, MICROBATCHES, DURATION, DURATION, DURATION, st.integers(0, 20))
def test_any_size_is_proved(named, stages, microbatches, forward, backward_input, backward_weight, transfer):
    """Also: memory within what the schedule promises, and no rank faster than its own work."""
    name, chunks = named
    report = check(build(name, stages, microbatches, chunks), Times(forward, backward_input, backward_weight, transfer))
    assert max(report.peak_live) <= min(microbatches, PEAKS.get(name, lambda p: microbatches)(stages))
    assert report.makespan_bubble >= report.bubble > -1e-9


@settings(max_examples=60)
@given(st.sampled_from(["gpipe", "1f1b"]), STAGES, MICROBATCHES, DURATION, DURATION, DURATION)
def test_bubble_of_the_classics(name, stages, microbatches, forward, backward_input, backward_weight):
    report = check(build(name, stages, microbatches), Times(forward, backward_input, backward_weight))
    assert list(report.peak_live) == [min(microbatches, stages - rank if name == "1f1b" else microbatches)
                                      for rank in range(stages)]
    assert report.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))


@pytest.mark.parametrize("name", PEAKS)
def test_peak_activations(name):
    for stages in range(1, 25):
        assert max(peak_live(build(name, stages, 2 * stages + 1))) == PEAKS[name](stages)


def test_zero_bubble_means_none():
    """zb_v and zb_h2, T_F = T_B = T_W: no rank is idle from its first action to its last."""
    for name, stages, more in product(("zb_v", "zb_h2"), (1, 2, 3, 4, 5, 8, 13), (-1, 0, 4)):
        assert check(build(name, stages, 2 * stages + more)).bubble == pytest.approx(0, abs=1e-12)


@settings(max_examples=40)
@given(st.integers(2, 16), st.integers(1, 3), st.integers(1, 4))
def test_virtual_stages_divide_the_bubble(stages, groups, chunks):
    microbatches = groups * stages
    report = check(build("interleaved_1f1b", stages, microbatches, chunks), Times(2, 1, 1))
    fill = (stages - 1) / chunks
    assert report.bubble == pytest.approx(fill / (microbatches + fill))


def test_the_config_knows_every_schedule():
    assert set(rules_pipeline.SCHEDULES) == set(SCHEDULES)


@settings(max_examples=30)
@given(STAGES, MICROBATCHES, st.integers(1, 3))
def test_evaluation_is_proved(ranks, microbatches, chunks):
    check(forward_only(Placement.looped(ranks, chunks), microbatches), training=False)


@st.composite
def random_orders(draw):
    """Orders of no schedule at all: at every moment some rank runs some action that can run, split or not."""
    ranks, chunks, microbatches = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    vee = tuple(range(ranks)) + tuple(reversed(range(ranks)))
    placement = Placement(vee) if chunks == 2 and draw(st.booleans()) else Placement.looped(ranks, chunks)
    todo, done = [], set()
    for microbatch, stage in product(range(microbatches), range(placement.stages)):
        backward = [Kind.BACKWARD] if draw(st.booleans()) else [Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT]
        todo.append([(kind, microbatch, stage) for kind in (Kind.FORWARD, *backward)])
    orders = [[] for _ in range(ranks)]
    while todo:
        able = [row for row in todo if placement.source(*row[0]) in done | {None}]
        row = able[draw(st.integers(0, len(able) - 1))]
        kind, microbatch, stage = row.pop(0)
        done.add(placement.product(kind, microbatch, stage))
        rank = placement.rank_of[stage]
        orders[rank].append(Action(kind, microbatch, placement.stages_of[rank].index(stage)))
        todo = [row for row in todo if row]
    return orders, placement, microbatches


@settings(max_examples=150)
@given(random_orders(), DURATION, DURATION, st.integers(0, 20))
def test_transfers_of_any_order_never_deadlock(case, forward, backward, transfer):
    check(with_transfers(*case), Times(forward, backward, backward, transfer))


# p, m, T_F, T_B, T_W, T_comm in ms and the bubbles of 1F1B, interleaved 1F1B (three stages a rank), ZB-H1 and ZB-H2:
# Qi et al. 2023, "Zero Bubble Pipeline Parallelism", table 5.
PUBLISHED = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1055, 0.1585, 0.1083),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.0818, 0.1242, 0.0837),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0443, 0.0674, 0.0444),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1104, 0.1397, 0.0672),
    (16, 64, 11.307, 11.254, 8.101, 0.379, 0.2082, 0.0852, 0.1088, 0.0516),
    (16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251, 0.0445, 0.0576, 0.0266)]


@pytest.mark.parametrize("row", PUBLISHED)
def test_bubbles_agree_with_published(row):
    """Within half a point each; gpipe against the ideal (p−1)/(m+p−1), which has free transfers."""
    stages, microbatches, *durations = row[:6]
    named = (("1f1b", 1), ("interleaved_1f1b", 3), ("zb_h1", 1), ("zb_h2", 1))
    for (name, chunks), rate in zip(named, row[6:], strict=True):
        report = check(build(name, stages, microbatches, chunks), Times(*durations))
        assert report.bubble == pytest.approx(rate, abs=0.005), name
    ideal = check(build("gpipe", stages, microbatches), Times(*durations[:3])).bubble
    assert ideal == pytest.approx((stages - 1) / (microbatches + stages - 1), abs=0.005)


def test_timeline_by_hand():
    """Two stages, two micro-batches, T_F 1 and whole backwards of 2, a transfer of 0.5."""
    spans = check(build("1f1b", 2, 2), Times(1, 1, 1, 0.5)).spans
    assert [(str(a), start, end) for a, start, end in spans[0]] == [
        ("F0", 0, 1), ("F1", 1, 2), ("B0", 5, 7), ("B1", 8, 10)]
    assert [(str(a), start, end) for a, start, end in spans[1]] == [
        ("F0", 1.5, 2.5), ("B0", 2.5, 4.5), ("F1", 4.5, 5.5), ("B1", 5.5, 7.5)]


def test_receives_travel_under_compute():
    """Rank 1 posts the receive of its second activation before it computes the forward of the first."""
    steps = build("1f1b", 2, 4).steps[1]
    assert [transfer.message for transfer in steps[0].recvs] == [
        Message(Payload.ACTIVATION, m, 0) for m in (0, 1)]


def test_one_stage_has_no_transfers():
    for name in SCHEDULES:
        assert all(not step.sends and not step.recvs for step in build(name, 1, 5).steps[0])


def test_refused_arguments():
    with pytest.raises(ScheduleError, match="unknown pipeline schedule '1f2b'; known: 1f1b, dualpipe_v"):
        build("1f2b", 2, 2)
    with pytest.raises(ScheduleError, match="at least one stage and one micro-batch, got 2 and 0"):
        build("1f1b", 2, 0)
    with pytest.raises(ScheduleError, match="virtual_stages=2"):
        build("gpipe", 2, 2, 2)
    with pytest.raises(ScheduleError, match="zb_v has 2 stages a rank, got virtual_stages=3"):
        build("zb_v", 2, 2, 3)


def planted(table: Table, rank: int, index: int, *steps: Step) -> Table:
    """`table` with one step of one rank replaced by `steps`."""
    rows = list(table.steps)
    rows[rank] = (*rows[rank][:index], *steps, *rows[rank][index + 1:])
    return replace(table, steps=tuple(rows))


def find(table: Table, rank: int, name: str) -> tuple[int, Step]:
    """The step of `rank` that runs the action called `name`."""
    return next((i, step) for i, step in enumerate(table.steps[rank]) if str(step.compute) == name)


def swap_receives(table):
    (i, first), (j, second) = find(table, 2, "F0"), find(table, 2, "B0")
    table = planted(table, 2, i, replace(first, recvs=second.recvs))
    return planted(table, 2, j, replace(second, recvs=first.recvs))


BAD = {
    "a receive swapped": (swap_receives, r"rank 2, step 0: F0 needs the activation of micro-batch 0 from stage 1"),
    "a backward missing": (lambda t: planted(t, 2, find(t, 2, "B1")[0]), r"rank 2: B1 is missing"),
    "a forward twice": (lambda t: planted(t, 2, 1, Step(Action(Kind.FORWARD, 0))), r"rank 2, step 1: F0 after F"),
    "a backward before its forward": (
        lambda t: planted(t, 2, 0, Step(Action(Kind.BACKWARD, 0))), r"rank 2, step 0: B0 after nothing"),
    "an unknown micro-batch": (
        lambda t: planted(t, 0, 0, Step(Action(Kind.FORWARD, 9))), r"rank 0, step 0: F9 is outside of 4"),
    "a weight gradient missing": (
        lambda t: planted(t, 0, find(t, 0, "B3")[0],
                          replace(find(t, 0, "B3")[1], compute=Action(Kind.BACKWARD_INPUT, 3))),
        r"rank 0: W3 is missing"),
    "a send before its producer": (
        lambda t: planted(planted(t, 0, 1, replace(t.steps[0][1], sends=())), 0, 0,
                          replace(t.steps[0][0], sends=t.steps[0][1].sends)),
        r"rank 0, step 0: sends the activation of micro-batch 0 from stage 0, which it did not make"),
    "a send to the wrong rank": (
        lambda t: planted(t, 0, 1, replace(t.steps[0][1], sends=(replace(t.steps[0][1].sends[0], peer=2),))),
        r"rank 0, step 1: sends the activation of micro-batch 0 from stage 0 from rank 0 to rank 2; it goes from "
        r"rank 0 to rank 1"),
    "a send forgotten": (
        lambda t: planted(t, 0, 1, replace(t.steps[0][1], sends=())),
        r"rank 0: the activation of micro-batch 0 from stage 0 is never sent"),
    "a receive twice": (
        lambda t: planted(t, 2, 0, replace(t.steps[2][0], recvs=t.steps[2][0].recvs * 2)),
        r"rank 2, step 0: receives the activation of micro-batch 0 from stage 1 twice"),
}


def with_pair(table, rank, index):
    """Two neighbouring steps of a rank joined into a pair; what the second one sent and received goes with it."""
    first, second = table.steps[rank][index:index + 2]
    pair = Step(Pair(first.compute, second.compute), first.sends + second.sends, first.recvs + second.recvs)
    rows = list(table.steps)
    rows[rank] = (*rows[rank][:index], pair, *rows[rank][index + 2:])
    return replace(table, steps=tuple(rows))


# p, m and, with transfers of a tenth of T_F = T_B = T_W, shares of the makespan: the figures of docs/schedules.md.
PRICE = [(4, 8, 0.184, 0.104, 0.197, 0.306), (8, 32, 0.168, 0.066, 0.123, 0.225)]


@pytest.mark.parametrize("row", PRICE)
def test_what_pairs_cost_beside_other_schedules(row):
    stages, microbatches, *shares = row
    names = [("dualpipe_v", 2), ("zb_v", 2), ("interleaved_1f1b", 2), ("1f1b", 1)]
    for (name, chunks), share in zip(names, shares, strict=True):
        found = check(build(name, stages, microbatches, chunks), Times(1, 1, 1, 0.1))
        assert found.makespan_bubble == pytest.approx(share, abs=5e-4)


def test_a_pair_needs_nothing_of_itself():
    table = build("dualpipe_v", 2, 4)
    assert any(isinstance(step.compute, Pair) for step in table.steps[0])
    with pytest.raises(ScheduleError, match="rank 1, step 0: F0&B0: the backward needs the forward that it is to run"):
        check(with_pair(build("1f1b", 2, 2), 1, 0))
    with pytest.raises(ScheduleError, match="rank 1, step 0: F0&F1 is not a forward and a backward"):
        check(with_pair(build("gpipe", 2, 2), 1, 0))


@pytest.mark.parametrize("fault", BAD)
def test_bad_table_is_refused(fault):
    spoil, message = BAD[fault]
    with pytest.raises(ScheduleError, match=message):
        check(spoil(build("1f1b", 3, 4)))


def test_receive_out_of_order_is_refused():
    """Both activations arrive before their use, but the wire would deliver them into each other's buffer."""
    table = build("gpipe", 2, 2)
    first = table.steps[1][0]
    assert len(first.recvs) == 2
    table = planted(table, 1, 0, replace(first, recvs=first.recvs[::-1]))
    with pytest.raises(ScheduleError, match=r"rank 1, step 0: receives the activation of micro-batch 1 .* where rank 0 "
                                            r"sends the activation of micro-batch 0"):
        check(table)


def test_deadlock_is_refused():
    """Each rank alone is in order, but the first wants a gradient back before it makes what the second waits for."""
    f, b = Kind.FORWARD, Kind.BACKWARD
    a0, a1 = (Message(Payload.ACTIVATION, m, 0) for m in (0, 1))
    g0, g1 = (Message(Payload.GRADIENT, m, 1) for m in (0, 1))
    rank0 = (Step(Action(f, 0)), Step(Action(b, 0), (Transfer(a0, 1),), (Transfer(g1, 1), Transfer(g0, 1))),
             Step(Action(f, 1)), Step(Action(b, 1), (Transfer(a1, 1),)))
    rank1 = (Step(Action(f, 1), (), (Transfer(a0, 0), Transfer(a1, 0))), Step(Action(b, 1)),
             Step(Action(f, 0), (Transfer(g1, 0),)), Step(Action(b, 0)), Step(None, (Transfer(g0, 0),)))
    with pytest.raises(ScheduleError, match=r"deadlock: rank 0, step 1, B0 waits for the gradient of micro-batch 0 "
                                            r"from stage 1; rank 1, step 0, F1 waits for the activation of micro"):
        check(Table(Placement.looped(2), 2, (rank0, rank1)))


def test_orders_that_wait_for_each_other_are_refused():
    with pytest.raises(ScheduleError, match=r"rank 1: F0 waits for ever for the activation of micro-batch 0 from"):
        with_transfers([[], [Action(Kind.FORWARD, 0)]], Placement.looped(2), 1)
