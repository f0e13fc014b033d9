"""A fault behind each tile, chunk and bucket size, and behind each thing that verify walks besides steps, is found."""

from contextlib import contextmanager
from dataclasses import fields, replace
from unittest import mock

import pytest
import torch

from megafour.config.load import config_from
from megafour.parallel.random import address, normal_rectangle
from megafour.sizes import PRODUCTION, TOY, Sizes
from megafour.verify.matrix import parse_mesh
from megafour.verify.run import check
from megafour.verify.shrink import other_cases, user_cases

MASKED, DROPPED = "dp2-cp2, masked", "pp2-tp2, dropout"


def default_case(mesh, **sections):
    """A row of `megafour verify` without arguments; MASKED and DROPPED are its last two."""
    config = config_from(sections)
    if mesh in (MASKED, DROPPED):
        return other_cases(config, 2)[(MASKED, DROPPED).index(mesh)]
    return user_cases(config, [parse_mesh(mesh)], 2, thorough=True)[0]


# --- what a loop does from its second round on ---------------------------------------------------------------------


@contextmanager
def second_chunk_takes_the_wrong_label_row():
    from megafour.parallel.tensor import cross_entropy as module

    count, forward, losses = [0], module._HeadLoss.forward, module._chunk_losses

    def head(ctx, *args):
        count[0] = 0
        return forward(ctx, *args)

    def chunk(logits, labels, first, group):
        count[0] += 1
        return losses(logits, labels if count[0] == 1 else labels.roll(1), first, group)

    with mock.patch.object(module._HeadLoss, "forward", staticmethod(head)), \
            mock.patch.object(module, "_chunk_losses", chunk):
        yield


@contextmanager
def second_chunk_leaves_the_weight_gradient_out():
    from megafour.parallel.tensor import cross_entropy as module

    with mock.patch.object(module, "add_mm_", lambda out, a, b: out):
        yield


@contextmanager
def second_tile_starts_from_the_wrong_row():
    from megafour.model import stage

    def shifted(seed, name, offset, size, tile_size):
        values = normal_rectangle(seed, name, offset, size, tile_size)
        if len(size) == 2:
            below = torch.arange(size[0]) + offset[0] >= tile_size
            values[below] = values[below].roll(1, 0)
        return values

    with mock.patch.object(stage, "normal_rectangle", shifted):
        yield


@contextmanager
def second_column_of_tiles_repeats_the_first():
    """Alike on every mesh, so that only the definition tells."""
    from megafour.parallel import random

    with mock.patch.object(random, "address", lambda *parts: address(*parts[:-1], 0)):
        yield


def joined(runs):
    """Neighbouring runs of rows as one."""
    found = []
    for begin, end in runs:
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return found


@contextmanager
def tiles_of_many_rows_lose_their_first_row():
    from megafour.parallel.context import mask

    real = mask._tiles
    with mock.patch.object(mask, "_tiles", lambda runs, low, high, samples, most: real(
            [(a + (b - a > most), b) for a, b in joined(runs)], low, high, samples, most)):
        yield


@contextmanager
def short_runs_that_share_a_tile_lose_the_last():
    from megafour.parallel.context import mask

    real = mask._tiles
    with mock.patch.object(mask, "_tiles", lambda runs, *rest: real(runs[:-1] if len(runs) > 1 else runs, *rest)):
        yield


@contextmanager
def second_query_block_draws_the_bits_of_the_first():
    from megafour.kernels import attention_plain

    real = attention_plain._keep
    with mock.patch.object(attention_plain, "_keep", lambda dropped, queries, end, like: real(
            dropped, slice(0, queries.stop - queries.start), end, like)):
        yield


@contextmanager
def third_bucket_is_halved():
    """Matrices and vectors are two buckets in any case."""
    from megafour.parallel.data.buckets import GradientBuckets

    real = GradientBuckets.finish_reduction

    def finish(self):
        real(self)
        for bucket in self.buckets[2:]:
            bucket.grad_shard.mul_(0.5)

    with mock.patch.object(GradientBuckets, "finish_reduction", finish):
        yield


@contextmanager
def shares_that_begin_within_a_row_are_not_saved():
    from megafour.checkpoint import tensors

    with mock.patch.object(tensors, "_in_row", lambda *_: []):
        yield


@contextmanager
def sums_that_land_early_are_forgotten():
    from megafour.parallel.data.reduction import Reduction

    real = Reduction._land

    def land(self):
        if len(self._flying) > self.in_flight:
            bucket, pending = self._flying.popleft()
            pending.wait()
            bucket.landed += 1
        else:
            real(self)

    with mock.patch.object(Reduction, "_land", land):
        yield


@contextmanager
def norm_leaves_out_whole_rows():
    from megafour.parallel.data import buckets

    real = buckets._squares
    with mock.patch.object(buckets, "_squares", lambda flat, row: real(flat[flat.numel() // row * row:], row)):
        yield


@contextmanager
def copies_beyond_the_limit_are_empty():
    from megafour.checkpoint.scratch import ScratchPlanner

    real = ScratchPlanner.resolve_data

    def resolve(self, item):
        found = real(self, item)
        return torch.zeros_like(found) if isinstance(found, torch.Tensor) and found.nbytes > self._most else found

    with mock.patch.object(ScratchPlanner, "resolve_data", resolve):
        yield


@contextmanager
def checksum_is_of_the_first_block():
    import zlib

    from megafour.checkpoint import store

    with mock.patch.object(store, "crc32", lambda path, size=1 << 22: zlib.crc32(path.read_bytes()[:size])):
        yield


# --- what only a walk beside the steps shows -----------------------------------------------------------------------


@contextmanager
def skipped_step_counts():
    from megafour.verify import walk

    real = walk.train_step

    def step(state, *args, **kwargs):
        result = real(state, *args, **kwargs)
        if not result.applied:
            state.optimizer.set_updates(state.optimizer.updates + 1)
        return result

    with mock.patch.object(walk, "train_step", step):
        yield


@contextmanager
def skipped_step_decays_the_moments():
    from megafour.verify import walk

    real = walk.train_step

    def step(state, *args, **kwargs):
        result = real(state, *args, **kwargs)
        if not result.applied:
            for kind, _, flat in state.optimizer.flat_states():
                flat.mul_(0.9 if kind == "exp_avg" else 1.0)
        return result

    with mock.patch.object(walk, "train_step", step):
        yield


@contextmanager
def copies_that_do_not_count_are_not_looked_at():
    """The replicated weights of the last tp rank are not finite, and only its own copy is."""
    from megafour.parallel.data import buckets

    real = buckets._merged
    with mock.patch.object(buckets, "_merged", lambda bucket, counted: real(bucket, counted) if counted else []):
        yield


@contextmanager
def evaluation_counts_one_dp_row():
    from megafour.trainer import step
    from megafour.verify import walk

    real = walk.evaluate_batch

    def count(batches, mesh):
        valid = torch.stack([(b.labels != step.IGNORE).sum() for b in batches]).sum()
        return int(step.control_sum(valid, mesh, "cp"))

    def evaluate(state, batches):
        with mock.patch.object(step, "count_valid_tokens", count):
            return real(state, batches)

    with mock.patch.object(walk, "evaluate_batch", evaluate):
        yield


@contextmanager
def resumed_without_the_count():
    from megafour.optim.optimizer import ShardedOptimizer

    with mock.patch.object(ShardedOptimizer, "set_updates", lambda self, count: None):
        yield


@contextmanager
def saved_columns_are_swapped():
    """Rectangles of a matrix that tp cuts along its columns are saved one to the right."""
    from megafour.trainer import saving

    real = saving.shard_parts

    def parts(bucket, flat):
        for name, shape, primary, held in real(bucket, flat):
            if name.endswith("wo.weight"):
                held = [(offset, size, tensor.flip(0)) for offset, size, tensor in held]
            yield name, shape, primary, held

    with mock.patch.object(saving, "shard_parts", parts):
        yield


@contextmanager
def generation_is_one_position_behind():
    from megafour.inference import generate

    real = generate.next_token_logits
    with mock.patch.object(generate, "next_token_logits", lambda stage, tokens: real(stage, tokens[:-1])):
        yield


ZERO2 = {"parallel": {"zero_stage": 2}}
SAID = {    # what is said instead of a deviation
    skipped_step_counts: "changed AdamW's count of updates",
    skipped_step_decays_the_moments: "changed exp_avg",
    copies_that_do_not_count_are_not_looked_at: "was applied",
    norm_leaves_out_whole_rows: "was applied",
    resumed_without_the_count: "resumed on dp1: rank 0: AdamW counts 0 updates after 2",
    shares_that_begin_within_a_row_are_not_saved: "CheckpointError",
    checksum_is_of_the_first_block: "has the checksum",
}
SLOWER = (skipped_step_decays_the_moments, saved_columns_are_swapped, second_chunk_leaves_the_weight_gradient_out,
          short_runs_that_share_a_tile_lose_the_last)
"""Of a kind with another: with --all."""
FAULTS = [    # fault, a row of the default `megafour verify` that finds it, sections of the config, the sizes behind it
    (second_chunk_takes_the_wrong_label_row, "dp2", {}, ("head_tokens",)),
    (second_tile_starts_from_the_wrong_row, "tp2", {}, ("init_tile",)),
    (tiles_of_many_rows_lose_their_first_row, MASKED, {}, ("mask_rows",)),
    (skipped_step_counts, "dp2", {}, ()),
    (evaluation_counts_one_dp_row, "dp2", {}, ()),
    (short_runs_that_share_a_tile_lose_the_last, MASKED, {}, ("short_run",)),
    (second_query_block_draws_the_bits_of_the_first, DROPPED, {}, ("query_block",)),
    (second_chunk_leaves_the_weight_gradient_out, "tp2", {}, ("head_logits",)),
    (second_column_of_tiles_repeats_the_first, "dp2", {}, ("init_tile",)),
    (third_bucket_is_halved, "dp2", {}, ("bucket_bytes",)),
    (shares_that_begin_within_a_row_are_not_saved, "dp2", {}, ("share_unit",)),
    (sums_that_land_early_are_forgotten, "dp2", ZERO2, ("in_flight",)),
    (norm_leaves_out_whole_rows, "dp2", {}, ("norm_row",)),
    (copies_beyond_the_limit_are_empty, "dp2", {}, ("save_copies",)),
    (checksum_is_of_the_first_block, "dp2", {}, ("checksum_block",)),
    (skipped_step_decays_the_moments, "dp2", {}, ()),
    (copies_that_do_not_count_are_not_looked_at, "tp2", {}, ()),
    (resumed_without_the_count, "dp2", {}, ()),
    (saved_columns_are_swapped, "tp2", {}, ()),
    (generation_is_one_position_behind, "dp2", {}, ()),
]


@pytest.mark.parametrize(("fault", "mesh", "sections"), [
    pytest.param(*row[:3], id=row[0].__name__, marks=[pytest.mark.full] if row[0] in SLOWER else []) for row in FAULTS])
def test_the_default_verify_finds(pool, fault, mesh, sections):
    outcome = check(pool, default_case(mesh, **sections), 2, plant=fault)
    assert not outcome.passed
    assert SAID.get(fault, "") in (outcome.error or "") and (fault in SAID) == (outcome.error is not None), outcome


@pytest.mark.parametrize(("mesh", "sections"), [("dp2", {}), ("tp2", {}), ("dp2", ZERO2), (MASKED, {}), (DROPPED, {})])
def test_the_same_row_without_a_fault_passes(pool, mesh, sections):
    outcome = check(pool, default_case(mesh, **sections), 2)
    assert outcome.passed, outcome
    assert outcome.generation == 0.0 and outcome.evaluation is not None and outcome.moments is not None


def test_every_size_has_a_fault():
    assert {field.name for field in fields(Sizes)} == {name for *_, sizes in FAULTS for name in sizes}


ALWAYS = (short_runs_that_share_a_tile_lose_the_last, second_column_of_tiles_repeats_the_first,
          sums_that_land_early_are_forgotten)
"""Found at the sizes of training too."""


@pytest.mark.full
@pytest.mark.parametrize("fault", [f for f in FAULTS if f[3] and f[0] not in ALWAYS], ids=lambda f: f[0].__name__)
def test_with_the_sizes_of_training_the_toy_never_gets_there(pool, fault):
    """So that the faults above show what the small sizes are for."""
    plant, mesh, sections, sizes = fault
    named = (*sizes, "head_tokens", "head_logits") if "head" in sizes[0] else sizes
    case = default_case(mesh, **sections)
    case = replace(case, sizes=replace(TOY, **{name: getattr(PRODUCTION, name) for name in named}))
    outcome = check(pool, case, 2, plant=plant)
    assert outcome.passed, outcome
