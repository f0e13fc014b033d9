"""Rows of options that the tests of schedules and of ZeRO verify: the usual ones, and with --all the whole product."""

from __future__ import annotations

from megafour.verify.matrix import Row, parse_mesh

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b:1", "interleaved_1f1b:2", "interleaved_1f1b:3", "zb_h1", "zb_h2",
             "zb_v", "v_half", "v_min", "dualpipe_v")
"""Every pipeline schedule; `:` and the stages a rank where that is a choice."""

PLAIN: Row = {"kv_heads": "grouped", "recompute": "none", "valid": "uneven", "tied": "false", "micro_batch_size": "1",
               "dropout": "off", "family": "llama", "qk_norm": "false", "optimizer": "adamw", "clip": "off",
               "documents": "off", "window": "none", "layers": "even"}

_MIXED: tuple[Row, ...] = (
    {"mesh": "pp2-tp2", "sequence_parallel": "true", "tied": "true", "recompute": "full"},
    {"mesh": "pp2-cp2", "layers": "uneven", "dropout": "on", "family": "gpt2"},
    {"mesh": "dp2-pp2", "zero_stage": "1", "tied": "true", "layers": "explicit", "valid": "empty-rank"},
    {"mesh": "pp4-tp2", "sequence_parallel": "true", "dropout": "on", "layers": "uneven"},
    {"mesh": "pp4-cp2", "tied": "true", "recompute": "selective", "documents": "on"},
    {"mesh": "dp2-pp4", "zero_stage": "1", "recompute": "full", "dropout": "on"},
    {"mesh": "dp2-pp2-tp2-cp2", "zero_stage": "1", "tied": "true", "family": "gpt2", "recompute": "full"},
    {"mesh": "pp2-cp2", "method": "ulysses", "documents": "on", "recompute": "full"},
    {"mesh": "pp2-cp2", "method": "all_gather", "layout": "striped", "documents": "on", "window": "pattern"},
    {"mesh": "pp2-cp4", "method": "usp", "documents": "on", "layers": "uneven"},
    {"mesh": "pp2-cp4", "method": "double_ring", "layout": "contiguous", "documents": "on", "dropout": "on"},
)
"""What is mixed with a schedule, beside the number of micro-batches: as many rows as there are schedules."""


def schedule_rows(*, whole: bool) -> list[Row]:
    """Every schedule at pp 2 and 4 with 1, 3, 4 and 8 micro-batches, and each with other axes and options.

    Not `whole`: each (schedule, pp) and one of the mixed rows for each schedule, in turn, so that all of them come up
    once, as do the numbers of micro-batches.
    """
    counts, rows = ("1", "3", "4", "8"), []
    for number, schedule in enumerate(SCHEDULES):
        plain: list[Row] = [{"mesh": "pp2"}, {"mesh": "pp4"}]
        mixed = _MIXED if whole else (_MIXED[number % len(_MIXED)],)
        for place, extra in enumerate([*plain, *mixed]):
            one = counts[(number + place) % len(counts)]
            for count in counts if whole and place < len(plain) else (one,):
                rows.append({**PLAIN, **extra, "schedule": schedule, "micro_batches": count})
    return rows


_SHARED: tuple[Row, ...] = (
    {"mesh": "dp2", "tied": "true", "recompute": "full"},
    {"mesh": "dp2-tp2", "sequence_parallel": "true", "qk_norm": "true"},
    {"mesh": "dp2-pp2", "schedule": "1f1b", "tied": "true"},
    {"mesh": "cp2", "valid": "empty-rank"},
    {"mesh": "dp2-pp2", "schedule": "zb_v", "tied": "true", "family": "gpt2"},
    {"mesh": "dp2-pp2", "schedule": "interleaved_1f1b:2", "micro_batches": "4", "recompute": "full"},
    {"mesh": "dp2-cp2", "tied": "true", "recompute": "selective", "clip": "tight"},
    {"mesh": "dp2-pp2-tp2", "kv_heads": "one", "schedule": "zb_h1", "tied": "true", "family": "gpt2"},
    {"mesh": "dp4", "optimizer": "sgd", "dropout": "on"},
    {"mesh": "dp2-pp2", "schedule": "dualpipe_v", "micro_batches": "4", "tied": "true", "recompute": "full"},
    {"mesh": "dp2-pp4", "schedule": "zb_h2", "micro_batches": "4"},
    {"mesh": "dp2-pp2-tp2-cp2", "tied": "true", "recompute": "full", "family": "gpt2"},
)
"""What is mixed with a stage of ZeRO, with 3 micro-batches where it says no number."""


def zero_rows(*, whole: bool) -> list[Row]:
    """ZeRO 2, 3 and hybrid sharding of every stage, each on every mixed row where its ranks allow it.

    Not `whole`: ZeRO 2 and 3 alone, with tp, pp, cp and over a V, and one hybrid row of each.
    """
    rows: list[Row] = []
    for stage in ("2", "3", "1:2", "2:2", "3:2"):
        size = 4 if ":" in stage else 2
        wide = [row for row in _SHARED if parse_mesh(row["mesh"]).dp * parse_mesh(row["mesh"]).cp >= size]
        chosen = wide if whole else wide[:1] if size == 4 else wide[:5]
        rows += [{**PLAIN, "micro_batches": "3", **row, "zero_stage": stage} for row in chosen]
    return rows
