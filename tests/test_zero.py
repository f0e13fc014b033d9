"""ZeRO 2, 3 and hybrid sharding: every mesh equals one process; planted faults; what is kept between steps."""

from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch

from megafour.config.load import config_from
from megafour.mesh import Mesh
from megafour.trainer.diagnose import not_finite, parameter_norms
from megafour.trainer.setup import build_mesh, build_state
from megafour.trainer.step import evaluate_batch, train_step
from megafour.verify.matrix import parse_mesh
from megafour.verify.run import check
from megafour.verify.shrink import VOCAB, option_case
from megafour.verify.toy import toy_batches
from tests.verify_rows import zero_rows

DEFAULT, WHOLE = zero_rows(whole=False), zero_rows(whole=True)


def named(row):
    return f"zero {row['zero_stage']}, {row['mesh']}, {row.get('schedule', 'no pipeline')}"


def passes(pool, row, deviation, steps=2):
    outcome = check(pool, option_case(config_from({}), row, steps), steps)
    assert outcome.passed, (row, outcome)
    deviation(max(outcome.loss, outcome.grad_norm, outcome.gradient, outcome.weights))


@pytest.mark.parametrize("row", DEFAULT, ids=named)
def test_a_row_equals_one_process(pool, row, deviation):
    passes(pool, row, deviation)


@pytest.mark.full
@pytest.mark.parametrize("row", WHOLE, ids=named)
def test_every_row_equals_one_process(pool, row, deviation):
    passes(pool, row, deviation, steps=3)


def test_the_walk_is_what_it_says():
    for stage in ("2", "3"):
        rows = [row for row in DEFAULT if row["zero_stage"] == stage]
        assert {"dp2", "dp2-tp2", "dp2-pp2", "cp2"} <= {row["mesh"] for row in rows}
        assert {"1f1b", "zb_v"} <= {row.get("schedule") for row in rows}
        assert all(row["micro_batches"] == "3" for row in rows)
        assert {row["mesh"] for row in rows if row["tied"] == "true"} >= {"dp2", "dp2-pp2"}
    assert all(parse_mesh(r["mesh"]).dp * parse_mesh(r["mesh"]).cp >= 4 for r in WHOLE if ":" in r["zero_stage"])


@pytest.mark.parametrize("stage", ["1:2", "2", "2:2"])
def test_many_buckets_of_a_stage(pool, stage):
    mesh = "dp2-cp2" if ":" in stage else "dp2-pp2-tp2"
    row = next(row for row in WHOLE if (row["zero_stage"], row["mesh"]) == (stage, mesh))
    case = option_case(config_from({}), row, 2)
    outcome = check(pool, replace(case, sizes=replace(case.sizes, bucket_bytes=4096)), 2)
    assert outcome.passed, outcome


# --- planted faults ------------------------------------------------------------------------------------------------


@contextmanager
def the_last_sum_lost():
    """The sum of a bucket's last micro-batch never reaches the shard."""
    from megafour.parallel.data.reduction import Reduction

    real = Reduction._land

    def forgetful(self):
        bucket, _ = self._flying[0]
        kept = bucket.grad_shard.clone() if bucket.landed == self._rounds - 1 else None
        real(self)
        if kept is not None:
            bucket.grad_shard.copy_(kept)

    with mock.patch.object(Reduction, "_land", forgetful):
        yield


@contextmanager
def a_shard_of_the_wrong_rank():
    """What is gathered is put together in the wrong order of ranks."""
    from megafour.parallel.data.gathering import Gathering

    real = Gathering.acquire

    def turned(self, buckets):
        here = [bucket.holders > 0 for bucket in buckets]
        real(self, buckets)
        for bucket, had in zip(buckets, here, strict=True):
            if not had:
                bucket.weights.copy_(bucket.weights.roll(len(bucket.weights) // self.group.size))

    with mock.patch.object(Gathering, "acquire", turned):
        yield


@contextmanager
def replicas_apart():
    """The replicas of a shard keep their own sums."""
    from megafour.parallel.data.reduction import Reduction

    with mock.patch.object(Reduction, "_sum_replicas", lambda self, bucket: None):
        yield


@contextmanager
def reduced_one_use_early():
    """A tied weight counts as whole after one of its two uses in a micro-batch."""
    from megafour.parallel.data.reduction import Reduction

    real = Reduction.start

    def hasty(self, microbatches, look=None):
        real(self, microbatches, look)
        for bucket in self.buckets:
            bucket.due = dict.fromkeys(bucket.due, 1)

    with mock.patch.object(Reduction, "start", hasty):
        yield


@pytest.mark.parametrize(("fault", "stage", "mesh"), [
    (the_last_sum_lost, "2", "dp2-pp2"), (the_last_sum_lost, "3", "dp2"),
    (a_shard_of_the_wrong_rank, "3", "dp2"), (replicas_apart, "3:2", "dp2-cp2"),
    (reduced_one_use_early, "2", "dp2")])
def test_a_planted_fault_is_found(pool, fault, stage, mesh):
    row = next(row for row in WHOLE if (row["zero_stage"], row["mesh"]) == (stage, mesh))
    outcome = check(pool, option_case(config_from({}), row, 2), 2, plant=fault)
    assert outcome.error is None and not outcome.passed and outcome.gradient > 1e-3, outcome


# --- what is kept --------------------------------------------------------------------------------------------------


def config_for(stage, mesh="dp2", **more):
    row = {**next(row for row in WHOLE if row["mesh"] == mesh), "zero_stage": stage}
    return option_case(config_from({}), row, 2).config.replace(more)


def kept(rank, world, config, poison):
    """(whole storages left after a step, elements of each kept shard and of each bucket, lines of diagnosis)."""
    mesh = build_mesh(config, torch.device("cpu"), ledger=False)
    state = build_state(config, mesh, VOCAB)
    batches = toy_batches(config, config, VOCAB, 0, "all", dp_rank=mesh.group("dp").rank,
                          positions=state.stage.build.positions)
    before = evaluate_batch(state, batches)
    assert evaluate_batch(state, batches) == before
    if poison and rank == 0:
        state.optimizer.masters[0].fill_(float("nan"))
    result = train_step(state, batches, 0, 1e-3)
    left = [(b.weights.untyped_storage().nbytes(), b.grads is None, b.holders, b.flying is None)
            for b in state.buckets.buckets]
    sizes = [(b.weight_shard.numel(), b.grad_shard.numel(), len(b.weights)) for b in state.buckets.buckets]
    said = not_finite(state, batches, 0) if poison else ""
    return left, sizes, said, result.applied, parameter_norms(state)


def test_zero_3_keeps_shares_only(pool):
    for left, sizes, _, applied, _ in pool.run(kept, 2, config_for("3"), False):
        assert applied and all(one == (0, True, 0, True) for one in left)
        assert all(2 * weights == 2 * grads == whole for weights, grads, whole in sizes)


def test_zero_2_keeps_shares_of_gradients_and_whole_weights(pool):
    for left, sizes, *_ in pool.run(kept, 2, config_for("2"), False):
        assert all(nbytes > 0 and none for nbytes, none, *_ in left)
        assert all(2 * grads == whole for _, grads, whole in sizes)


@pytest.mark.parametrize("stage", ["2", "3", "3:2"])
def test_norms_are_those_of_zero_0(pool, stage):
    mesh = "dp2-cp2" if ":" in stage else "dp2"
    ranks = parse_mesh(mesh).world
    (*_, want), *_ = pool.run(kept, ranks, config_for("0", mesh), False)
    (*_, got), *_ = pool.run(kept, ranks, config_for(stage, mesh), False)
    assert got == want and len(got) > 10


@pytest.mark.parametrize("stage", ["2", "3"])
def test_what_is_not_finite_is_named(pool, stage):
    results = pool.run(kept, 2, config_for(stage), True)
    assert not any(applied for *_, applied, _ in results)
    assert {said.split(" on ")[0] for _, _, said, *_ in results} == {"gradient of norm.weight"}


def gathered(rank, world, config):
    """(most bytes of weights, and of gradients, whole at once; of each unit's weights; whether weights were on their
    way when they were asked for; units)."""
    from megafour.parallel.data.bucket import Bucket
    from megafour.parallel.data.gathering import Gathering

    mesh = build_mesh(config, torch.device("cpu"), ledger=False)
    whole, asked, filling = [], [], []
    acquire, allocate = Gathering.acquire, Gathering.allocate

    def watched(self, bucket):
        allocate(self, bucket)
        whole.append(sum(b.weights.untyped_storage().nbytes() for b in state.buckets.buckets) if state else 0)

    def noted(self, buckets):
        asked.append(all(b.holders or b.flying is not None for b in buckets))
        acquire(self, buckets)

    def made(self):
        grads = whole_grads(self)
        flying = [tensor for _, pending in state.buckets._reduction._flying
                  for tensor in (*pending._keep, pending._result)]
        here = [b.grads for b in state.buckets.buckets if b.grads is not None]
        filling.append(sum(t.untyped_storage().nbytes() for t in (*here, *flying)))
        return grads

    state, whole_grads = None, Bucket.whole_grads
    with (mock.patch.object(Gathering, "allocate", watched), mock.patch.object(Gathering, "acquire", noted),
          mock.patch.object(Bucket, "whole_grads", made)):
        state = build_state(config, mesh, VOCAB)
        whole.clear()
        batches = toy_batches(config, config, VOCAB, 0, "all", dp_rank=mesh.group("dp").rank,
                              positions=state.stage.build.positions)
        train_step(state, batches, 0, 1e-3)
    sizes = {}
    for bucket in state.buckets.buckets:
        unit = next(i for i, u in enumerate(state.stage.units()) if bucket.params[0] in set(u.module.parameters()))
        sizes[unit] = sizes.get(unit, 0) + bucket.weights.numel() * bucket.weights.element_size()
    return max(whole), max(filling), sorted(sizes.values()), asked, len(state.stage.units())


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_zero_3_has_two_units_whole_at_most_and_the_next_one_on_its_way(pool, recompute):
    config = config_for("3", **{"model.tie_embeddings": False, "train.recompute": recompute})
    for most, filling, sizes, asked, units in pool.run(gathered, 2, config):
        assert most <= sum(sizes[-2:]) < sum(sizes) / 2
        # The weights of the unit that computes and of the next, its gradient, two sums under way and their two shares.
        assert most + filling <= (2 + 3 + 2 / 2) * sizes[-1]
        # Per micro-batch each unit is asked for forwards, and each but the embedding backwards: all but the first of a
        # forward, and of a backward the head's norm, are under way by then.
        assert len(asked) == 3 * (2 * units - 1) and asked.count(False) == 3 * 2


def test_rounded_to_bf16_it_stays_within_what_rounding_costs(pool):
    for stage in ("1", "2", "3"):
        row = {**next(row for row in WHOLE if row["mesh"] == "dp2-tp2"), "zero_stage": stage}
        outcome = check(pool, option_case(config_from({}), row, 2, "bf16"), 2, precision="bf16")
        assert outcome.passed, (stage, outcome)


def test_hybrid_groups_are_neighbours_and_strides():
    seen = [Mesh.build(dp=4, tp=2, cp=2, zero_size=4, rank=rank) for rank in range(16)]
    assert seen[5].group("shard").ranks == (1, 3, 5, 7) and seen[5].group("replicas").ranks == (5, 13)
    assert seen[5].group("shard").name == "shard"
    whole = Mesh.build(dp=4, tp=2, rank=3)
    assert whole.group("shard") == whole.group("dp_cp") and whole.group("replicas").size == 1


# --- memory --------------------------------------------------------------------------------------------------------


def counted_and_predicted(rank, world, config):
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts" / "bench"))
    import zero_memory

    _, got, want, *_ = zero_memory.measure(rank, world, config)
    return got, want


@pytest.mark.parametrize(("stage", "size", "precision", "published"), [
    (0, None, "bf16", 18), (1, None, "bf16", 6 + 12 / 4), (2, None, "bf16", 2 + 16 / 4), (3, None, "bf16", 18 / 4),
    (3, 2, "bf16", 18 / 2), (3, None, "fp32", 16 / 4)])
def test_bytes_kept_are_the_formulas(pool, stage, size, precision, published):
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts" / "bench"))
    import zero_memory

    config = zero_memory.config_of(stage, size, 64, 2, precision)
    elements = sum(b.numel for b in zero_memory.formulas(config, Mesh.build(dp=4, rank=0), zero_memory.VOCAB).buckets())
    for got, want in pool.run(counted_and_predicted, 4, config):
        assert got == want
        assert got.total == published * elements
