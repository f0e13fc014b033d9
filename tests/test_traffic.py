"""The ledger against the formulas, to the byte: a block and the whole step, every method, layout, kind of heads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megafour.comm.ledger import Ledger
from megafour.config.load import config_from
from megafour.config.rules import resolve
from megafour.cost import step as cost_step
from megafour.cost import traffic as cost
from megafour.mesh import Mesh
from megafour.parallel.context.blocks import Places
from megafour.parallel.context.layout import LAYOUTS, Layout
from megafour.parallel.context.mask import Mask
from megafour.sizes import PRODUCTION
from megafour.trainer import traffic
from megafour.trainer.setup import build_mesh, build_state
from megafour.trainer.step import train_step
from megafour.verify.toy import toy_batches

VOCAB = 67    # every tp > 1 pads it
LLAMA = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 4,
         "ffn_hidden_size": 48, "vocab_size": VOCAB}
GPT2 = {**LLAMA, "num_key_value_heads": 8, "norm": "layernorm", "activation": "gelu", "position": "learned",
        "max_position_embeddings": 32, "qkv_bias": True, "linear_bias": True, "tie_embeddings": True}


def config_of(model=LLAMA, seq=32, micro=2, batches=2, train=None, data=None, **parallel):
    values = {"model": dict(model), "parallel": {"dp": 1, **parallel}, "data": {"seq_length": seq, **(data or {})},
              "train": {"steps": 2, "global_batch_size": parallel.get("dp", 1) * micro * batches,
                        "micro_batch_size": micro, "precision": "fp32", **(train or {})}}
    world = 1
    for axis in ("dp", "pp", "tp", "cp"):
        world *= values["parallel"].get(axis, 1)
    return resolve(config_from(values), world, data=False), world


def calls_and_bytes(prediction):
    return {(axis, primitive): (calls, nbytes) for axis, primitive, calls, nbytes in prediction.rows()}


def counted(ledger):
    return {key: (entry.calls, round(entry.nbytes)) for key, entry in ledger.totals().items() if entry.calls}


def whole_step(rank, world, config, sizes=PRODUCTION):
    """(what the ledger counted, what the formulas say) of one training step."""
    mesh = build_mesh(config, torch.device("cpu"), ledger=True)
    state = build_state(config, mesh, VOCAB, sizes=sizes)
    batches = toy_batches(config, config, VOCAB, 0, "all", dp_rank=mesh.group("dp").rank,
                          positions=state.stage.build.positions)
    mesh.ledger.reset()
    assert train_step(state, batches, 0, 1e-3).applied
    return counted(mesh.ledger), calls_and_bytes(traffic.predicted(config, mesh, VOCAB, batches, sizes=sizes))


def one_block(rank, world, config):
    """The same of one transformer block on one micro-batch, forward and backward."""
    mesh = build_mesh(config, torch.device("cpu"), ledger=True)
    state = build_state(config, mesh, VOCAB)
    (batch, *_) = toy_batches(config, config, VOCAB, 0, "all", dp_rank=mesh.group("dp").rank,
                              positions=state.stage.build.positions)
    name, block = next(iter(state.stage.decoders[0].layers.items()))
    x = torch.randn(state.stage.activation_shape(config.train.micro_batch_size), requires_grad=True)
    mesh.ledger.reset()
    block(x, state.stage.make_pass(batch, step=0, train=True)).sum().backward()
    return counted(mesh.ledger), calls_and_bytes(traffic.formulas(config, mesh, VOCAB).block(int(name)))


def method_of(name, cp, **more):
    """The `parallel` section of one way to split a sequence."""
    context = {"method": name, **more}
    if name == "usp":
        context["ulysses"] = 2
    if name == "double_ring":
        context["inner_ring"] = 2
    return {"cp": cp, "context": context}


SPLITS = [(method, cp, layout) for method in ("ring", "all_gather", "ulysses", "double_ring", "usp")
          for cp in (2, 4) if cp == 4 or method not in ("double_ring", "usp") for layout in LAYOUTS]
"""cp 2 and 4; an inner and an outer part need 4."""


def same(results):
    for got, want in results:
        assert got == want
    return results


@pytest.mark.parametrize(("method", "cp", "layout"), SPLITS)
def test_a_block_of_every_method_layout_and_kind_of_heads(pool, method, cp, layout):
    for kv_heads in (1, 2, 8):
        for window in (None, 9) if kv_heads == 2 else (None,):
            model = {**LLAMA, "num_key_value_heads": kv_heads, "attention_window": window}
            config, world = config_of(model, **method_of(method, cp, layout=layout))
            assert any(got for got, _ in same(pool.run(one_block, world, config)))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
def test_a_block_over_tp(pool, tp, sequence_parallel):
    config, world = config_of(tp=tp, sequence_parallel=sequence_parallel)
    whole = 32 * 2 * 32 * 4    # s · b · h · e
    for got, want in pool.run(one_block, world, config):
        assert got == want
        if sequence_parallel:
            share = (tp - 1) * whole // tp
            assert got == {("tp", "all_gather"): (6, 6 * share), ("tp", "reduce_scatter"): (4, 4 * share)}
        else:
            assert got == {("tp", "all_reduce"): (4, 4 * 2 * (tp - 1) * whole // tp)}


STEPS = {
    "dp2 zero 0": dict(dp=2, zero_stage=0),
    "dp4 zero 1, bf16": dict(dp=4, train={"precision": "bf16"}),
    "pp2": dict(pp=2, batches=3), "pp3 gpipe": dict(pp=3, pipeline={"schedule": "gpipe"}),
    "pp2 interleaved, tied": dict(model={**GPT2, "num_layers": 4}, pp=2, dp=2,
                                  pipeline={"schedule": "interleaved_1f1b", "virtual_stages": 2}),
    "pp2-tp2 zero bubble": dict(tp=2, pp=2, batches=3, pipeline={"schedule": "zb_h1"}),
    "pp2-tp2-cp2 in pairs": dict(model={**LLAMA, "num_layers": 4}, pp=2, tp=2, cp=2, batches=6,
                                 pipeline={"schedule": "dualpipe_v"}),
    "pp2-tp2 in a V, tied": dict(model={**GPT2, "num_layers": 4}, pp=2, tp=2, cp=2, batches=4,
                                 train={"recompute": "full"}, pipeline={"schedule": "zb_v"}),
    "pp2-dp2 tied": dict(model=GPT2, pp=2, dp=2),
    "tp2 gpt2": dict(model=GPT2, tp=2),
    "tp4 kv replicas, zero 1": dict(model={**LLAMA, "num_key_value_heads": 2, "qk_norm": True}, tp=4, dp=2),
    "tp2-pp2-dp2 gpt2, bf16": dict(model=GPT2, tp=2, pp=2, dp=2, train={"precision": "bf16"}),
    "tp4 without sp": dict(model={**GPT2, "num_key_value_heads": 2}, tp=4, sequence_parallel=False),
    "tp2-pp2-cp2, full": dict(tp=2, pp=2, cp=2, train={"recompute": "full"}),
    "pp2-cp2 contiguous, selective": dict(pp=2, train={"recompute": "selective"},
                                          **method_of("ring", 2, layout="contiguous")),
    "cp2 ulysses, selective, fp64": dict(train={"recompute": "selective", "precision": "fp64"},
                                         **method_of("ulysses", 2)),
    "tp2-cp4 usp, full, bf16": dict(tp=2, train={"recompute": "full", "precision": "bf16"}, **method_of("usp", 4)),
    "tp2-cp4 usp, selective": dict(tp=2, train={"recompute": "selective"}, **method_of("usp", 4)),
    "dp2-cp4 double ring, selective": dict(dp=2, train={"recompute": "selective"}, **method_of("double_ring", 4)),
    "cp2 all-gather, full, bf16": dict(train={"recompute": "full", "precision": "bf16"}, **method_of("all_gather", 2)),
    "dp2-tp2-cp2 ulysses": dict(dp=2, tp=2, **method_of("ulysses", 2)),
    "dp2-pp2-tp2-cp2": dict(dp=2, pp=2, tp=2, cp=2),
    "dp2 zero 2, tied": dict(model=GPT2, dp=2, zero_stage=2, batches=3),
    "pp2-cp2 zero 2, bf16": dict(pp=2, cp=2, zero_stage=2, batches=3, train={"precision": "bf16"}),
    "dp2-tp2 zero 3, tied, full": dict(model=GPT2, dp=2, tp=2, zero_stage=3, train={"recompute": "full"}),
    "dp2-pp2 zero 3": dict(dp=2, pp=2, zero_stage=3, batches=3),
    "dp2-pp2 zero 3 interleaved, tied, bf16": dict(
        model={**GPT2, "num_layers": 4}, dp=2, pp=2, zero_stage=3, batches=4, train={"precision": "bf16"},
        pipeline={"schedule": "interleaved_1f1b", "virtual_stages": 2}),
    "dp2-pp2 zero 3 in a V, tied": dict(model={**GPT2, "num_layers": 4}, dp=2, pp=2, zero_stage=3, batches=4,
                                        pipeline={"schedule": "zb_v"}),
    "dp4 zero 1 hybrid": dict(dp=4, zero_stage=1, zero_size=2),
    "dp4-tp2 zero 2 hybrid": dict(dp=4, tp=2, zero_stage=2, zero_size=2, batches=3),
    "dp2-cp2 zero 3 hybrid, bf16": dict(dp=2, cp=2, zero_stage=3, zero_size=2, train={"precision": "bf16"}),
    "dp4 zero 3, shares of one": dict(dp=4, zero_stage=3, zero_size=1),
    "cp4 windows by layer": dict(model={**LLAMA, "attention_window": [4, 12, None]},
                                 **method_of("ring", 4, layout="contiguous")),
    "cp4 documents, zigzag": dict(data={"document_mask": True}, **method_of("ring", 4)),
    "cp4 documents, contiguous": dict(data={"document_mask": True}, **method_of("ring", 4, layout="contiguous")),
    "cp4 documents, usp": dict(data={"document_mask": True}, **method_of("usp", 4)),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_whole_step(pool, name):
    config, world = config_of(**STEPS[name])
    results = same(pool.run(whole_step, world, config))
    assert all(got for got, _ in results)


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_a_step_in_several_buckets_and_chunks(pool, zero_stage):
    """Several buckets, and shards that begin inside of synced pieces."""
    config, world = config_of(GPT2, pp=2, tp=2, dp=2, zero_stage=zero_stage)
    same(pool.run(whole_step, world, config, replace(PRODUCTION, bucket_bytes=4096, head_logits=0, head_tokens=24)))


def test_a_skipped_step_gathers_no_weights(pool):
    config, world = config_of(dp=2, tp=2)
    for got, want in same(pool.run(skipped_step, world, config)):
        assert ("dp_cp", "all_gather") not in got and want


def skipped_step(rank, world, config):
    mesh = build_mesh(config, torch.device("cpu"), ledger=True)
    state = build_state(config, mesh, VOCAB)
    next(state.stage.parameters()).data.fill_(float("nan"))
    batches = toy_batches(config, config, VOCAB, 0, "all", dp_rank=mesh.group("dp").rank,
                          positions=state.stage.build.positions)
    mesh.ledger.reset()
    assert not train_step(state, batches, 0, 1e-3).applied
    return counted(mesh.ledger), calls_and_bytes(traffic.predicted(config, mesh, VOCAB, batches, updated=False))


def test_chunks_of_the_loss_are_cut_alike_where_the_last_rank_has_fewer_words(pool):
    """67 words on 4 ranks are 17, 17, 17 and 16: chunks cut by a rank's own words would not match across ranks."""
    config, world = config_of(tp=4, batches=1)
    results = same(pool.run(whole_step, world, config, replace(PRODUCTION, head_logits=17 * 24, head_tokens=1)))
    assert len({str(got) for got, _ in results}) == 1


# --- the formulas themselves ---------------------------------------------------------------------------------------


HEADS = cost.Heads(tokens=10, query=8, kv=2, size=4, element=2)
KV = 2 * 10 * 2 * 4 * 2


def sent(part):
    return {key: int(nbytes) for key, (_, nbytes) in part.entries.items()}


def test_closed_forms_of_the_ring():
    for n in (2, 3, 4, 8):
        level = {("ring", "send_recv"): 2 * (n - 1) * KV + n * 2 * KV}    # dK/dV are fp32: twice bf16
        for layout in ("zigzag", "striped"):
            assert all(sent(cost.ring(HEADS, r, cost.reach(layout, n, 16 * n))) == level for r in range(n))
        forward = cost.reach("contiguous", n, 16 * n)
        for r in range(n):
            kv, gradients = (2 * (r + 1), r + 1) if r < n - 1 else (0, n - 1)
            assert sent(cost.ring(HEADS, r, forward)) == {("ring", "send_recv"): kv * KV + gradients * 2 * KV}


def test_a_ring_whose_keys_stay_at_home_sends_nothing():
    assert cost.ring(HEADS, 1, [0, 0, 0]).nbytes == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reach_is_what_a_token_by_token_walk_finds(layout):
    for n, split, seq in ((2, 1, 16), (4, 1, 16), (4, 1, 32), (2, 2, 16), (4, 2, 48), (8, 1, 16), (4, 1, 8)):
        kind = Layout(seq, n * split, layout)
        held = [kind.shared_positions(i * split, split) for i in range(n)]
        for window in (None, 1, 2, 3, 5, 9, seq // 2, seq, 2 * seq):
            walked = []
            for j in range(n):
                hops = [i for i in range(n) for q in held[(j + i) % n].tolist() for k in held[j].tolist()
                        if 0 <= q - k < (window or seq)]
                walked.append(max(hops))
            assert cost.reach(layout, n, seq, ulysses=split, window=window) == walked, (n, split, seq, window)
            assert Places.of(held).reach(Mask(window)) == walked


def test_heads_that_ulysses_repeats():
    for kv, repeated in ((1, 4), (2, 4), (8, 8)):
        heads = cost.Heads(tokens=10, query=8, kv=kv, size=4, element=4)
        there, back = 10 * (8 + 2 * repeated) * 4 * 4, 10 * 8 * 4 * 4
        assert sent(cost.ulysses(heads, 4)) == {("ulysses", "all_to_all"): 2 * (there + back) * 3 // 4}
        assert heads.exchanged(4) == cost.Heads(40, 2, repeated // 4, 4, 4)


def test_zero_1_moves_a_quarter_less_than_zero_0_with_16_bit_weights():
    zero0, zero1 = (cost.data_parallel([(1024, 2)], 4, zero_stage=z, element=2).nbytes for z in (0, 1))
    assert (zero0, zero1) == (2 * 3 * 1024, 3 * 256 * 4 + 3 * 256 * 2)


def test_closed_forms_of_zero_2_3_and_hybrid():
    """Per rank with 3 micro-batches: shares of 256 of 1,024 elements, or of 512 on two replicas; bf16 weights."""
    def moved(stage, **more):
        return sent(cost.data_parallel([(1024, 2)], 4, zero_stage=stage, element=2, micro_batches=3, **more))

    share = 3 * 256
    assert moved(2) == {("dp_cp", "reduce_scatter"): 3 * share * 4, ("dp_cp", "all_gather"): share * 2}
    assert moved(3) == {("dp_cp", "reduce_scatter"): 3 * share * 4, ("dp_cp", "all_gather"): 3 * 2 * share * 2}
    assert moved(2, updated=False) == {("dp_cp", "reduce_scatter"): 3 * share * 4}
    assert moved(3, shares=2) == {("shard", "reduce_scatter"): 3 * 512 * 4, ("shard", "all_gather"): 3 * 2 * 512 * 2,
                                  ("replicas", "all_reduce"): 512 * 4}


def test_stages_on_one_rank_hand_over_in_memory():
    assert cost.pipeline(100, 0, [0, 1, 0, 1], 3).nbytes == 3 * 3 * 100
    assert cost.pipeline(100, 1, [0, 1, 1, 0], 3).nbytes == 3 * 2 * 100


def test_a_wrong_formula_is_found(pool):
    """dK/dV counted in the activations' dtype, as a formula that forgot the accumulation would."""
    config, world = config_of(train={"precision": "bf16"}, **method_of("ring", 2))
    with pytest.raises(AssertionError):
        same(pool.run(with_narrow_gradients, world, config))


def with_narrow_gradients(rank, world, config):
    with mock.patch.object(cost.Heads, "wide", property(lambda self: self.element)):
        return whole_step(rank, world, config)


ROOT = Path(__file__).resolve().parent.parent


def can_make_a_namespace():
    return sys.platform == "linux" and shutil.which("ip") is not None and shutil.which("unshare") is not None and (
        subprocess.run(["unshare", "--net", *([] if os.geteuid() == 0 else ["--map-root-user"]), "true"],
                       capture_output=True).returncode == 0)


def test_the_ledger_agrees_with_the_kernel():
    if not can_make_a_namespace():
        pytest.skip("no network namespaces here, or no iproute2")
    done = subprocess.run([sys.executable, "scripts/bench/traffic.py", "--only", "ring contiguous,ulysses cp2,pp2"],
                          cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    named = {line[:30].strip() for line in done.stdout.splitlines()}
    assert {"ring contiguous cp4", "ulysses cp2", "pp2 1f1b"} <= named


# --- the table and the clock ---------------------------------------------------------------------------------------


def table_of(rank, world, config):
    mesh = build_mesh(config, torch.device("cpu"), ledger=True)
    state = build_state(config, mesh, VOCAB)
    batches = toy_batches(config, config, VOCAB, 0, "all", dp_rank=mesh.group("dp").rank,
                          positions=state.stage.build.positions)
    mesh.ledger.reset()
    train_step(state, batches, 0, 1e-3)
    seconds = sum(entry.seconds for entry in mesh.ledger.totals().values())
    good = traffic.table(config, state, batches, 2 * seconds)
    mesh.ledger.record("send_recv", "ring", 8)
    return good, traffic.table(config, state, batches, 2 * seconds)


def test_the_table(pool):
    config, world = config_of(dp=2, tp=2, cp=2)
    for good, bad in pool.run(table_of, world, config):
        rows = [line.split() for line in good.splitlines()]
        assert rows[0] == ["axis", "primitive", "calls", "bytes", "predicted", "time"]
        assert {tuple(r[:2]) for r in rows[1:-2]} == {("dp_cp", "all_gather"), ("dp_cp", "reduce_scatter"),
                                                      ("ring", "send_recv"), ("tp", "all_gather"),
                                                      ("tp", "all_reduce"), ("tp", "reduce_scatter")}
        assert all(r[3] == r[4] for r in rows[1:-2]) and rows[-2][0] == "total" and rows[-2][-1] == "50.0%"
        assert rows[-1][0] == "apart:" and "differs" not in good
        assert [line.split()[0] for line in bad.splitlines() if "differs" in line] == ["ring", "total"]


@pytest.mark.parametrize("ledger", [None, Ledger()])
def test_waits_are_counted_with_and_without_a_ledger(ledger):
    mesh = Mesh.single(ledger=ledger)
    group = mesh.group("tp")
    clocked = SimpleNamespace(perf_counter=mock.Mock(side_effect=[0, 1, 2, 3, 4, 5]))
    with mock.patch("megafour.comm.waits.time", clocked):
        with (clock := group.timed("all_reduce")):
            assert mesh.waits.now.words == "all_reduce over tp (ranks 0)"
            with group.timed("broadcast"):      # one inside another is counted once
                pass
        with clock:
            pass
    assert mesh.waits.now is None
    assert (mesh.waits.take(), mesh.waits.take()) == (4, 0)
    if ledger is not None:
        assert ledger.rows() == [] and ledger.totals()["tp", "all_reduce"].seconds == 4


def test_the_formulas_name_every_precision():
    from megafour.model.stage import DTYPES

    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == cost_step.ELEMENT
