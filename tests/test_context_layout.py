"""Layouts, document positions and the merge of partial attentions."""

import math

import pytest
import torch

from megafour.parallel.context.layout import LAYOUTS, Layout, document_starts
from megafour.parallel.context.merge import merge_


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("cp,seq", [(1, 7), (1, 16), (2, 8), (2, 16), (3, 18), (4, 64), (8, 16)])
def test_a_layout_is_a_bijection(cp, seq, kind):
    layout = Layout(seq, cp, kind)
    held = [layout.positions(r) for r in range(cp)]
    assert all(len(p) == layout.local_length == seq // cp for p in held)
    assert torch.cat(held).sort().values.tolist() == list(range(seq))
    for positions in held:
        assert positions.tolist() == sorted(positions.tolist())


def test_zigzag_levels_the_causal_work():
    work = [(Layout(64, 4).positions(r) + 1).sum().item() for r in range(4)]
    assert len(set(work)) == 1


def test_layouts_hold_what_their_names_say():
    assert [Layout(8, 2, "striped").positions(r).tolist() for r in (0, 1)] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert [Layout(8, 2, "contiguous").positions(r).tolist() for r in (0, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert Layout(16, 4).shared_positions(2, 2).tolist() == [4, 5, 10, 11, 6, 7, 8, 9]


def test_bad_layouts_are_refused_with_their_numbers():
    with pytest.raises(ValueError, match=r"seq_length 20 % \(2 · cp 4\)"):
        Layout(20, 4)
    with pytest.raises(ValueError, match=r"seq_length 18 % cp 4"):
        Layout(18, 4, "striped")
    with pytest.raises(ValueError, match="layout=diagonal"):
        Layout(16, 2, "diagonal")


def test_a10_rope_positions_restart_per_document_wherever_the_token_lives():
    ids = torch.tensor([0] * 5 + [1] * 3)
    layout = Layout(8, 2)
    assert [layout.positions(r).tolist() for r in (0, 1)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    restarted = torch.arange(8) - document_starts(ids)
    assert restarted[layout.positions(0)].tolist() == [0, 1, 1, 2]
    assert restarted[layout.positions(1)].tolist() == [2, 3, 4, 0]


def test_document_starts_of_a_batch_with_documents_of_one_token():
    ids = torch.tensor([[0, 1, 1, 2, 3, 3], [4, 4, 4, 4, 4, 4]])
    assert document_starts(ids).tolist() == [[0, 1, 1, 3, 4, 4], [0, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_a8_every_target_is_trained_once(cp, kind):
    sample, layout = torch.arange(100, 117), Layout(16, cp, kind)
    labels = torch.full((16,), -1)
    for rank in range(cp):
        positions = layout.positions(rank)
        labels[positions] = sample[1:][positions]
    assert labels.tolist() == sample[1:].tolist()


def partial(keys):
    scores = torch.randn(2, 3, 5, keys, dtype=torch.float64)
    values = torch.randn(2, keys, 3, 4, dtype=torch.float64)
    return scores, values, torch.einsum("bhnm,bmhd->bnhd", scores.softmax(-1), values), scores.logsumexp(-1)


def test_a_merge_is_attention_over_both_sets_of_keys():
    torch.manual_seed(0)
    s1, v1, out, lse = partial(6)
    s2, v2, part, part_lse = partial(9)
    merge_(out, lse, part, part_lse)
    scores, values = torch.cat([s1, s2], -1), torch.cat([v1, v2], 1)
    torch.testing.assert_close(out, torch.einsum("bhnm,bmhd->bnhd", scores.softmax(-1), values), rtol=0, atol=1e-13)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=0, atol=1e-13)


@pytest.mark.parametrize("lse,part_lse,expected,total", [
    (-1e4, 1e4, 2.0, 1e4), (1e4, -1e4, 1.0, 1e4), (-math.inf, 3.0, 2.0, 3.0), (3.0, -math.inf, 1.0, 3.0),
    (-math.inf, -math.inf, 1.0, -math.inf), (0.0, 0.0, 1.5, math.log(2))])
def test_a_merge_of_extremes_neither_overflows_nor_makes_nan(lse, part_lse, expected, total):
    out, a, b = torch.ones(1, 1, 1, 2), torch.full((1, 1, 1), lse), torch.full((1, 1, 1), part_lse)
    merge_(out, a, torch.full((1, 1, 1, 2), 2.0), b)
    assert out.tolist() == [[[[expected] * 2]]]
    assert a.item() == pytest.approx(total)
