"""The executor on real ranks against plain autograd, its memory, its hooks and its refusals."""

import gc
import weakref

import pytest
import torch

from megafour.comm.group import Group, solo
from megafour.parallel.pipeline.actions import Action, Kind, Placement, ScheduleError
from megafour.parallel.pipeline.check import check
from megafour.parallel.pipeline.executor import run_forward_only, run_schedule
from megafour.parallel.pipeline.schedules import SCHEDULES, build
from megafour.parallel.pipeline.transfers import with_transfers
from megafour.parallel.pipeline.wire import Activation

WIDTH, LAYERS, BATCH = 6, 8, 3


def layers():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(LAYERS)]


def inputs(microbatches):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(microbatches, BATCH, WIDTH, generator=generator, dtype=torch.float64)


def through(weights, x):
    for weight in weights:
        x = torch.tanh(x @ weight) + x
    return x


def reference(microbatches):
    weights = layers()
    losses = [through(weights, x).square().sum() for x in inputs(microbatches)]
    torch.stack(losses).sum().backward()
    return [float(loss.detach()) for loss in losses], [weight.grad for weight in weights]


def group_of(rank, world):
    pg = torch.distributed.group.WORLD if world > 1 else None
    return Group("pp", tuple(range(world)), rank, pg)


def stages_of(placement, rank, weights, xs):
    """The forwards of this rank's stages: LAYERS are cut evenly, the loss sits on the last stage."""
    share = LAYERS // placement.stages

    def forward_of(stage):
        def forward(microbatch, x):
            y = through(weights[stage * share:(stage + 1) * share], xs[microbatch] if x is None else x)
            return y.square().sum() if stage == placement.stages - 1 else y

        return forward

    return [forward_of(stage) for stage in placement.stages_of[rank]]


SHAPE = Activation((BATCH, WIDTH), torch.float64)


def on_a_rank(rank, world, tables):
    """For each table: (losses, gradients of own layers, actions that were told), and the losses of an evaluation."""
    results = []
    for table in tables:
        weights, calls = layers(), []
        chunks = stages_of(table.placement, rank, weights, inputs(table.microbatches))
        group = group_of(rank, world)
        losses = run_schedule(table, group=group, chunks=chunks, activation=SHAPE,
                              before=calls.append)
        evaluated = run_forward_only(table.microbatches, placement=table.placement, group=group, chunks=chunks,
                                     activation=SHAPE)
        assert not any(loss.requires_grad for loss in losses + evaluated)
        gradients = {i: weight.grad.tolist() for i, weight in enumerate(weights) if weight.grad is not None}
        results.append(([float(x) for x in losses], gradients, calls, [float(x) for x in evaluated]))
    return results


def vee(microbatches):
    """Two ranks, four stages in a V, one micro-batch after another: stages 1 and 2 meet on rank 1, without a wire."""
    placement, orders = Placement((0, 1, 1, 0)), [[], []]
    for m in range(microbatches):
        for kind, chunks in ((Kind.FORWARD, (0, 1)), (Kind.BACKWARD, (1, 0))):
            for order in orders:
                order += [Action(kind, m, chunk) for chunk in chunks]
    return with_transfers(orders, placement, microbatches)


def looped(microbatches):
    """Two ranks with two stages each, all forwards before all backwards."""
    order = [Action(kind, m, c) for kind, chunks in ((Kind.FORWARD, (0, 1)), (Kind.BACKWARD, (1, 0)))
             for c in chunks for m in range(microbatches)]
    return with_transfers([order, order], Placement.looped(2, 2), microbatches)


def compare(table, ranks):
    """Losses and gradients of all ranks together equal plain autograd's."""
    losses, gradients = reference(table.microbatches)
    assert sum((rank[0] for rank in ranks), []) == pytest.approx(losses, rel=1e-12)
    assert sum((rank[3] for rank in ranks), []) == pytest.approx(losses, rel=1e-12)
    found = {i: torch.tensor(grad, dtype=torch.float64) for rank in ranks for i, grad in rank[1].items()}
    assert len(found) == sum(len(rank[1]) for rank in ranks) == LAYERS
    for i, gradient in enumerate(gradients):
        torch.testing.assert_close(found[i], gradient, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_equals_plain_autograd(pool, world):
    tables = [build(name, world, m) for name in SCHEDULES for m in (1, 3, 4, 8)]
    tables += [build("interleaved_1f1b", world, 3, 2)]
    if world == 2:
        tables += [vee(3), looped(3), build("interleaved_1f1b", world, 3, 4)]
    for table in tables:
        check(table)
    results = [on_a_rank(0, 1, tables)] if world == 1 else pool.run(on_a_rank, world, tables)
    for index, table in enumerate(tables):
        ranks = [result[index] for result in results]
        compare(table, ranks)
        for rank, (_, _, calls, _) in enumerate(ranks):
            assert calls == [action for step in table.steps[rank] for action in step.parts]


class Saved:
    """What autograd saved of one tensor; lives exactly as long as the graph does."""

    def __init__(self, tensor):
        self.tensor = tensor


def count_live(rank, world, name, microbatches):
    """(the most micro-batches whose graph was alive at once, those alive after the run)."""
    alive, peak = set(), [0]

    def forward(microbatch, x):
        x = torch.zeros(BATCH, WIDTH, dtype=torch.float64) if x is None else x
        weight = torch.ones((), dtype=torch.float64, requires_grad=True)

        def pack(tensor):
            saved = Saved(tensor)
            alive.add(microbatch)
            weakref.finalize(saved, alive.discard, microbatch)
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            y = (x * weight).exp()
        peak[0] = max(peak[0], len(alive))
        return y.sum() if rank == world - 1 else y

    run_schedule(build(name, world, microbatches), group=group_of(rank, world), chunks=[forward], activation=SHAPE)
    gc.collect()
    return peak[0], len(alive)


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_live_activations_stay_within_the_bound(pool, name):
    bound = check(build(name, 4, 6)).peak_live
    assert pool.run(count_live, 4, name, 6) == [(peak, 0) for peak in bound]


def what_is_freed(rank, world):
    """Before each backward: on the first stage whether the outputs sent so far are gone, though their graphs wait; on
    the last whether the inputs of earlier micro-batches are."""
    seen, gone = [], []

    def forward(microbatch, x):
        if x is None:
            leaf = torch.ones(BATCH, WIDTH, dtype=torch.float64, requires_grad=True)
            y = leaf + microbatch  # an addition saves neither operand nor result
            seen.append(weakref.ref(y.untyped_storage()))
            return y
        seen.append(weakref.ref(x.untyped_storage()))
        return x.sum()

    def before(action):
        if action.kind is Kind.BACKWARD:
            gc.collect()
            gone.append(all(ref() is None for ref in seen[:action.microbatch + (rank == 0)]))

    run_schedule(build("1f1b", world, 3), group=group_of(rank, world), chunks=[forward], activation=SHAPE,
                 before=before)
    return gone


def test_outputs_go_when_sent_and_inputs_after_their_backward(pool):
    assert [gone[1:] for gone in pool.run(what_is_freed, 2)] == [[True, True]] * 2


def long_evaluation(rank, world):
    def forward(m, x):
        if x is None:
            return torch.full((2,), float(m))
        return x.sum() if rank == world - 1 else x + 1

    losses = run_forward_only(50, placement=Placement.looped(world), group=group_of(rank, world), chunks=[forward],
                              activation=Activation((2,), torch.float32))
    return [float(x) for x in losses]


def test_evaluation_of_many_micro_batches(pool):
    results = pool.run(long_evaluation, 3)
    assert results[:2] == [[], []]
    assert results[2] == [2 * (m + 1) for m in range(50)]


def test_refusals():
    with pytest.raises(ScheduleError, match="a table for 2 ranks .* cannot run on a group of 1"):
        run_schedule(build("1f1b", 2, 1), group=solo("pp"), chunks=[lambda m, x: x], activation=SHAPE)


def test_a_misshapen_activation_is_refused():
    group = Group("pp", (0, 1), 0)  # refused before anything is sent
    with pytest.raises(ValueError, match=r"activation of micro-batch 0 from stage 0 is \(3, 5\) .*\(3, 6\)"):
        run_schedule(build("1f1b", 2, 1), group=group, activation=SHAPE,
                     chunks=[lambda m, x: torch.zeros(3, 5, dtype=torch.float64, requires_grad=True) * 1])
