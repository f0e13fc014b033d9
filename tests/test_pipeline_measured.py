"""Real runs of schedules: measured order and bubble against the simulation, live activations, faults, flat memory."""

import gc
import time
import weakref

import pytest
import torch

from megafour.comm.group import Group
from megafour.parallel.grads import Deferral, attach_main_grad, weight_grad
from megafour.parallel.pipeline.check import check, peak_live
from megafour.parallel.pipeline.executor import run_schedule
from megafour.parallel.pipeline.record import Recorder
from megafour.parallel.pipeline.schedules import SCHEDULES, build
from megafour.parallel.pipeline.simulate import Times
from megafour.parallel.pipeline.timeline import measured_bubble
from megafour.parallel.pipeline.wire import Activation
from tests.pool import RankError

SHAPE = Activation((4, 6), torch.float64)
UNIT = 0.06
"""Seconds of a forward on a rank's whole share."""


class Slow(torch.autograd.Function):
    """x W^T whose forward, input gradient and weight gradient each sleep; keeps count of what is live."""

    @staticmethod
    def forward(ctx, x, weight, seconds):
        time.sleep(seconds)
        ctx.save_for_backward(x)
        ctx.weight, ctx.seconds = weight, seconds
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        (x,), weight = ctx.saved_tensors, ctx.weight
        time.sleep(ctx.seconds)

        def later():
            time.sleep(ctx.seconds)
            weight_grad(weight, grad, x)

        if not weight.deferral.take(later):
            later()
        return grad @ weight, None, None


def group_of(rank, world):
    return Group("pp", tuple(range(world)), rank, torch.distributed.group.WORLD)


def stages_of(table, rank, deferral, seconds, kept=lambda x: None):
    """One slow layer for each stage of the rank."""
    held = table.placement.stages_of[rank]
    weights = []
    for _ in held:
        weight = torch.nn.Parameter(torch.eye(6, dtype=torch.float64) * 0.9)
        grad = torch.zeros(6, 6, dtype=torch.float64)
        attach_main_grad(weight, lambda grad=grad: grad, lambda p: None, deferral)
        weights.append(weight)

    def forward_of(stage, weight):
        def forward(microbatch, x):
            x = torch.full((4, 6), 1.0 + microbatch, dtype=torch.float64) if x is None else x
            if stage == 0:
                x.requires_grad_()
            x = x * 1.0
            kept(x)
            y = Slow.apply(x, weight, seconds / len(held))
            return y.square().sum() if stage == table.placement.stages - 1 else y
        return forward

    return weights, [forward_of(stage, weight) for stage, weight in zip(held, weights, strict=True)]


def timed(rank, world, name, microbatches, virtual):
    table, deferral = build(name, world, microbatches, virtual), Deferral()
    _, chunks = stages_of(table, rank, deferral, UNIT)
    torch.distributed.barrier()
    recorder = Recorder(torch.device("cpu"))
    run_schedule(table, group=group_of(rank, world), chunks=chunks, activation=SHAPE, deferral=deferral,
                 recorder=recorder)
    return recorder.spans()


REAL = [("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("zb_v", 2)]


@pytest.mark.parametrize(("name", "virtual"), REAL)
def test_a_real_run_has_the_order_that_the_table_predicts(pool, name, virtual):
    report = check(build(name, 4, 8, virtual), Times())
    for row, predicted in zip(pool.run(timed, 4, name, 8, virtual), report.spans, strict=True):
        assert [word for word, _, _ in row] == [str(work) for work, _, _ in predicted]


def replayed(table, durations):
    """The spans of the table's order at the duration of every single action, transfers free."""
    placement, ready, spans = table.placement, {}, [[] for _ in durations]
    rows = [[step.compute for step in steps if step.compute is not None] for steps in table.steps]
    while any(len(done) < len(row) for done, row in zip(spans, rows, strict=True)):
        for rank, (done, row) in enumerate(zip(spans, rows, strict=True)):
            for work in row[len(done):]:
                named = [(a.kind, a.microbatch, table.stage(rank, a)) for a in work.parts]
                needed = {placement.source(*name) for name in named} - {None}
                if not needed <= ready.keys():
                    break
                start = max([done[-1][2] if done else 0.0, *(ready[message] for message in needed)])
                end = start + durations[rank][len(done)]
                ready.update({placement.product(*name): end for name in named})
                done.append((str(work), start, end))
    return spans


@pytest.mark.parametrize(("name", "virtual"), [*REAL, ("dualpipe_v", 2)])
def test_a_replay_at_the_durations_on_paper_is_the_report(name, virtual):
    table = build(name, 4, 8, virtual)
    report = check(table, Times(3, 4, 2))
    again = replayed(table, [[end - start for _, start, end in row] for row in report.spans])
    assert [[span[1:] for span in row] for row in again] == [[span[1:] for span in row] for row in report.spans]
    assert measured_bubble(again) == pytest.approx(report.bubble)


@pytest.mark.full
@pytest.mark.parametrize(("name", "virtual"), REAL)
def test_a_real_run_has_the_bubble_that_the_table_predicts(pool, name, virtual):
    """Four ranks that sleep, within three points of the table at the durations that each action really had.

    Others on the machine make sleeps longer, which the replay knows, and wake a rank late, which it does not: one run
    of five has to be undisturbed.
    """
    table, found = build(name, 4, 8, virtual), []
    while not found or abs(found[-1][0] - found[-1][1]) > 0.03:
        assert len(found) < 5, (found, check(table, Times()).bubble)
        rows = pool.run(timed, 4, name, 8, virtual)
        slept = [[end - start for _, start, end in row] for row in rows]
        found.append((measured_bubble(rows), measured_bubble(replayed(table, slept))))
    print(f"{name}: measured {found[-1][0]:.3f}, replayed {found[-1][1]:.3f}, at equal times "
          f"{check(table, Times()).bubble:.3f}, after {len(found)} runs")


def live(rank, world, cases):
    """Per case, the most inputs of layers alive at once, in whole shares, and how many after the run."""
    answers = []
    for name, microbatches in cases:
        table, deferral, alive, peak = build(name, world, microbatches), Deferral(), [0], [0]

        def forget(alive=alive):
            alive[0] -= 1

        def kept(x, alive=alive, peak=peak, forget=forget):
            alive[0] += 1
            peak[0] = max(peak[0], alive[0])
            weakref.finalize(x.untyped_storage(), forget)

        _, chunks = stages_of(table, rank, deferral, 0.0, kept)
        run_schedule(table, group=group_of(rank, world), chunks=chunks, activation=SHAPE, deferral=deferral)
        gc.collect()
        answers.append((peak[0] / len(chunks), alive[0]))
    return answers


def test_live_activations_never_exceed_the_bound(pool):
    cases = [(name, m) for name in SCHEDULES for m in (3, 9)]
    results = pool.run(live, 4, cases)
    for index, (name, microbatches) in enumerate(cases):
        bound = peak_live(build(name, 4, microbatches))
        for rank in range(4):
            peak, left = results[rank][index]
            assert peak <= bound[rank], (name, microbatches, rank)
            assert left == 0
        if microbatches == 9:
            assert max(results[rank][index][0] for rank in range(4)) == max(bound)    # and it is counted at all


def raises_in_the_middle(rank, world):
    table, deferral = build("zb_v", world, 8), Deferral()
    _, chunks = stages_of(table, rank, deferral, 0.0)

    def broken(microbatch, x):
        if microbatch == 3:
            raise KeyError("layers.3")
        return chunks[0](microbatch, x)

    run_schedule(table, group=group_of(rank, world), deferral=deferral, activation=SHAPE,
                 chunks=[broken, chunks[1]] if rank == 1 else chunks)


def test_a_rank_that_raises_ends_all(pool):
    start = time.monotonic()
    with pytest.raises(RankError, match="KeyError") as error:
        pool.run(raises_in_the_middle, 4)
    assert error.value.rank == 1 and "in broken" in str(error.value)
    assert time.monotonic() - start < 60


def many_steps(rank, world, name, steps):
    """Tensors alive after the tenth and after the last step, and bytes of them."""
    table, deferral, seen = build(name, world, 4), Deferral(), []
    _, chunks = stages_of(table, rank, deferral, 0.0)
    for step in range(steps):
        run_schedule(table, group=group_of(rank, world), chunks=chunks, activation=SHAPE, deferral=deferral)
        if step in (9, steps - 1):
            gc.collect()
            seen.append(sum(1 for x in gc.get_objects() if isinstance(x, torch.Tensor)))
    return seen


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zb_v"])
def test_two_hundred_steps_keep_nothing(pool, name):
    for first, last in pool.run(many_steps, 2, name, 200):
        assert last <= first
