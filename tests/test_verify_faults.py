"""Planted faults: each is found by verify, and the worst parameter is one that the fault touches."""

import re
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch

from megafour.comm.group import Group
from megafour.config.load import config_from
from megafour.data.batch import IGNORE
from megafour.verify.matrix import parse_mesh
from megafour.verify.run import check
from megafour.verify.shrink import user_cases


@contextmanager
def norm_sync_dropped():
    """Norm weights under sequence parallelism keep each tp rank's own share of the gradient."""
    from megafour.trainer import step

    real = step.sync_replicated
    with mock.patch.object(step, "sync_replicated", lambda buckets, groups: real(
            buckets, {**groups, "tp": Group("tp", (0,), 0)})):
        yield


@contextmanager
def loss_scaled_by_cp():
    """Every rank of the ring divides by its own tokens, as a mean over ranks would."""
    from megafour.trainer import step

    real = step.count_valid_tokens
    with mock.patch.object(step, "count_valid_tokens", lambda batches, mesh: real(batches, mesh) // mesh.cp):
        yield


@contextmanager
def label_lost_at_a_boundary():
    """Each shard shifts its own tokens: the last one of every run of positions has no label."""
    from megafour.data import loader
    from megafour.data.batch import IGNORE

    real = loader.collate

    def shifted_after_the_cut(rows, ids, positions, **kwargs):
        batch = real(rows, ids, positions, **kwargs)
        followed = torch.zeros(len(positions), dtype=torch.bool)
        followed[:-1] = positions[1:] == positions[:-1] + 1
        return replace(batch, labels=batch.labels.masked_fill(~followed & (positions != rows.shape[1] - 2), IGNORE))

    with mock.patch.object(loader, "collate", shifted_after_the_cut):
        yield


@contextmanager
def kv_heads_swapped():
    """A tp rank holds the K and V heads of its neighbour."""
    from megafour.architecture.weights import Weight

    real = Weight.piece

    def swapped(self, at, row=0):
        piece = real(self, at, row)
        if not re.match(r"layers\.1\.attention\.w[kv]\.", self.name):
            return piece
        return replace(piece, offset=(piece.shape[0] - piece.size[0] - piece.offset[0], *piece.offset[1:]))

    with mock.patch.object(Weight, "piece", swapped):
        yield


@contextmanager
def layer_skipped():
    """The first stage does not run its last layer."""
    from megafour.model.decoder import Decoder

    real = Decoder.hidden

    def without_last(self, x, step, positions):
        if not self.first:
            return real(self, x, step, positions)
        layers, self.layers = self.layers, torch.nn.ModuleDict(list(self.layers.items())[:-1])
        try:
            return real(self, x, step, positions)
        finally:
            self.layers = layers

    with mock.patch.object(Decoder, "hidden", without_last):
        yield


@contextmanager
def wrong_chunk_at_a_ring_step():
    """From an earlier rank the second half of the keys is taken instead of the first."""
    from megafour.parallel.context.blocks import Places

    real = Places.blocks

    def wrong(self, mask, queries, keys):
        blocks = real(self, mask, queries, keys)
        half = len(self.positions[keys]) // 2
        return blocks if keys >= queries else [replace(block, keys=slice(half, 2 * half)) for block in blocks]

    with mock.patch.object(Places, "blocks", wrong):
        yield


@contextmanager
def key_gradients_one_hop_short():
    """The last rank keeps the gradients of keys that are another's."""
    from megafour.comm.primitives import Pending
    from megafour.parallel.context.ring import Ring

    real = Ring.hop_home

    def short(self, step, sent, received, home):
        return real(self, step, sent, received, home) if step < self.steps else Pending(home.copy_(sent))

    with mock.patch.object(Ring, "hop_home", short):
        yield


@contextmanager
def rope_by_local_index():
    """Every rank counts its own tokens from 0."""
    from megafour.model.stage import Stage

    real = Stage.rope
    with mock.patch.object(Stage, "rope", lambda self, positions: real(
            self, torch.arange(len(positions)).unsqueeze(1).expand_as(positions))):
        yield


@contextmanager
def mean_of_rank_means():
    """Every rank divides by its own valid tokens, and the ranks' means are averaged."""
    from megafour.trainer import step

    with mock.patch.object(step, "count_valid_tokens", lambda batches, mesh: mesh.dp * mesh.cp * max(
            1, sum(int((batch.labels != IGNORE).sum()) for batch in batches))):
        yield


def case(mesh: str):
    config = config_from({
        "model": {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4},
        "train": {"global_batch_size": 2, "grad_clip": 0}, "optimizer": {"name": "sgd", "lr": 1e-3}})
    return user_cases(config, [parse_mesh(mesh)], 2)[0]


EVERY = r".*"
KV = r"layers\.1\.attention\.w[kv]\.weight"
FAULTS = [    # fault, mesh, where the worst parameter is, which parameters must all be far off
    (norm_sync_dropped, "tp2", r".*norm\.weight", r".*norm\.weight"),
    (norm_sync_dropped, "dp2-pp2-tp2", r".*norm\.weight", r".*norm\.weight"),
    (loss_scaled_by_cp, "cp2", EVERY, EVERY),
    (label_lost_at_a_boundary, "cp2", EVERY, EVERY),
    (kv_heads_swapped, "tp2", r"layers\.1\.attention.*", KV),
    (layer_skipped, "pp2", r"layers\.1\..*", r"layers\.1\..*"),
    (key_gradients_one_hop_short, "cp4", r"layers\.\d\..*", r"layers\.\d\.attention\.w[kv]\.weight"),
    (rope_by_local_index, "cp2", EVERY, r"layers\.\d\.attention\.w[qk]\.weight"),
    (mean_of_rank_means, "dp2-cp2", EVERY, EVERY),
    (wrong_chunk_at_a_ring_step, "cp2", r"layers\.\d\.attention.*", r"layers\.\d\.attention\.w[qkvo]\.weight"),
]


@pytest.mark.parametrize(("fault", "mesh", "touched", "wrong"), FAULTS, ids=[f"{f[0].__name__}-{f[1]}" for f in FAULTS])
def test_a_planted_fault_is_found(pool, fault, mesh, touched, wrong):
    outcome = check(pool, case(mesh), 2, plant=fault)
    assert outcome.error is None
    assert not outcome.passed
    assert outcome.gradient == max(outcome.gradients.values()) > 0.1
    assert re.fullmatch(touched, outcome.worst_gradient), outcome.worst_gradient
    assert all(x > 1e-3 for name, x in outcome.gradients.items() if re.fullmatch(wrong, name)), outcome.gradients


@pytest.mark.parametrize("mesh", sorted({fault[1] for fault in FAULTS}))
def test_the_same_mesh_without_a_fault_passes(pool, mesh):
    outcome = check(pool, case(mesh), 2)
    assert outcome.passed, outcome


@contextmanager
def raises_on_one_rank():
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise KeyError("layers.3")
    yield


def test_an_error_on_a_rank_is_a_failed_row(pool):
    outcome = check(pool, case("dp2"), 2, plant=raises_on_one_rank)
    assert not outcome.passed
    assert outcome.error is not None and outcome.error.startswith("rank 1: KeyError: 'layers.3'")


@pytest.mark.parametrize("activation", ["geglu", "gelu"])
def test_activations_that_no_family_has(pool, activation):
    config = config_from({"model": {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 8,
                                    "num_key_value_heads": 4, "activation": activation, "linear_bias": True},
                          "train": {"global_batch_size": 2}})
    outcome = check(pool, user_cases(config, [parse_mesh("pp2-tp2-cp2")], 2)[0], 2)
    assert outcome.passed, outcome


def rounded(precision: str, mesh: str, **model):
    """A case at the rate of 2e-3, at which two sound 16-bit meshes would part ways."""
    config = config_from({"model": {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 8, **model},
                          "train": {"global_batch_size": 2}, "optimizer": {"lr": 2e-3},
                          "lr_schedule": {"min_lr": 1e-3}})
    return user_cases(config, [parse_mesh(mesh)], 3, precision)[0]


GPT2 = {"norm": "layernorm", "activation": "gelu_tanh", "position": "learned", "qkv_bias": True, "linear_bias": True}


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.full)])
@pytest.mark.parametrize("model", [{"num_key_value_heads": 4, "qk_norm": True}, GPT2], ids=["llama", "gpt2"])
def test_rounding_alone_passes_and_a_fault_does_not(pool, precision, model):
    """GPT-2's key bias has no gradient but rounding."""
    for mesh in ("pp2", "tp2-cp2"):
        outcome = check(pool, rounded(precision, mesh, **model), 3, precision=precision)
        assert outcome.passed, outcome
    for mesh, fault in (("tp2", norm_sync_dropped), ("cp2", loss_scaled_by_cp), ("cp2", label_lost_at_a_boundary)):
        outcome = check(pool, rounded(precision, mesh, **model), 3, precision=precision, plant=fault)
        assert not outcome.passed and outcome.error is None and outcome.gradient > 0.25, (mesh, outcome)
