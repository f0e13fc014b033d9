"""The halves of a pair run at the same time, each over process groups of its own, whatever fails."""

from __future__ import annotations

import threading

import pytest
import torch

from megafour.comm import primitives
from megafour.comm.ledger import Ledger
from megafour.config.load import config_from
from megafour.config.rules import resolve
from megafour.mesh import Mesh
from megafour.parallel.pipeline.actions import Pair
from megafour.parallel.pipeline.beside import Beside
from megafour.parallel.pipeline.executor import run_schedule
from megafour.parallel.pipeline.schedules import build
from megafour.parallel.pipeline.wire import Activation
from megafour.trainer.setup import runs_pairs
from megafour.verify.pool import RankError
from megafour.verify.run import check as compare
from megafour.verify.shrink import option_case
from tests.training import MODEL
from tests.verify_rows import PLAIN

MICROBATCHES = 6


class Meeting(torch.autograd.Function):
    """Sums over tp in both passes; says where it is, and waits there for whom it is told."""

    @staticmethod
    def forward(ctx, x, group, key, at):
        ctx.group, ctx.key, ctx.at = group, key, at
        at(("F", *key))
        return primitives.all_reduce(x.clone(), group)

    @staticmethod
    def backward(ctx, grad):
        ctx.at(("B", *ctx.key))
        return primitives.all_reduce(grad.clone(), ctx.group), None, None, None


def halves_meet(rank, world, fault):
    """Each half of every pair waits, before its sum over tp, for the other one to have begun. (missed, pairs, calls)"""
    ledger = Ledger()
    mesh = Mesh.build(pp=2, tp=2, ledger=ledger, two_lanes=True)
    pp, tp = mesh.group("pp"), mesh.group("tp")
    table = build("dualpipe_v", 2, MICROBATCHES)
    other, missed = {}, []
    for step in table.steps[pp.rank]:
        if isinstance(step.compute, Pair):
            first, second = ((half, action.microbatch, action.chunk)
                             for half, action in zip("FB", step.compute.parts, strict=True))
            other[first], other[second] = second, first
    begun = {key: threading.Event() for key in other}

    def at(key):
        if key not in other:
            return
        begun[key].set()
        if not begun[other[key]].wait(20):
            missed.append(key)
        if fault == key[0] and rank == 1:
            raise KeyError("planted fault")

    def chunk(number):
        def forward(microbatch, x):
            x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True) if x is None else x
            y = Meeting.apply(x, tp, (microbatch, number), at)
            return y.sum() if number == 1 and pp.rank == 0 else y
        return forward

    losses = run_schedule(table, group=pp, chunks=[chunk(0), chunk(1)], beside=Beside(mesh.lane, mesh.waits),
                          activation=Activation((2, 3), torch.float64))
    counted = {key: entry.calls for key, entry in ledger.counts.items() if key[0] == "all_reduce"}
    return missed, len(other) // 2, counted, [float(loss) for loss in losses]


def test_the_halves_of_a_pair_run_at_the_same_time_over_groups_of_their_own(pool):
    for rank, (missed, pairs, counted, losses) in enumerate(pool.run(halves_meet, 4, None)):
        assert missed == [] and pairs > 3
        assert counted == {("all_reduce", "tp", "forward"): 4 * MICROBATCHES}
        assert losses == ([6.0 * 2**4] * MICROBATCHES if rank < 2 else [])     # four sums over two ranks


@pytest.mark.parametrize("half", ["F", "B"])
def test_a_half_that_fails_ends_every_rank(pool, half):
    with pytest.raises(RankError, match="rank 1: KeyError: 'planted fault'"):
        pool.run(halves_meet, 4, half)


@pytest.mark.parametrize(("schedule", "parallel", "expected"), [
    ("dualpipe_v", {"pp": 2, "tp": 2}, True), ("dualpipe_v", {"pp": 2, "cp": 2}, True),
    ("dualpipe_v", {"pp": 2, "dp": 2}, False), ("zb_v", {"pp": 2, "tp": 2}, False),
    ("dualpipe_v", {"pp": 2, "tp": 2, "dp": 2, "zero_stage": 3}, False)])
def test_where_there_is_nothing_to_hide_or_a_group_is_shared_the_halves_take_turns(schedule, parallel, expected):
    values = {"model": {**MODEL, "num_layers": 4}, "data": {"seq_length": 16},
              "train": {"global_batch_size": 16, "precision": "fp64"},
              "parallel": {**parallel, "pipeline": {"schedule": schedule}}}
    world = parallel.get("tp", 1) * parallel.get("cp", 1) * parallel.get("dp", 1) * 2
    config = resolve(config_from(values), world, data=False)
    assert runs_pairs(config, torch.device("cpu")) is expected


@pytest.mark.parametrize("row", [
    {"mesh": "pp2-tp2", "sequence_parallel": "true", "recompute": "full", "dropout": "on", "tied": "true"},
    {"mesh": "dp2-pp2-tp2", "zero_stage": "2", "recompute": "selective"},
    {"mesh": "dp2-pp2-cp2", "zero_stage": "1", "documents": "on", "dropout": "on"},
    {"mesh": "pp2-cp2", "method": "ulysses", "zero_stage": "2", "documents": "on"},
    {"mesh": "dp2-pp2-tp2", "zero_stage": "3"}], ids=lambda row: f"{row['mesh']} zero {row.get('zero_stage', 1)}")
def test_pairs_are_the_same_model(pool, row):
    """With what the halves share: weights, gradient buckets, what is computed again, packed documents."""
    row = {**PLAIN, "schedule": "dualpipe_v", "micro_batches": "6", **row}
    outcome = compare(pool, option_case(config_from({}), row, 2), 2)
    assert outcome.passed, outcome
