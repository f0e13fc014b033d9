"""The `parallel` section: the mesh, and how each axis of it works."""

from typing import Annotated, Literal

from pydantic import Field

from megafour.config.base import Count, Location, Section, Text

AXES = ("tp", "ulysses", "ring", "dp", "pp")
"""Axes of the grid in the default rank order, fastest first: the chattiest axis gets the nearest ranks. cp is ulysses ·
ring."""

ORDERS = {"auto": AXES, "pp-outer": AXES, "pp-inner": ("tp", "ulysses", "ring", "pp", "dp")}
"""Named rank orders; any other permutation is given as `tp-ulysses-ring-dp-pp`, fastest first."""


class ContextConfig(Section):
    """How a long sequence is split over the cp axis."""

    method: Literal["ring", "double_ring", "ulysses", "usp", "all_gather"] = "ring"
    """How queries meet keys that live on other ranks. `ring`: keys travel point to point, overlapped with compute.
    `double_ring`: a ring inside a node in a ring across nodes. `ulysses`: an all-to-all splits heads instead.
    `usp`: ulysses inside, a ring outside. `all_gather`: every rank gathers the keys, a head at a time."""

    layout: Literal["zigzag", "contiguous", "striped"] = "zigzag"
    """Which positions rank r of R holds. `zigzag`: chunks r and 2R-1-r of 2R, which levels the work of causal
    attention; `striped`: every R-th token from r, which levels it too; `contiguous`: chunk r of R, which does not."""

    ulysses: Literal["auto"] | Count = "auto"
    """Ranks of the cp axis that split heads instead of the sequence; cp = ring · ulysses. `auto`: all of them for
    `ulysses`, as many as divide cp and the key/value heads of a rank for `usp`, else 1."""

    inner_ring: Count | None = None
    """Adjacent ranks of the inner ring of `double_ring`: those of one node. Null for every other method."""

    fp32_blocks: bool = False
    """Compute 16-bit attention blocks in fp32, so that joining them adds no rounding: more compute, no more error than
    on one rank."""


class PipelineConfig(Section):
    """How layers and micro-batches are spread over the pp axis."""

    schedule: Location = "1f1b"
    """Order of forwards and backwards ([schedules.md](schedules.md)): `gpipe`, `1f1b`, `interleaved_1f1b`, `zb_h1`,
    `zb_h2`, `zb_v`, `v_half`, `v_min`, `dualpipe_v`, or a table of your own: `PATH.csv`, `PATH.json`,
    `PATH.py:function`."""

    virtual_stages: Count | None = None
    """Stages that each pipeline rank holds: any number for `interleaved_1f1b`, 2 for the schedules over a V (`zb_v`,
    `v_half`, `v_min`, `dualpipe_v`), 1 for the others. null: 2 for those over a V, else 1."""

    partition: Literal["auto"] | Annotated[list[int], Field(min_length=1)] = "auto"
    """Layers on each stage, such as `[7, 8, 8, 7]`; with virtual stages pp · virtual_stages counts, in the order in
    which activations pass them. `auto` makes the slowest rank's work least, embedding and head counted, then memory."""


class ParallelConfig(Section):
    """The mesh: world = dp · pp · tp · cp."""

    dp: Literal["auto"] | Count = "auto"
    """Data-parallel replicas. `auto`: world / (pp · tp · cp)."""

    pp: Count = 1
    """Pipeline stages."""

    tp: Count = 1
    """Ranks that split every matrix (tensor parallelism)."""

    cp: Count = 1
    """Ranks that split every sequence (context parallelism)."""

    ep: Count = 1
    """Ranks that split experts. This version: 1."""

    order: Text = "auto"
    """Order of ranks, fastest axis first. `auto` and `pp-outer`: `tp-ulysses-ring-dp-pp`; `pp-inner`: pp inside dp,
    `tp-ulysses-ring-pp-dp`; or these five axes in any order, joined by `-`."""

    sequence_parallel: bool = True
    """Split norms, dropout and residuals along the sequence over tp. No effect where tp is 1."""

    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    """What the dp · cp ranks with the same weights share instead of repeating ([zero.md](zero.md)): 0 nothing, 1 the
    optimizer's state, 2 gradients too, 3 weights too, gathered for each block's forward and backward."""

    zero_size: Count | None = None
    """Ranks that share one copy of what `zero_stage` shares, nearest ones first: those of a node, so that only sums of
    shares go between nodes (hybrid sharding). Divides dp · cp. null: all of dp · cp."""

    context: ContextConfig = ContextConfig()
    """How the cp axis works."""

    pipeline: PipelineConfig = PipelineConfig()
    """How the pp axis works."""
