"""Draws docs/context-*.svg: which rank holds which token, and which blocks it computes at each ring step.

Every square comes from the layouts, masks and blocks that training uses; nothing is placed by hand.
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np
from written import ROOT, main

from megafour.parallel.context.blocks import Places
from megafour.parallel.context.layout import LAYOUTS, Layout
from megafour.parallel.context.mask import Kind, Mask

RANKS, SEQ = 4, 16
COLOURS = ("#2563eb", "#f59e0b", "#10b981", "#db2777")
INK, PALE, LINE = "#1f2937", "#f3f4f6", "#d1d5db"
CELL, SMALL = 26, 9


class Svg:
    """Squares and words on a white page."""

    def __init__(self, title: str, width: int, height: int) -> None:
        self.parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
                      f'font-family="Helvetica, Arial, sans-serif" role="img">', f"<title>{escape(title)}</title>",
                      f'<rect width="{width}" height="{height}" fill="#ffffff"/>']

    def square(self, x: int, y: int, width: int, height: int, fill: str, stroke: str = "#ffffff") -> None:
        """A filled rectangle with a thin edge."""
        self.parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}" stroke="{stroke}"/>')

    def words(self, x: int, y: int, text: str, size: int = 12, anchor: str = "start", fill: str = INK) -> None:
        """A line of text whose baseline is at y."""
        self.parts.append(f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="{fill}">'
                          f"{escape(text)}</text>")

    def text(self) -> str:
        """The file."""
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def layouts() -> str:
    """One row for each layout: the tokens of a sequence, coloured by the rank that holds them."""
    svg = Svg(f"Which of {RANKS} ranks holds which of {SEQ} tokens", 110 + SEQ * CELL + 20, 50 + 3 * 56)
    svg.words(10, 22, f"{SEQ} tokens on {RANKS} ranks; the number is the rank that holds the token", 13)
    for row, kind in enumerate(LAYOUTS):
        top = 46 + row * 56
        svg.words(10, top + 18, kind, 13)
        for rank in range(RANKS):
            for token in Layout(SEQ, RANKS, kind).positions(rank).tolist():
                left = 110 + token * CELL
                svg.square(left, top, CELL, CELL, COLOURS[rank])
                svg.words(left + CELL // 2, top + 18, str(rank), 12, "middle", "#ffffff")
                svg.words(left + CELL // 2, top + 39, str(token), 9, "middle", "#6b7280")
    return svg.text()


def steps(kind: str) -> str:
    """A grid of queries × keys for each rank (down) and ring step (across): what it computes there."""
    layout, mask = Layout(SEQ, RANKS, kind), Mask()
    places, local = Places.of([layout.positions(r) for r in range(RANKS)]), SEQ // RANKS
    side = SEQ * SMALL
    svg = Svg(f"Blocks of {kind} ring attention on {RANKS} ranks", 70 + RANKS * (side + 24), 66 + RANKS * (side + 30))
    svg.words(10, 22, f"{kind}: the (query, key) pairs that each rank computes at each ring step, of {SEQ} × {SEQ}; "
                      "queries down, keys across", 12)
    for step in range(RANKS):
        svg.words(70 + step * (side + 24), 46, f"step {step}", 13)
        for rank in range(RANKS):
            left, top, source = 70 + step * (side + 24), 56 + rank * (side + 30), (rank - step) % RANKS
            if step == 0:
                svg.words(10, top + side // 2, f"rank {rank}", 13, fill=COLOURS[rank])
            svg.square(left, top, side, side, PALE, LINE)
            queries, keys = places.positions[rank], places.positions[source]
            count = 0
            for q, k in computed(places, mask, rank, source):
                svg.square(left + int(keys[k]) * SMALL, top + int(queries[q]) * SMALL, SMALL, SMALL, COLOURS[rank])
                count += 1
            svg.words(left, top + side + 14, f"keys of rank {source}: {count} of {local * local} pairs" if count
                      else f"keys of rank {source}: nothing to do", 10)
    return svg.text()


def computed(places: Places, mask: Mask, rank: int, source: int) -> list[tuple[int, int]]:
    """(Local query, key of `source`) pairs that the blocks cover."""
    shape, found = (len(places.positions[rank]), len(places.positions[source])), []
    for block in places.blocks(mask, rank, source):
        part = np.ones((block.rows.stop - block.rows.start, block.keys.stop - block.keys.start), bool)
        if block.kind is Kind.CAUSAL:
            part = np.tril(part)
        elif block.low is not None and block.high is not None:
            index = np.arange(part.shape[1])
            part = (index >= block.low[:, None]) & (index < block.high[:, None])
        whole = np.zeros(shape, bool)
        whole[block.rows, block.keys] = part
        found += np.argwhere(whole).tolist()
    return found


def drawings() -> dict[Path, str]:
    """Every picture and its text."""
    docs = ROOT / "docs"
    return {docs / "context-layouts.svg": layouts(), **{docs / f"context-steps-{kind}.svg": steps(kind)
                                                        for kind in LAYOUTS}}


if __name__ == "__main__":
    sys.exit(main(__doc__, drawings))
