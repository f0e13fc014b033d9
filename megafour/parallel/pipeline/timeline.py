"""Timelines of a pipeline, predicted or measured: as text for a terminal, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megafour.parallel.pipeline.actions import Kind, Table, Work
from megafour.parallel.pipeline.check import Report

COLOURS = {Kind.FORWARD: "#4c8bf5", Kind.BACKWARD: "#f2994a", Kind.BACKWARD_INPUT: "#f2c14e",
           Kind.BACKWARD_WEIGHT: "#6fbf73"}
"""Forward blue, whole backward orange, its two halves yellow and green; a second stage of a rank is paler."""

MEANING = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.BACKWARD_INPUT: "input gradient",
           Kind.BACKWARD_WEIGHT: "weight gradient"}


@dataclass(frozen=True)
class Timeline:
    """What each rank did, from when to when, in one unit of time, with a caption."""

    rows: tuple[tuple[tuple[Work, float, float], ...], ...]
    caption: str

    @property
    def start(self) -> float:
        """When the first rank begins."""
        return min(row[0][1] for row in self.rows)

    @property
    def end(self) -> float:
        """When the last rank ends."""
        return max(row[-1][2] for row in self.rows)


def predicted(name: str, table: Table, report: Report) -> Timeline:
    """The timeline that the checker found."""
    held = len(table.placement.stages_of[0])
    stages = f"{table.placement.ranks} ranks" + (f" of {held} stages" if held > 1 else "")
    return Timeline(report.spans, f"{name}: {stages}, {table.microbatches} micro-batches; bubble {report.bubble:.1%}, "
                                  f"of the makespan {report.makespan_bubble:.1%}; at most {max(report.peak_live):g} "
                                  "micro-batches live on a rank")


def measured(table: Table, spans: Sequence[Sequence[tuple[str, float, float]]]) -> Timeline:
    """The timeline of a real run: per rank (action, start, end) in seconds.

    The bubble is that of the definition, with the measured work of the busiest rank: its idle share.
    """
    rows = tuple(tuple((step.compute, start, end) for step, (_, start, end) in zip(
        (step for step in steps if step.compute is not None), row, strict=True))
        for steps, row in zip(table.steps, spans, strict=True))
    return Timeline(rows, f"measured: {max(row[-1][2] for row in rows) - min(row[0][1] for row in rows):.4g} s; bubble "  # type: ignore[arg-type]
                          f"{measured_bubble(spans):.1%}")


def measured_bubble(spans: Sequence[Sequence[tuple[str, float, float]]]) -> float:
    """1 − mean work of a rank / max over ranks (last end − first start), of measured (action, start, end)."""
    work = sum(end - start for row in spans for _, start, end in row) / len(spans)
    return 1 - work / max(row[-1][2] - row[0][1] for row in spans)


def as_text(timeline: Timeline, width: int = 150) -> str:
    """One line a rank: a column for a unit of time, the micro-batch's number where its action starts.

    Capitals are a rank's first stage, small letters a later one: F forward, B backward, I and W its halves.
    """
    span = timeline.end - timeline.start
    shortest = min(end - start for row in timeline.rows for _, start, end in row)
    scale = min(width, 3 * span / shortest if shortest else width) / span if span else 1.0
    lines = []
    for rank, row in enumerate(timeline.rows):
        line = [" "] * (round(span * scale) + 1)
        for work, start, end in row:
            share = (end - start) / len(work.parts)
            for place, action in enumerate(work.parts):
                a = round((start + place * share - timeline.start) * scale)
                b = round((start + (place + 1) * share - timeline.start) * scale)
                letter = action.kind.value if action.chunk == 0 else action.kind.value.lower()
                label = f"{letter}{action.microbatch}"
                cell = label.ljust(b - a, "·") if len(label) < b - a else label[:max(b - a, 1)]
                line[a:b] = cell[:max(b - a, 0)]
        lines.append(f"{rank:>3} |{''.join(line).rstrip()}")
    return "\n".join([*lines, timeline.caption])


def draw(timelines: Sequence[Timeline], path: Path) -> None:
    """Write a picture (.svg or .png): one panel a timeline, one row a rank, the micro-batch's number on each action."""
    import matplotlib
    from matplotlib.figure import Figure

    ranks = max(len(timeline.rows) for timeline in timelines)
    figure = Figure(figsize=(14, len(timelines) * (0.9 + 0.33 * ranks)), layout="constrained")
    panels = figure.subplots(len(timelines), squeeze=False)[:, 0]
    for timeline, axes in zip(timelines, panels, strict=True):
        _panel(axes, timeline)
    with matplotlib.rc_context({"svg.hashsalt": "megafour", "svg.fonttype": "none"}):    # one table, one file
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=140)


def _panel(axes: Any, timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    span = timeline.end - timeline.start
    seen: dict[Kind, Any] = {}
    for rank, row in enumerate(timeline.rows):
        for work, start, end in row:
            share = (end - start) / len(work.parts)
            for place, action in enumerate(work.parts):
                left = start - timeline.start + place * share
                axes.barh(rank, share, left=left, height=0.9, color=COLOURS[action.kind], edgecolor="white",
                          linewidth=0.4, alpha=1.0 if action.chunk == 0 else 0.6)
                seen.setdefault(action.kind, Patch(color=COLOURS[action.kind], label=MEANING[action.kind]))
                if share > span / 160:
                    axes.text(left + share / 2, rank, str(action.microbatch), ha="center", va="center", fontsize=6)
            if len(work.parts) == 2:    # one frame around what runs as one
                axes.barh(rank, end - start, left=start - timeline.start, height=0.9, fill=False, edgecolor="black",
                          linewidth=0.7)
    axes.set(yticks=range(len(timeline.rows)), ylabel="rank", xlim=(0, span), ylim=(len(timeline.rows) - 0.5, -0.5))
    axes.set_title(timeline.caption, fontsize=9, loc="left")
    axes.legend(handles=list(seen.values()), fontsize=7, ncols=4, loc="upper right", bbox_to_anchor=(1, 1.22),
                frameon=False)
