"""A kind of layer that only this file knows: it trains on a 4D mesh, its bytes are predicted, stages are balanced."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megafour.architecture.model import KINDS, Architecture
from megafour.architecture.sublayer import Collective, Flops, Sublayer
from megafour.architecture.weights import ParameterSpec, Split, TensorParallel, Weight
from megafour.comm import primitives
from megafour.comm.group import Group
from megafour.config.load import config_from
from megafour.config.model_schema import ModelConfig
from megafour.cost.memory import activation_bytes
from megafour.inference.inspection import checkpoint_lines
from megafour.mesh import Mesh
from megafour.model.build import Build, Pass
from megafour.model.decoder import BUILDERS
from megafour.model.stage import build_stage
from megafour.parallel.grads import has_main_grad, weight_grad
from megafour.parallel.pipeline.partition import loads, partition_layers
from megafour.parallel.pipeline.select import pipeline_of
from megafour.verify.compare import TOLERANCES
from megafour.verify.matrix import parse_mesh
from megafour.verify.run import Outcome, summarise, what_is_missing
from megafour.verify.shrink import user_cases
from megafour.verify.walk import Walk, mesh_rank, reference_rank
from tests.test_architecture import check_described
from tests.test_pipeline_partition import price, prices
from tests.test_traffic import LLAMA, VOCAB, config_of, whole_step
from tests.training import settings, train, write_corpus

UNITS = 512


@dataclass(frozen=True)
class GateSpec(Sublayer):
    """x · mean(sigmoid(W x)) for each token, the input features of W split over tp; in the first layer only."""

    layer: int
    hidden: int

    @classmethod
    def of(cls, model: ModelConfig, layer: int) -> GateSpec | None:
        return cls(layer, model.hidden_size) if layer == 0 else None

    @property
    def weight(self) -> ParameterSpec:
        return ParameterSpec((Weight(f"layers.{self.layer}.gate.weight", (UNITS, self.hidden),
                                     Split(1, self.hidden), std=0.1),))

    def parameters(self) -> tuple[ParameterSpec, ...]:
        return (self.weight,)

    def flops(self, seq_length: int) -> Flops:
        return Flops(6 * self.count + 6 * self.hidden)

    def saved(self, at: TensorParallel, recompute: str) -> int:
        return at.residual(self.hidden + UNITS)

    def collectives(self, at: TensorParallel, recompute: str) -> tuple[Collective, ...]:
        """One sum of W x in the forward, one of the gradient of x in the backward; the parts under sequence
        parallelism."""
        forward, hidden = 2 if recompute == "full" else 1, self.hidden
        if not at.sequence_parallel:
            return Collective("all_reduce", forward, forward * UNITS), Collective("all_reduce", 1, hidden)
        return (Collective("all_gather", forward + 1, forward * hidden + UNITS),
                Collective("reduce_scatter", forward + 1, forward * UNITS + hidden))


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, group: Group, sp: bool) -> Tensor:
        mine = (primitives.all_gather(x, group) if sp else x).chunk(group.size, -1)[group.rank]
        gates = torch.sigmoid((primitives.reduce_scatter if sp else primitives.all_reduce)(mine @ weight.t(), group))
        ctx.save_for_backward(x, mine, gates)
        ctx.weight, ctx.group, ctx.sp = weight, group, sp
        return x * gates.mean(-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, mine, gates = ctx.saved_tensors
        inner = (grad * x).sum(-1, keepdim=True) / UNITS * gates * (1 - gates)
        inner = primitives.all_gather(inner, ctx.group) if ctx.sp else inner
        whole = torch.zeros(*inner.shape[:-1], x.shape[-1], dtype=x.dtype)
        whole.chunk(ctx.group.size, -1)[ctx.group.rank].copy_(inner @ ctx.weight)
        whole = (primitives.reduce_scatter if ctx.sp else primitives.all_reduce)(whole, ctx.group)
        grad_w = weight_grad(ctx.weight, inner.reshape(-1, UNITS), mine.reshape(-1, mine.shape[-1]))
        return grad * gates.mean(-1, keepdim=True) + whole, grad_w, None, None


class Gate(nn.Module):
    def __init__(self, spec: GateSpec, build: Build) -> None:
        super().__init__()
        self.weight, self.group, self.sp = build.parameter(spec.weight), build.tp, build.sequence_parallel

    def forward(self, x: Tensor, step: Pass) -> Tensor:
        if self.group.size == 1 and not has_main_grad(self.weight):     # the reference: plain autograd
            return x * torch.sigmoid(x @ self.weight.t()).mean(-1, keepdim=True)
        return _Gated.apply(x, self.weight, self.group, self.sp)


@contextmanager
def gates() -> Iterator[None]:
    """Inside, the kind is registered: one entry in each of the two tables."""
    with mock.patch.dict(KINDS, gate=GateSpec.of), mock.patch.dict(BUILDERS, gate=Gate):
        yield


@contextmanager
def page() -> Iterator[None]:
    """Inside, the kind of docs/extending.md is registered, by the code that stands there."""
    text = (Path(__file__).resolve().parent.parent / "docs" / "extending.md").read_text("utf-8")
    code = re.search(r"## A kind of layer\n.*?```python\n(.*?)```", text, re.S)[1]
    with mock.patch.dict(KINDS), mock.patch.dict(BUILDERS):
        exec(compile(code, "docs/extending.md", "exec", dont_inherit=True), {"__name__": __name__})
        yield


def within(rank: int, world: int, registered: Callable, function: Callable, *args: Any) -> Any:
    """On a rank of the pool: call a function of the pool while a kind is registered."""
    with registered():
        return function(rank, world, *args)


def walked(pool, folder: Path, registered: Callable, mesh: str, **changes: Any) -> Outcome:
    """What `megafour verify` finds on one mesh."""
    config = config_from({"model": {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 8,
                                    "num_key_value_heads": 4}, "train": {"global_batch_size": 4}, **changes})
    with registered():
        (case,) = user_cases(config, [parse_mesh(mesh)], 2)
    walk = Walk(case, 2, folder, "fp64", "cpu")
    pool.run(within, 1, registered, reference_rank, walk)
    ranks = pool.run(within, case.degrees.world, registered, mesh_rank, walk)
    outcome = Outcome(mesh, {}, False, 0.0)
    summarise(outcome, ranks, TOLERANCES["fp64"])
    outcome.error = what_is_missing(ranks, {name: tuple(x.shape) for name, x in walk.read_reference().weights.items()})
    return outcome


@pytest.mark.parametrize(("mesh", "changes"), [
    ("dp2-pp2-tp2-cp2", {}),
    ("dp2-tp4", {"parallel": {"sequence_parallel": False, "zero_stage": 3}}),
    ("pp2-tp2", {"parallel": {"pipeline": {"schedule": "zb_v"}}, "train": {"global_batch_size": 4,
                                                                           "recompute": "full"}})])
def test_it_trains_on_a_mesh_as_on_one_process(pool, tmp_path, mesh, changes):
    outcome = walked(pool, tmp_path, gates, mesh, **changes)
    assert outcome.passed and outcome.error is None, outcome
    assert "layers.0.gate.weight" in outcome.gradients and "layers.0.gate_norm.weight" in outcome.gradients
    assert "layers.1.gate.weight" not in outcome.gradients


@pytest.mark.parametrize("changes", [dict(dp=2, pp=2, tp=2, cp=2), dict(tp=4, sequence_parallel=False),
                                     dict(tp=2, pp=2, train={"recompute": "full"})],
                         ids=lambda changes: "-".join(f"{k}{v}" for k, v in changes.items() if k != "train"))
def test_its_ledger_is_what_the_formulas_say(pool, changes):
    config, world = config_of({**LLAMA, "num_layers": 4}, **changes)
    plain = pool.run(whole_step, world, config)
    results = pool.run(within, world, gates, whole_step, config)
    assert all(got == want for got, want in results)
    assert results[0] != plain[0]


def test_the_partition_balances_it():
    """The first layer costs three others, in compute and in memory; exhaustive search finds no better cut."""
    config, _ = config_of({**LLAMA, "num_layers": 8}, pp=2)
    pipeline = pipeline_of(config)
    assert [count for _, count in partition_layers(config, pipeline, VOCAB)] == [4, 4]
    without = loads(config, pipeline, VOCAB)
    with gates():
        cut = [count for _, count in partition_layers(config, pipeline, VOCAB)]
        found, layers = loads(config, pipeline, VOCAB), Architecture(config.model, VOCAB).layers
        kept = [activation_bytes(config, layer) for layer in layers]
    assert cut[0] < cut[1] and price(found, pipeline.placement, cut) == min(prices(found, pipeline.placement))
    more = layers[0].flops(32).total - layers[1].flops(32).total
    assert more == 6 * (UNITS * 32 + 32 + 32)    # the gate, its product, its norm
    assert [a - b for a, b in zip(found.layers, without.layers, strict=True)] == [more, *[0] * 7]
    for row in found.memory:
        assert row[0] > 2 * row[1] and len(set(row[1:])) == 1
    tokens = 32 * 2 * 4    # of a micro-batch, in bytes of fp32
    assert kept[0] - kept[1] == tokens * (2 * 32 + 32 + UNITS)


def test_stages_hold_what_is_described():
    with gates():
        for rank, sequence_parallel in ((0, True), (1, True), (3, True), (0, False)):
            config, _ = config_of({**LLAMA, "num_layers": 4}, pp=2, tp=2, sequence_parallel=sequence_parallel)
            mesh = Mesh.build(pp=2, tp=2, rank=rank)
            stage = build_stage(config, mesh, VOCAB, device=torch.device("meta"))
            check_described(config, mesh, stage, VOCAB)


def test_inspect_shows_its_weight(pool, tmp_path):
    write_corpus(tmp_path / "corpus")
    assert pool.run(within, 2, gates, train, settings(tmp_path, {"tp": 2}, train={"steps": 2})) == [0, 0]
    lines = [line.split() for line in checkpoint_lines(tmp_path / "run")]
    shown = {line[0]: line[1] for line in lines if len(line) > 1}
    assert shown["weights/layers.0.gate.weight"] == shown["exp_avg/layers.0.gate.weight"] == f"{UNITS}×32"
    assert "weights/layers.1.gate.weight" not in shown


def test_the_kind_on_the_page_trains_as_on_one_process(pool, tmp_path):
    outcome = walked(pool, tmp_path, page, "pp2-tp2")
    assert outcome.passed and outcome.error is None, outcome
    assert {"layers.2.adapter.up.bias", "layers.2.adapter_norm.weight"} <= set(outcome.gradients)
    config, world = config_of({**LLAMA, "num_layers": 4}, pp=2, tp=2)
    assert all(got == want for got, want in pool.run(within, world, page, whole_step, config))
