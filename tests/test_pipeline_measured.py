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


@pytest.mark.full    # needs a machine that does nothing else
@pytest.mark.parametrize(("name", "virtual"), REAL)
def test_a_real_run_has_the_bubble_that_the_table_predicts(pool, name, virtual):
    """Four ranks that sleep, within three points; the best of three runs, since others may hold a core."""
    predicted = check(build(name, 4, 8, virtual), Times()).bubble
    found = [measured_bubble(pool.run(timed, 4, name, 8, virtual)) for _ in range(3)]
    assert min(abs(bubble - predicted) for bubble in found) <= 0.03, (found, predicted)


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
