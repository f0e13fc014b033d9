"""Balance: the work of each rank counted in closed form, against the blocks that the methods compute."""

import importlib.util

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megafour.config.load import load_config
from megafour.config.rules import resolve
from megafour.parallel.context.balance import balance, describe, step_work
from megafour.parallel.context.blocks import Places
from megafour.parallel.context.layout import LAYOUTS, Layout, document_starts
from megafour.parallel.context.mask import Mask


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_one_causal_document(ranks):
    seq = 64 * ranks
    for method in ("ring", "all_gather"):
        contiguous = balance(Layout(seq, ranks, "contiguous"), Mask(), method)
        assert contiguous.whole == pytest.approx(2 - 1 / ranks, rel=2 / seq)
        assert contiguous.steps == pytest.approx(contiguous.whole)
        zigzag = balance(Layout(seq, ranks, "zigzag"), Mask(), method)
        assert (zigzag.whole, zigzag.steps) == (1, 1)
        striped = balance(Layout(seq, ranks, "striped"), Mask(), method)
        assert striped.whole == pytest.approx(1 + (ranks - 1) / (seq + 1))
        assert striped.whole <= striped.steps <= 1 + 2 * ranks / seq
    assert balance(Layout(seq, ranks, "contiguous"), Mask(), "ulysses", ulysses=ranks).whole == 1


def test_steps_wait_where_no_rank_is_slowest_throughout():
    # Two documents that end inside chunks: each step has its own slowest rank.
    starts = document_starts(torch.tensor([[0] * 6 + [1] * 10]))
    found = balance(Layout(16, 4, "zigzag"), Mask(None, starts))
    assert found.steps > found.whole > 1


@st.composite
def cases(draw):
    kind, ulysses = draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from([1, 2]))
    cp = ulysses * draw(st.sampled_from([1, 2, 4]))
    layout = Layout((2 if kind == "zigzag" else 1) * cp * draw(st.integers(1, 8)), cp, kind)
    cuts = draw(st.none() | st.lists(st.sets(st.integers(1, layout.seq_length), max_size=5), min_size=1, max_size=3))
    starts = None if cuts is None else document_starts(
        torch.tensor([[sum(c <= i for c in sample) for i in range(layout.seq_length)] for sample in cuts]))
    return layout, ulysses, Mask(draw(st.none() | st.integers(1, layout.seq_length)), starts)


@settings(max_examples=100)
@given(cases())
def test_work_is_that_of_the_blocks(case):
    layout, ulysses, mask = case
    ring = layout.cp // ulysses
    places = Places.of([layout.shared_positions(i * ulysses, ulysses) for i in range(ring)])
    found = step_work(layout, mask, "usp", ulysses)
    wanted = [[sum(b.pairs for b in places.blocks(mask, r, (r - step) % ring)) for r in range(ring)]
              for step in range(ring)]
    assert np.array_equal(found, wanted)
    assert np.array_equal(step_work(layout, mask, "all_gather", ulysses).sum(0), found.sum(0))
    inner = 2 if ring % 2 == 0 else 1
    nodes = step_work(layout, mask, "double_ring", ulysses, inner)
    assert np.array_equal(nodes.sum(0), found.sum(0)) and np.array_equal(nodes[0], found[0])


def test_describe_of_a_config():
    def words(*overrides):
        return describe(resolve(load_config(None, ["data.seq_length=64", *overrides]), 4, data=False))

    assert words("parallel.cp=4").startswith("attention work, slowest rank / mean: zigzag 1.000 (")
    text = words("parallel.cp=4", "parallel.context.layout=contiguous")
    assert "mean: contiguous 1.738 (not chosen: zigzag 1.000; striped" in text    # 2 - 1/4, less the diagonal's half
    assert "one rank" in words("parallel.cp=1")
    assert "documents" not in text and "document" in words("parallel.cp=4", "data.document_mask=true")


def test_the_drawings_are_those_of_the_code(pytestconfig, monkeypatch):
    monkeypatch.syspath_prepend(str(pytestconfig.rootpath / "scripts"))
    path = pytestconfig.rootpath / "scripts" / "draw_layouts.py"
    spec = importlib.util.spec_from_file_location("draw_layouts", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for picture, text in module.drawings().items():
        assert picture.read_text("utf-8") == text, f"{picture.name}: run python scripts/draw_layouts.py"
