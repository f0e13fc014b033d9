"""Whole runs: killed and resumed on other meshes, one line a step, skipped steps, recompute, evaluation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from megafour.data.indexed import IndexedWriter
from megafour.trainer import loop
from megafour.trainer.scaler import LossScaler
from tests import training
from tests.training import losses, metrics, settings, write_corpus

FULL = {"dp": 2, "pp": 2, "tp": 2, "cp": 2}


def world(parallel: dict[str, Any]) -> int:
    return math.prod(parallel.get(axis, 1) for axis in ("dp", "pp", "tp", "cp"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "corpus")
    return tmp_path


@pytest.fixture(scope="module")
def uninterrupted(pool, tmp_path_factory) -> dict[int, float]:
    """Losses of 12 steps of one process in fp64."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    write_corpus(folder / "corpus")
    assert pool.run(training.train, 1, settings(folder, {"dp": 1})) == [0]
    return losses(folder)


@pytest.mark.parametrize(("first", "second"), [
    ({"dp": 1}, FULL), pytest.param(FULL, {"dp": 1}, marks=pytest.mark.full),
    ({"tp": 2, "pp": 2}, {"dp": 2, "zero_stage": 1}),
    pytest.param({"dp": 2, "zero_stage": 1, "cp": 2}, {"tp": 4}, marks=pytest.mark.full),
    pytest.param({"pp": 4}, {"cp": 4}, marks=pytest.mark.full),
    ({"dp": 4, "zero_stage": 1}, {"dp": 2, "zero_stage": 0})])
def test_resumes_on_another_mesh(pool, folder, uninterrupted, first, second) -> None:
    """Killed after step 7 (saved) of 12: the rest equals the uninterrupted run, and no step is lost or doubled."""
    assert set(pool.run(training.train, world(first), settings(folder, first), 8)) == {-9}
    assert set(pool.run(training.train, world(second), settings(folder, second, train={"micro_batch_size": 2}))) == {0}
    got = losses(folder)
    assert [line["step"] for line in metrics(folder)] == list(range(1, 13))
    for step, loss in uninterrupted.items():
        assert abs(got[step] - loss) <= 1e-9 * loss, step


@pytest.mark.parametrize("died", [4, 5, *(pytest.param(n, marks=pytest.mark.full) for n in (6, 10))])
def test_resumes_within_and_at_the_end_of_an_epoch(pool, tmp_path, died) -> None:
    """In a whole run with threads that read ahead: an epoch is five steps, and each has an order of its own."""
    seen = []
    for name in ("whole", "cut"):
        place = tmp_path / name
        place.mkdir()
        with IndexedWriter(place / "corpus", 64) as writer:
            writer.add(np.random.default_rng(0).integers(0, 64, 40 * 16 + 1))
        values = settings(place, {"dp": 2}, data={"workers": 1}, checkpoint={"every": 1},
                          train={"steps": 12, "precision": "fp32"})
        if name == "cut":
            assert pool.run(training.train, 2, values, died) == [-9, -9]
        assert pool.run(training.train, 2, values) == [0, 0]
        seen.append(losses(place))
    assert seen[0] == seen[1] and list(seen[0]) == list(range(1, 13))


def test_resumes_across_schedules_virtual_stages_and_methods(pool, tmp_path) -> None:
    """A tied embedding on one rank of a V goes on as two copies on a loop; packed documents, ring to Ulysses."""
    first = {"pp": 2, "cp": 2, "pipeline": {"schedule": "zb_v"}}
    second = {"pp": 2, "cp": 2, "context": {"method": "ulysses", "layout": "striped"},
              "pipeline": {"schedule": "interleaved_1f1b", "virtual_stages": 2}}
    more = {"model": {"tie_embeddings": True}, "data": {"document_mask": True}}
    for name in ("whole", "moved"):
        (tmp_path / name).mkdir()
        write_corpus(tmp_path / name / "corpus")
    assert pool.run(training.train, 1, settings(tmp_path / "whole", {"dp": 1}, **more)) == [0]
    assert set(pool.run(training.train, 4, settings(tmp_path / "moved", first, **more), 8)) == {-9}
    assert set(pool.run(training.train, 4, settings(tmp_path / "moved", second, **more))) == {0}
    whole, moved = losses(tmp_path / "whole"), losses(tmp_path / "moved")
    assert sorted(moved) == list(range(1, 13))
    assert all(abs(moved[step] - loss) <= 1e-9 * loss for step, loss in whole.items())


@pytest.mark.parametrize("precision", ["bf16", *(
    pytest.param(name, marks=pytest.mark.full) for name in ("fp64", "fp32", "fp16"))])
def test_resumes_bit_equal_on_the_same_mesh(pool, tmp_path, precision) -> None:
    mesh, runs = {"dp": 2, "tp": 2, "zero_stage": 1}, []
    for name, kills in (("whole", [None]), ("killed", [9, None])):
        place = tmp_path / name
        place.mkdir()
        write_corpus(place / "corpus")
        for die_after in kills:
            pool.run(training.train, 4, settings(place, mesh, train={"precision": precision}), die_after)
        runs.append([(line["loss"], line["grad_norm"], line["skipped_steps"]) for line in metrics(place)])
    assert len(runs[0]) == 12 and runs[0] == runs[1]


@pytest.mark.parametrize("parallel", [
    {"tp": 2, "pp": 2}, pytest.param({"dp": 2, "cp": 2, "zero_stage": 1}, marks=pytest.mark.full)])
def test_fp16_trains_alike_on_every_mesh(pool, tmp_path, parallel) -> None:
    """The loss scale passes the pipeline, the shards and the sums over ranks, and shows in no number."""
    runs = []
    for name, mesh in (("one", {"dp": 1}), ("mesh", parallel)):
        (tmp_path / name).mkdir()
        write_corpus(tmp_path / name / "corpus")
        values = settings(tmp_path / name, mesh, train={"precision": "fp16", "steps": 6}, optimizer={"lr": 1e-3})
        assert set(pool.run(training.train, world(mesh), values)) == {0}
        runs.append(metrics(tmp_path / name))
    for one, other in zip(*runs, strict=True):
        assert one["skipped_steps"] == other["skipped_steps"] == 0
        assert other["loss"] == pytest.approx(one["loss"], rel=2e-3)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-2)


def train_from_scale(rank: int, ranks: int, values: dict[str, Any], scale: float) -> int:
    """`training.train` whose loss scale starts at `scale`."""
    with mock.patch.object(LossScaler, "for_precision", lambda precision: LossScaler(dynamic=True, scale=scale)):
        return training.train(rank, ranks, values)


def test_fp16_overflow_is_skipped_on_every_rank_until_the_scale_fits(pool, folder) -> None:
    values = settings(folder, {"dp": 2, "tp": 2}, train={"precision": "fp16"}, optimizer={"lr": 1e-3})
    assert set(pool.run(train_from_scale, 4, values, 2.0**26)) == {0}
    lines = metrics(folder)
    skipped = [line["skipped_steps"] for line in lines]
    assert 2 <= skipped[-1] <= 8 and skipped == [min(step + 1, skipped[-1]) for step in range(12)]
    assert all(line["grad_norm"] is None for line in lines[: skipped[-1]])
    assert all(math.isfinite(line["grad_norm"]) for line in lines[skipped[-1] :])
    assert lines[skipped[-1]]["loss"] == pytest.approx(lines[0]["loss"], rel=0.1) and lines[-1]["loss"] < 4.2


def test_the_last_step_is_saved_in_the_run_that_took_it_over(pool, folder) -> None:
    """checkpoint.resume names another run's last checkpoint: there is nothing to train, and this run is whole too."""
    assert pool.run(training.train, 1, settings(folder, {"dp": 1}, train={"steps": 2})) == [0]
    other = settings(folder, {"dp": 1}, train={"steps": 2}, run={"dir": str(folder / "other")},
                     checkpoint={"resume": str(folder / "run")})
    assert pool.run(training.train, 1, other) == [0]
    assert (folder / "other" / "checkpoints" / "step-00000002" / "manifest.json").is_file()


@pytest.mark.parametrize("parallel", [{"dp": 1}, {"pp": 2}, {"cp": 2},
                                      pytest.param({"dp": 2, "pp": 2, "tp": 2}, marks=pytest.mark.full)])
def test_one_true_line_a_step(pool, folder, uninterrupted, parallel) -> None:
    """One line a step, with the global loss, and tokens = step · batch · seq."""
    pool.run(training.train, world(parallel), settings(folder, parallel))
    lines = metrics(folder)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert all(line["consumed_tokens"] == line["step"] * 8 * 16 for line in lines)
    assert all(abs(line["loss"] - uninterrupted[line["step"]]) <= 1e-9 * line["loss"] for line in lines)


def poisoned(rank: int, size: int, values: dict[str, Any], value: float, steps: list[int]) -> list[Any]:
    """Train with a gradient of `value` on the last rank at `steps`; per step: applied, and whether nothing changed."""
    original, seen = loop.train_step, []

    def checksum(state: Any) -> list[float]:
        flat = [t for _, _, t in state.optimizer.flat_states()] + [b.weights for b in state.buckets.buckets]
        return [float(t.double().sum()) for t in flat] + [state.optimizer.updates]

    def step_with_poison(state: Any, batches: Any, step: int, *rest: Any) -> Any:
        hook = None
        if rank == size - 1 and step + 1 in steps:
            param = next(p for p in state.stage.parameters() if p.dim() == 1)
            hook = param.register_hook(lambda grad: torch.full_like(grad, value))
        before = checksum(state)
        result = original(state, batches, step, *rest)
        if hook is not None:
            hook.remove()
        seen.append((step + 1, result.applied, before == checksum(state)))
        return result

    loop.train_step = step_with_poison
    try:
        return [training.train(rank, size, values), seen]
    finally:
        loop.train_step = original


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_gradient_on_one_rank_skips_the_step_everywhere(pool, folder, value) -> None:
    """Weights, moments and counter untouched on all ranks, counted once, data moves on."""
    values = settings(folder, {"dp": 2, "pp": 2}, train={"steps": 4})
    results = pool.run(poisoned, 4, values, value, [3])
    for code, seen in results:
        assert code == 0
        assert [(applied, unchanged) for _, applied, unchanged in seen] == [
            (True, False), (True, False), (False, True), (True, False)]
    lines = metrics(folder)
    assert [line["skipped_steps"] for line in lines] == [0, 0, 1, 1]
    assert lines[2]["grad_norm"] is None and math.isfinite(lines[3]["loss"])
    assert lines[3]["consumed_samples"] == 32
    log = (folder / "run" / "logs" / "rank-0.log").read_text()
    assert "step 3 skipped" in log


def puzzled(rank: int, size: int, values: dict[str, Any], value: float, recurs: bool) -> int:
    """Train; in the second step a gradient has that value on every rank, also when it is computed again if `recurs`."""
    original = loop.train_step

    def step_with_poison(state: Any, batches: Any, step: int, *rest: Any) -> Any:
        if step == 1:
            param = next(p for p in state.stage.parameters() if p.dim() == 1)
            hook = param.register_hook(lambda grad: torch.full_like(grad, value))
        result = original(state, batches, step, *rest)
        if step == 1 and not recurs:
            hook.remove()
        return result

    loop.train_step = step_with_poison
    try:
        return training.train(rank, size, values)
    finally:
        loop.train_step = original


@pytest.mark.parametrize(("dp", "value", "recurs", "said"), [
    (1, math.nan, False, "it did not recur when the step was computed again"),
    (2, math.nan, False, "it did not recur when the step was computed again"),
    (2, 2e38, True, "not finite in the sum over ranks only, where it overflows"),
    (1, 2e38, True, "not finite in the sum over micro-batches only, where it overflows"),
    (1, math.nan, True, "gradient of ")])
def test_a_skipped_step_says_no_more_than_what_is_known(pool, folder, dp, value, recurs, said) -> None:
    values = settings(folder, {"dp": dp}, train={"steps": 2, "micro_batch_size": 4, "precision": "fp32"})
    assert pool.run(puzzled, dp, values, value, recurs) == [0] * dp
    log = (folder / "run" / "logs" / "rank-0.log").read_text()
    line = next(line for line in log.splitlines() if "step 2 skipped" in line)
    assert line.partition("gradient norm ")[2].partition("; ")[2].startswith(said), line


def test_stops_after_too_many_skipped_steps(pool, folder) -> None:
    values = settings(folder, {"dp": 2}, train={"max_skipped_steps": 3})
    assert [code for code, _ in pool.run(poisoned, 2, values, math.nan, list(range(2, 13)))] == [1, 1]
    assert len(metrics(folder)) in (3, 4)


@pytest.mark.parametrize("parallel", [
    pytest.param({"dp": 1}, marks=pytest.mark.full), pytest.param({"tp": 2}, marks=pytest.mark.full), {"pp": 2}])
def test_recompute_changes_no_bit(pool, tmp_path, parallel) -> None:
    """With dropout on, losses are bit-equal whatever is recomputed."""
    seen = []
    for recompute in ("none", "selective", "full"):
        place = tmp_path / recompute
        place.mkdir()
        write_corpus(place / "corpus")
        values = settings(place, {**parallel, "pipeline": {"partition": [2, 2]}} if "pp" in parallel else parallel,
                          model={"hidden_dropout": 0.3, "attention_dropout": 0.3},
                          train={"steps": 10, "recompute": recompute, "precision": "fp32"})
        pool.run(training.train, world(parallel), values)
        seen.append([(line["loss"], line["grad_norm"]) for line in metrics(place)])
    assert len(seen[0]) == 10 and seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("parallel", [
    {"dp": 1}, pytest.param({"dp": 2, "pp": 2, "tp": 2}, marks=pytest.mark.full),
    pytest.param({"cp": 2}, marks=pytest.mark.full),
    {"pp": 2, "pipeline": {"schedule": "interleaved_1f1b", "virtual_stages": 2}}])
def test_evaluation_changes_nothing(pool, tmp_path, parallel) -> None:
    """Training losses are bit-equal with and without it; the validation loss is the same on every mesh."""
    runs = []
    for every in (0, 3):
        place = tmp_path / str(every)
        place.mkdir()
        write_corpus(place / "corpus")
        write_corpus(place / "valid", documents=3, seed=1)
        valid = {"valid": {"held": [{"path": str(place / "valid")}]}}
        pool.run(training.train, world(parallel), settings(
            place, parallel, data=valid, eval={"every": every}, model={"hidden_dropout": 0.1},
            optimizer={"name": "sgd", "lr": 1e-3}))
        runs.append(metrics(place))
    plain, evaluated = runs
    assert [line["loss"] for line in plain] == [line["loss"] for line in evaluated]
    held = [line["valid_loss/held"] for line in evaluated if "valid_loss/held" in line]
    assert len(held) == 4 and all(abs(loss - math.log(64)) < 0.2 for loss in held)


def test_the_validation_loss_is_the_same_on_every_mesh(pool, tmp_path) -> None:
    """A set whose last window is short and whose windows leave some rows, micro-batches and dp ranks empty."""
    found = {}
    for mesh in ({"dp": 1}, {"dp": 4}, {"pp": 2, "cp": 2}):
        place = tmp_path / "-".join(f"{axis}{size}" for axis, size in mesh.items())
        place.mkdir()
        write_corpus(place / "corpus")
        with IndexedWriter(place / "valid", 64) as writer:
            writer.add(np.random.default_rng(1).integers(0, 64, 9 * 16 + 6))
        values = settings(place, mesh, data={"valid": {"held": [{"path": str(place / "valid")}]}}, eval={"every": 1},
                          train={"steps": 1}, model={"init_std": 0.2})
        assert set(pool.run(training.train, world(mesh), values)) == {0}
        found[place.name] = metrics(place)[0]["valid_loss/held"]
    for name, loss in found.items():
        assert abs(loss - found["dp1"]) <= 1e-9 * loss, name


def test_the_first_adam_update_is_a_whole_one() -> None:
    """w=1, g=0.5, lr=0.1, no decay -> 0.9 after one step (a dummy step before would give 0.9265)."""
    from megafour.architecture.pieces import Piece
    from megafour.comm.group import solo
    from megafour.config.schema import OptimizerConfig
    from megafour.optim.optimizer import ShardedOptimizer
    from megafour.parallel.data.buckets import GradientBuckets
    from megafour.parallel.pieces import set_pieces

    param = set_pieces(torch.nn.Parameter(torch.ones(1)), [Piece("w", (1,), (0,), (1,))])
    buckets = GradientBuckets([param], solo("dp_cp"), zero_stage=0, accumulate=torch.float32)
    optimizer = ShardedOptimizer(OptimizerConfig(weight_decay=0.0), buckets)
    param.main_grad().fill_(0.5)
    optimizer.step(0.1, 1.0)
    assert float(param.detach()) == pytest.approx(0.9, abs=1e-6)
