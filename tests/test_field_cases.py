"""Failures met across meshes, on a tiny model: sums and not means, one clip, labels, K/V replicas, dropout, weights."""

from __future__ import annotations

import hashlib
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from megafour.config.errors import ConfigError
from megafour.config.load import config_from
from megafour.config.rules import resolve
from megafour.data.batch import MicroBatch, collate
from megafour.model.decoder import Block
from megafour.parallel.context.ring import RingAttention
from megafour.parallel.pieces import named_pieces
from megafour.parallel.random import DropoutAddress, hidden_dropout
from megafour.trainer.setup import build_mesh, build_state
from megafour.trainer.step import count_valid_tokens, train_step
from tests.training import MODEL

SEQ, BATCH = 16, 8


def state_of(world: int, parallel: dict[str, Any], **sections: Any) -> Any:
    """A training state of M0 with SGD, in fp64."""
    values: dict[str, Any] = {
        "model": dict(MODEL), "parallel": parallel, "data": {"seq_length": SEQ}, "optimizer": {"name": "sgd"},
        "train": {"precision": "fp64", "global_batch_size": BATCH}}
    for name, section in sections.items():
        values[name] = {**values[name], **section}
    config = resolve(config_from(values), world, data=False)
    return build_state(config, build_mesh(config, torch.device("cpu")), 64)


def batches_of(state: Any, step: int = 0, valid: list[int] | None = None, size: int = 1) -> list[MicroBatch]:
    """This rank's micro-batches of 8 random samples; sample i trains its first `valid[i]` tokens only."""
    rows = np.random.default_rng(step).integers(0, 64, (BATCH, SEQ + 1))
    if valid is not None:
        for row, count in zip(rows, valid, strict=True):
            row[count + 1:] = -1
    group = state.mesh.group("dp")
    per = BATCH // group.size
    return [collate(rows[i:i + size], torch.arange(i, i + size), state.stage.build.positions)
            for i in range(group.rank * per, (group.rank + 1) * per, size)]


def gradients(state: Any) -> dict[str, list]:
    """(offset, values) of this rank's pieces by name, after all reductions of a step without ZeRO."""
    return {piece.name: [piece.offset, param.main_grad()[piece.rows].tolist()]
            for param, piece in named_pieces(state.stage)}


def one_step(rank: int, world: int, parallel: dict[str, Any], valid: list[int] | None = None,
             sections: dict[str, Any] | None = None, steps: int = 1) -> dict[str, Any]:
    """Loss, norms, gradients before clipping of the first step, weights after the last."""
    state = state_of(world, {"zero_stage": 0, **parallel}, **(sections or {}))
    seen: list[dict[str, list]] = []
    results = [train_step(state, batches_of(state, s, valid), s, 0.5, observe=lambda *_: seen.append(gradients(state)))
               for s in range(steps)]
    weights = {piece.name: [piece.offset, param.detach()[piece.rows].tolist()]
               for param, piece in named_pieces(state.stage)}
    return {"loss": [r.loss for r in results], "norm": [r.grad_norm for r in results], "grads": seen[0],
            "weights": weights, "tp": state.mesh.group("tp").rank}


def close(got: list, want: list, floor: float = 1e-9) -> bool:
    """Whether a held piece equals its place in the whole tensor, 1e-9 of its largest value."""
    (offset, values), whole = got, torch.tensor(want[1], dtype=torch.float64)
    part = torch.tensor(values, dtype=torch.float64)
    place = tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))
    return float((part - whole[place]).abs().max()) <= 1e-9 * max(float(whole.abs().max()), floor)


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"tp": 4}, {"tp": 2, "pp": 2}, {"tp": 4, "sequence_parallel": False}])
def test_a1_replicated_weights_get_the_sum(pool, parallel) -> None:
    """Norms (q/k norms and the final one too) and row-parallel biases; equal to a byte across tp ranks."""
    sections = {"model": {"qk_norm": True, "linear_bias": True, "qkv_bias": True}}
    reference = pool.run(one_step, 1, {"dp": 1}, None, sections)[0]
    results = pool.run(one_step, parallel["tp"] * parallel.get("pp", 1), parallel, None, sections)
    for result in results:
        assert all(close(got, reference["grads"][name]) for name, got in result["grads"].items())
    for name in reference["grads"]:
        if "norm" in name or name.endswith(("wo.bias", "down.bias")):
            copies = [r["grads"][name][1] for r in results if name in r["grads"]]
            assert len(copies) == parallel["tp"] and all(copy == copies[0] for copy in copies), name


def test_a3_one_clip_for_the_whole_model(pool) -> None:
    sections = {"train": {"grad_clip": 0.1}}
    reference = pool.run(one_step, 1, {"dp": 1}, None, sections, 3)[0]
    assert min(reference["norm"]) > 0.1
    for result in pool.run(one_step, 2, {"pp": 2}, None, sections, 3):
        assert result["norm"] == pytest.approx(reference["norm"], rel=1e-12)
        assert all(close(got, reference["weights"][name]) for name, got in result["weights"].items())


VALID = [1, 5, 16, 9, 0, 0, 3, 2]


@pytest.mark.parametrize("parallel", [{"dp": 4}, {"dp": 2}, {"pp": 2}, {"cp": 2}, {"dp": 2, "cp": 2, "tp": 2}])
def test_a5_loss_is_a_sum_over_all_valid_tokens(pool, parallel) -> None:
    """Uneven counts; with dp 4 a rank has no trained token at all."""
    world = parallel.get("dp", 1) * parallel.get("pp", 1) * parallel.get("cp", 1) * parallel.get("tp", 1)
    reference = pool.run(one_step, 1, {"dp": 1}, VALID)[0]
    for result in pool.run(one_step, world, parallel, VALID):
        assert result["loss"] == pytest.approx(reference["loss"], rel=1e-12)
        assert all(close(got, reference["grads"][name]) for name, got in result["grads"].items())


def counted(rank: int, world: int, parallel: dict[str, Any]) -> int:
    state = state_of(world, parallel)
    return count_valid_tokens(batches_of(state), state.mesh)


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_a8_no_label_is_lost_at_a_boundary(pool, cp) -> None:
    assert pool.run(counted, cp, {"cp": cp}) == [SEQ * BATCH] * cp


def test_a12_more_tp_ranks_than_kv_heads(pool) -> None:
    """4 query and 2 K/V heads on tp 4: replicas hold the same summed gradient; 6 and 3 heads on tp 2 are refused."""
    reference = pool.run(one_step, 1, {"dp": 1})[0]
    results = pool.run(one_step, 4, {"tp": 4})
    for name in ("layers.0.attention.wk.weight", "layers.3.attention.wv.weight"):
        held = [r["grads"][name] for r in results]
        assert held[0] == held[1] and held[2] == held[3] and held[0] != held[2]
        assert all(close(got, reference["grads"][name]) for got in held)
    with pytest.raises(ConfigError, match="3"):
        resolve(config_from({"model": {**MODEL, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3},
                             "parallel": {"tp": 2}}), 2, data=False)


def masks(rank: int, world: int, parallel: dict[str, Any]) -> str:
    """Hash of the dropout bits on ones, for the tokens that this rank's residual stream holds."""
    state = state_of(world, parallel)
    batch = batches_of(state)[0]
    passed = state.stage.make_pass(batch, step=0, train=True)
    where = passed.hidden(0)
    assert isinstance(where, DropoutAddress)
    out = hidden_dropout(torch.ones(len(passed.tokens), 1, 512), 0.5, where, "mlp")
    share = float((out > 0).double().mean())
    assert abs(share - 0.5) < 0.05 and set(out.unique().tolist()) == {0.0, 2.0}
    return hashlib.sha256(out.numpy().tobytes()).hexdigest()


@pytest.mark.parametrize(("parallel", "alike"), [
    ({"tp": 2}, False), ({"tp": 2, "sequence_parallel": False}, True), ({"dp": 2}, False), ({"cp": 2}, False)])
def test_a14_dropout_differs_where_activations_do(pool, parallel, alike) -> None:
    first, second = pool.run(masks, 2, parallel)
    assert (first == second) is alike


def test_a15_gradients_accumulate_in_fp32() -> None:
    """1.0, then 255 times 2^-9: 1.498046875; bf16 would stay at 1.0."""
    from megafour.architecture.pieces import Piece
    from megafour.comm.group import solo
    from megafour.parallel.data.buckets import GradientBuckets
    from megafour.parallel.pieces import set_pieces

    param = set_pieces(torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16)), [Piece("w", (1,), (0,), (1,))])
    GradientBuckets([param], solo("dp_cp"), zero_stage=0, accumulate=torch.float32)
    for value in [1.0] + [2.0**-9] * 255:
        (param * value).sum().backward()
    assert float(param.main_grad()) == 1.498046875


def test_the_gradient_norm_of_a_large_share_is_exact() -> None:
    """Ten million fp32 elements added up one after the other lose 4e-4, and a cut of them into other shares less."""
    from megafour.architecture.pieces import Piece
    from megafour.comm.group import solo
    from megafour.parallel.data.buckets import GradientBuckets, squared_norm
    from megafour.parallel.pieces import set_pieces

    size = 10_000_019    # divides by no power of two
    param = set_pieces(torch.nn.Parameter(torch.zeros(size)), [Piece("w", (size,), (0,), (size,))])
    buckets = GradientBuckets([param], solo("dp_cp"), zero_stage=0, accumulate=torch.float32)
    param.main_grad().normal_(generator=torch.Generator().manual_seed(0))
    exact = float(param.main_grad().double().square().sum())
    assert abs(float(squared_norm(buckets.buckets)) / exact - 1) < 1e-6


def first_weights(rank: int, world: int, parallel: dict[str, Any]) -> dict[str, list]:
    state = state_of(world, parallel)
    return {piece.name: [piece.offset, param.detach()[piece.rows].tolist()]
            for param, piece in named_pieces(state.stage)}


@pytest.mark.parametrize("parallel", [
    {"tp": 2}, {"tp": 4}, {"pp": 2}, {"pp": 4}, {"cp": 2}, {"dp": 2, "zero_stage": 1}])
def test_a17_first_weights_depend_on_the_seed_alone(pool, parallel) -> None:
    world = max(parallel[axis] for axis in ("tp", "pp", "cp", "dp") if axis in parallel)
    whole = pool.run(first_weights, 1, {"dp": 1})[0]
    assert whole["layers.0.mlp.up.weight"][1] != whole["layers.1.mlp.up.weight"][1]
    for held in pool.run(first_weights, world, parallel):
        for name, (offset, values) in held.items():
            part = torch.tensor(values)
            place = tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))
            assert part.equal(torch.tensor(whole[name][1])[place]), name


def test_f2_recomputation_saves_less_and_repeats_only_what_it_was_asked_to() -> None:
    def step_of(recompute: str) -> tuple[int, int, int]:
        """Bytes of activations that a forward saves, calls of layers and of their attention in forward and backward."""
        state, saved = state_of(1, {}, train={"recompute": recompute}), {}
        batch, = batches_of(state, size=BATCH)
        weights = {param.data_ptr() for param in state.stage.parameters()}

        def keep(x: torch.Tensor) -> torch.Tensor:
            if x.data_ptr() not in weights:
                saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with (mock.patch.object(Block, "forward", autospec=True, side_effect=Block.forward) as layers,
              mock.patch.object(RingAttention, "__call__", autospec=True, side_effect=RingAttention.__call__) as cores):
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                loss = state.stage(batch, None, torch.tensor(1.0), step=0, train=True)
            loss.backward()
        return sum(saved.values()), layers.call_count, cores.call_count

    none, selective, full = map(step_of, ("none", "selective", "full"))
    assert none[1:] == (4, 4) and selective[1:] == (4, 8) and full[1:] == (8, 8)
    assert full[0] < none[0] / 4 and selective[0] < none[0]
