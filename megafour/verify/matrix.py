"""Which meshes and which options a verification walks: a covering array of every pair, computed and deterministic."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from megafour.config.errors import ConfigError

DEFAULT_MESHES = (
    "dp2", "dp4", "tp2", "tp4", "pp2", "pp4", "cp2", "cp4", "dp2-tp2", "dp2-cp2", "tp2-cp2", "tp2-pp2", "pp2-cp2",
    "dp2-pp2", "dp2-tp2-cp2", "dp2-pp2-tp2", "pp2-tp2-cp2", "dp2-pp2-tp2-cp2")
"""Each axis, each pair of axes, and the whole grid."""

OPTION_MESHES = (*DEFAULT_MESHES, "tp2-cp4", "dp2-pp2-cp4")
"""What `--options all` walks: two rings in one another, or heads and a ring, need four ranks."""


@dataclass(frozen=True)
class Degrees:
    """The sizes of a mesh's axes."""

    dp: int = 1
    pp: int = 1
    tp: int = 1
    cp: int = 1

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.dp * self.pp * self.tp * self.cp

    @property
    def words(self) -> str:
        """`dp2-tp2`; `dp1` for one process."""
        sizes = {"dp": self.dp, "pp": self.pp, "tp": self.tp, "cp": self.cp}
        return "-".join(f"{axis}{n}" for axis, n in sizes.items() if n > 1) or "dp1"


def parse_mesh(words: str) -> Degrees:
    """`dp2-pp2-tp2-cp2` to numbers; the order of the axes means nothing, one that is left out is 1.

    Raises:
        ConfigError: an unknown or repeated axis, or a degree that is no positive whole number.
    """
    sizes: dict[str, int] = {}
    for part in words.split("-"):
        match = re.fullmatch(r"(dp|pp|tp|cp|ep)([1-9][0-9]*)", part)
        if match is None or match[1] in sizes:
            raise ConfigError(f"--mesh {words}: `{part}` is not an axis (dp, pp, tp, cp; each once) and its degree, "
                              "as in dp2-tp2")
        sizes[match[1]] = int(match[2])
    if sizes.pop("ep", 1) != 1:
        raise ConfigError(f"--mesh {words}: ep > 1 is not supported by this version: there are no experts to split")
    return Degrees(**sizes)


OPTIONS: dict[str, tuple[str, ...]] = {
    "method": ("ring", "all_gather", "ulysses", "usp", "double_ring"),
    "layout": ("zigzag", "striped", "contiguous"),
    "kv_heads": ("all", "grouped", "one", "fewer"),  # as many as query heads; fewer; one; fewer than tp
    "layers": ("even", "uneven", "explicit"),
    "recompute": ("none", "selective", "full"),
    "valid": ("all", "uneven", "empty-rank"),
    "order": ("auto", "pp-inner", "reversed"),
    "sequence_parallel": ("true", "false"),
    "zero_stage": ("0", "1", "2", "3", "1:2", "3:2"),  # hybrid: the ranks that share one copy after a colon
    "tied": ("false", "true"),
    "micro_batches": ("1", "3"),
    "micro_batch_size": ("1", "2"),
    "dropout": ("off", "on"),
    "family": ("llama", "gpt2"),
    "qk_norm": ("false", "true"),
    "schedule": ("1f1b", "gpipe"),
    "optimizer": ("adamw", "sgd"),
    "clip": ("off", "tight"),
    "documents": ("off", "on"),
    "window": ("none", "short", "pattern"),
}
"""Every option that a covering walk varies, with its values."""

Row = dict[str, str]
"""A mesh in words under `mesh`, and a value for every option that has an effect on that mesh."""

Pair = tuple[tuple[str, str], tuple[str, str]]


def values(mesh: Degrees, option: str) -> tuple[str, ...]:
    """The values of an option that differ in effect on `mesh`; none where the option has no effect at all."""
    every = OPTIONS[option]
    sharers = mesh.dp * mesh.cp
    axes = sum(n > 1 for n in (mesh.dp, mesh.pp, mesh.tp, mesh.cp))
    if option == "kv_heads":
        return every if mesh.tp > 2 else (*every[:2], "fewer" if mesh.tp == 2 else "one")    # at tp 2 fewer is one
    if option == "method":
        return () if mesh.cp == 1 else every if mesh.cp >= 4 else every[:3]    # two rings, or heads and a ring
    if option == "valid":
        return every if sharers > 1 else every[:2]
    if option == "zero_stage":
        return () if sharers == 1 else every if sharers >= 4 else every[:4]
    if option == "order":
        if axes < 2:
            return ()
        return every if mesh.dp > 1 and mesh.pp > 1 else ("auto", "reversed")
    needs = {"sequence_parallel": mesh.tp, "layout": mesh.cp, "layers": mesh.pp, "schedule": mesh.pp}
    return every if needs.get(option, 2) > 1 else ()


def applicable_pairs(meshes: Sequence[str]) -> set[Pair]:
    """Every pair of values, of two options or of a mesh and an option, that some mesh can show together."""
    pairs: set[Pair] = set()
    for words in meshes:
        mesh = parse_mesh(words)
        factors = [("mesh", (words,)), *((option, values(mesh, option)) for option in OPTIONS)]
        for (f, left), (g, right) in combinations(factors, 2):
            pairs.update(((f, v), (g, w)) for v in left for w in right)
    return pairs


def pairs_of(row: Row) -> Iterator[Pair]:
    """The pairs that a row walks."""
    named = [(name, row[name]) for name in ("mesh", *OPTIONS) if name in row]
    return combinations(named, 2)


def covering_array(meshes: Sequence[str]) -> list[Row]:
    """Rows that together walk every applicable pair, by a greedy choice after AETG (Cohen et al. 1997).

    The same meshes give the same rows. Each row starts from the mesh with most to show, and each option takes, in
    turn, the value that walks most pairs not walked yet.
    """
    meshes = list(dict.fromkeys(meshes))
    open_pairs = applicable_pairs(meshes)
    rows: list[Row] = []
    used: dict[tuple[str, str], int] = {}
    while open_pairs:
        candidates = [_extend({"mesh": words}, open_pairs, used) for words in meshes]
        # A small mesh where it shows as much: its ranks are fewer.
        gains = [(sum(p in open_pairs for p in pairs_of(row)), -parse_mesh(row["mesh"]).world) for row in candidates]
        row = candidates[gains.index(max(gains))]
        if max(gains)[0] == 0:    # the greedy choice never meets what is left: start from it
            row = _extend(_start_from(min(open_pairs), meshes), open_pairs, used)
        open_pairs.difference_update(pairs_of(row))
        for item in row.items():
            used[item] = used.get(item, 0) + 1
        rows.append(row)
    return sorted(rows, key=lambda row: meshes.index(row["mesh"]))


def _start_from(pair: Pair, meshes: Sequence[str]) -> Row:
    """The beginning of a row that walks `pair`, on the first mesh where both values apply."""
    wanted = dict(pair)
    words = wanted.pop("mesh", None) or next(
        w for w in meshes if all(v in values(parse_mesh(w), option) for option, v in wanted.items()))
    return {"mesh": words, **wanted}


def _extend(row: Row, open_pairs: set[Pair], used: dict[tuple[str, str], int]) -> Row:
    """Complete a row that has its mesh, and keep what else it has."""
    mesh = parse_mesh(row["mesh"])
    for option in OPTIONS:
        if option in row:
            continue
        best: tuple[int, int] | None = None
        for value in values(mesh, option):
            trial = {**row, option: value}
            gain = sum(p in open_pairs for p in pairs_of(trial) if (option, value) in p)
            score = (gain, -used.get((option, value), 0))
            if best is None or score > best:
                best, chosen = score, value
        if best is not None:
            row = {**row, option: chosen}
    return row
