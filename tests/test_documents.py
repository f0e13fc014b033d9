"""Packed documents through the whole model: each as if it were alone, and none changed by another, on every mesh."""

import numpy as np
import pytest
import torch

from megafour.config.load import config_from
from megafour.config.rules import resolve
from megafour.data.batch import IGNORE, collate
from megafour.data.dataset import GlobalDataset, Source
from megafour.data.indexed import IndexedDataset, IndexedWriter
from megafour.mesh import Mesh
from megafour.model.stage import build_stage, initialize_parameter
from megafour.trainer.setup import build_mesh
from megafour.verify.reference import dense_attention

LENGTHS = [3, 7, 1, 5, 13, 1, 1, 1]    # uneven, longer than a rank's share, of one token
SEQ, VOCAB = sum(LENGTHS), 32
IDS = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
METHODS = {"ring": {}, "all_gather": {}, "ulysses": {}, "usp": {"ulysses": 2}, "double_ring": {"inner_ring": 2}}
FAMILIES = {
    "llama": {"attention_window": [None, 4]},
    "gpt2": {"norm": "layernorm", "activation": "gelu", "position": "learned", "qkv_bias": True, "linear_bias": True}}


def config_of(family, precision, seq=SEQ, **parallel):
    world = parallel.get("cp", 1) * parallel.get("tp", 1)
    return resolve(config_from({
        "model": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 2,
                  "ffn_hidden_size": 48, "vocab_size": VOCAB, "init_std": 0.2, "max_position_embeddings": SEQ,
                  **FAMILIES[family]},
        "parallel": parallel, "data": {"seq_length": seq, "document_mask": True},
        "train": {"steps": 1, "precision": precision, "global_batch_size": 2}}), world, data=False)


def tokens_of(change=None):
    """int64 `[2, SEQ + 1]`; every token of document `change` is another one."""
    rows = np.random.default_rng(0).integers(VOCAB, size=(2, SEQ + 1))
    if change is not None:
        rows[:, :-1][:, IDS == change] += 1
    return rows % VOCAB


def run(stage, batch):
    """(token losses `[b, s]`, gradients of the embedded tokens `[b, s, h]`) on this rank."""
    embedded = []
    stage.decoder.embedding.register_forward_hook(lambda module, args, out: embedded.append(out) or out.retain_grad())
    hidden = stage.hidden(batch, None, stage.make_pass(batch, step=0, train=True))
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    total, losses = stage.decoder.head(hidden, batch.labels, torch.tensor(1.0, dtype=dtype))
    total.backward()
    return losses.detach().view(batch.labels.shape[::-1]).t(), embedded[0].grad.transpose(0, 1)


def packed(rank, world, config, change=None):
    """This rank's positions, losses and input gradients of the packed samples."""
    stage = build_stage(config, build_mesh(config, torch.device("cpu"), ledger=False), VOCAB)
    for param in stage.parameters():
        initialize_parameter(param, 1)
    ids = np.r_[IDS, IDS[-1] + 1][None].repeat(2, 0)
    batch = collate(tokens_of(change), torch.arange(2), stage.build.positions, document_ids=ids)
    return stage.build.positions, batch.labels, *run(stage, batch)


def alone(family):
    """Losses and input gradients of every document as a sequence of its own, by dense attention, joined again."""
    rows, parts, begin = tokens_of(), [], 0
    for length in LENGTHS:
        config = config_of(family, "fp64", seq=length)
        stage = build_stage(config, Mesh.single(), VOCAB, attention=dense_attention)
        for param in stage.parameters():
            initialize_parameter(param, 1)
        # A document's last token predicts nothing.
        row = np.c_[rows[:, begin:begin + length], np.full((2, 1), -1)]
        batch = collate(row, torch.arange(2), torch.arange(length))
        parts.append(run(stage, batch))
        begin += length
    return [torch.cat(x, 1) for x in zip(*parts, strict=True)]


MESHES = [("ring", "zigzag", 1), *((m, kind, 4) for m in METHODS for kind in ("zigzag", "striped", "contiguous"))]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_document_is_as_it_would_be_alone(pool, family):
    losses, grads = alone(family)
    for method, layout, cp in MESHES if family == "llama" else MESHES[:4]:
        more = METHODS[method] if cp > 1 else {}
        config = config_of(family, "fp64", cp=cp, context={"method": method, "layout": layout, **more})
        trained = 0
        for here, labels, got, grad in pool.run(packed, cp, config):
            assert (got - losses[:, here]).abs().max() <= 1e-9 * losses.abs().max(), (method, layout)
            assert (grad - grads[:, here]).abs().max() <= 1e-9 * grads.abs().max(), (method, layout)
            trained += int((labels != IGNORE).sum())
        assert trained == 2 * (SEQ - len(LENGTHS))


@pytest.mark.parametrize(("method", "layout", "cp"), MESHES)
def test_a_change_in_one_document_changes_no_bit_of_another(pool, method, layout, cp):
    more = METHODS[method] if cp > 1 else {}
    config = config_of("llama", "fp32", cp=cp, context={"method": method, "layout": layout, **more})
    changed = False
    for (here, _, *before), (_, _, *after) in zip(pool.run(packed, cp, config), pool.run(packed, cp, config, 4),
                                                 strict=True):
        others = torch.from_numpy(IDS)[here] != 4
        assert all(a[:, others].equal(b[:, others]) for a, b in zip(before, after, strict=True))
        changed |= not before[0][:, ~others].equal(after[0][:, ~others])
    assert changed


def test_parts_of_one_rank_share_tables_and_masks():
    """Made once a micro-batch, though each of two is under way on both parts; none is held in the end."""
    config = config_of("llama", "fp64", pipeline={"schedule": "interleaved_1f1b", "virtual_stages": 2})
    stage, made, one = build_stage(config, Mesh.single(), VOCAB), [], torch.tensor(1.0, dtype=torch.float64)
    for param in stage.parameters():
        initialize_parameter(param, 1)
    shift, real = np.r_[IDS, IDS[-1] + 1], stage.rope
    batches = [collate(tokens_of(), torch.arange(2), stage.build.positions, document_ids=ids[None].repeat(2, 0))
               for ids in (shift, np.roll(shift, 5))]
    stage.rope = lambda positions: made.append(0) or real(positions)
    hidden = [stage(batch, None, one, step=0, train=True, chunk=0) for batch in batches]
    losses = [stage(batch, x, one, step=0, train=True, chunk=1) for batch, x in zip(batches, hidden, strict=True)]
    assert len(made) == 2 and not stage._packed
    plain = build_stage(config_of("llama", "fp64"), Mesh.single(), VOCAB)
    for param in plain.parameters():
        initialize_parameter(param, 1)
    assert [x.item() for x in losses] == [plain(batch, None, one, step=0, train=True).item() for batch in batches]
    assert losses[0] != losses[1]


def test_documents_of_a_sample_come_from_the_index(tmp_path):
    lengths = [5, 0, 2, 1, 9, 4]
    with IndexedWriter(tmp_path / "corpus", VOCAB) as writer:
        for number, length in enumerate(lengths):
            writer.add(np.full(length, number))
    dataset = GlobalDataset([Source(IndexedDataset(tmp_path / "corpus"), 6, seed=3)], seed=3)
    for index in range(12):    # four epochs: windows that wrap round the end of the corpus among them
        tokens, ids = dataset.sample(index), dataset.documents(index)
        assert ids[0] == 0
        # the tokens of a document are its number here
        assert (np.diff(ids) == (np.diff(tokens) != 0)).all(), (tokens, ids)
