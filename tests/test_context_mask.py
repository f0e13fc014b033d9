"""Masks: the blocks of a pair of position lists cover exactly what the queries see, and no tile is larger than one."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megafour.parallel.context.blocks import Places
from megafour.parallel.context.layout import LAYOUTS, Layout, document_starts
from megafour.parallel.context.mask import Kind, Mask, Masks, staircase
from megafour.sizes import PRODUCTION, Sizes


def drawn(blocks, shape, tile=PRODUCTION.mask_rows):
    """How often each (row, key) is in a block."""
    count = np.zeros(shape, int)
    for block in blocks:
        rows, keys = block.rows.stop - block.rows.start, block.keys.stop - block.keys.start
        assert rows > 0 and keys > 0
        visible = block.visible(torch.device("cpu"))
        if block.kind is Kind.CAUSAL:
            assert rows == keys
            part = np.tril(np.ones((rows, keys), int))
        elif block.kind is Kind.TILE:
            assert rows <= tile and keys <= 2 * tile
            part = visible.numpy().astype(int)
        else:
            part = np.ones((rows, keys), int)
        assert (visible is None) == (block.kind is not Kind.TILE)
        assert part.sum() == block.pairs
        count[block.rows, block.keys] += part
    return count


def dense(mask, queries, keys, sample=0):
    """The mask from its definition."""
    q, k = queries[:, None], keys[None, :]
    seen = k <= q
    if mask.window is not None:
        seen &= k > q - mask.window
    if mask.starts is not None:
        seen &= k >= mask.starts[sample].numpy()[q]
    return seen.astype(int)


@st.composite
def cases(draw):
    kind, cp = draw(st.sampled_from(LAYOUTS)), draw(st.integers(1, 4))
    unit = 2 * cp if kind == "zigzag" else cp
    layout = Layout(unit * draw(st.integers(1, 12)), cp, kind)
    window = draw(st.none() | st.integers(1, layout.seq_length + 1))
    cuts = draw(st.none() | st.lists(st.integers(0, layout.seq_length), max_size=8))
    starts = None
    if cuts is not None:
        starts = document_starts(torch.tensor([[sum(c <= i for c in cuts) for i in range(layout.seq_length)]]))
    return layout, Mask(window, starts, Sizes(mask_rows=draw(st.integers(1, 8)), short_run=draw(st.integers(1, 6))))


@settings(max_examples=300)
@given(cases())
def test_blocks_cover_what_is_seen_once(case):
    layout, mask = case
    held = Places.of([layout.positions(r) for r in range(layout.cp)])
    reach = held.reach(mask)
    for i, queries in enumerate(held.positions):
        for j, keys in enumerate(held.positions):
            want = dense(mask, queries, keys)
            assert (drawn(held.blocks(mask, i, j), want.shape, mask.sizes.mask_rows) == want).all()
            # whoever sees a key is on its way
            assert not want.any() or (i - j) % layout.cp <= reach[j]


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=40))
def test_any_staircase(steps):
    low, width = np.cumsum([a for a, _ in steps]), np.array([b for _, b in steps])
    high = np.maximum.accumulate(low + width)
    keys = int(high[-1]) + 1
    j = np.arange(keys)
    want = ((j >= low[:, None]) & (j < high[:, None])).astype(int)
    assert (drawn(staircase(low, high), want.shape) == want).all()


def test_the_zigzag_and_stripes_of_the_papers_need_no_tile():
    zigzag = Places.of([Layout(64, 4).positions(r) for r in range(4)])

    def shape(places, i, j):
        return [(b.rows.start, b.rows.stop, b.keys.start, b.keys.stop, b.kind) for b in places.blocks(Mask(), i, j)]

    assert shape(zigzag, 2, 2) == [(0, 16, 0, 16, Kind.CAUSAL)]
    assert shape(zigzag, 2, 1) == [(0, 16, 0, 8, Kind.FULL)]    # all queries on the earlier chunk
    assert shape(zigzag, 1, 2) == [(8, 16, 0, 16, Kind.FULL)]    # the later queries on both chunks
    striped = Places.of([Layout(64, 4, "striped").positions(r) for r in range(4)])
    assert shape(striped, 2, 1) == [(0, 16, 0, 16, Kind.CAUSAL)]
    assert shape(striped, 1, 2) == [(1, 16, 0, 15, Kind.CAUSAL)]    # from a later rank: queries[1:] on keys[:-1]
    contiguous = Places.of([Layout(64, 4, "contiguous").positions(r) for r in range(4)])
    assert shape(contiguous, 1, 2) == [] and shape(contiguous, 2, 1) == [(0, 16, 0, 16, Kind.FULL)]
    assert contiguous.reach(Mask()) == [3, 2, 1, 0] and zigzag.reach(Mask()) == [3] * 4
    assert contiguous.reach(Mask(window=1)) == [0] * 4 and contiguous.reach(Mask(window=2)) == [1, 1, 1, 0]


def test_a_long_window_is_mostly_maskless():
    positions = np.arange(8192)
    blocks = list(Mask(1024).blocks(positions, positions, "all"))
    tiles = sum(b.pairs for b in blocks if b.kind is Kind.TILE)
    assert tiles < 0.2 * sum(b.pairs for b in blocks)
    assert max((b.rows.stop - b.rows.start) * (b.keys.stop - b.keys.start) for b in blocks if b.kind is Kind.TILE) <= (
        2 * PRODUCTION.mask_rows**2)


def test_masks_are_shared_by_layers_with_one_window():
    of_layers = Masks()
    assert of_layers.within(8) is of_layers.within(8) and of_layers.within(None).window is None
