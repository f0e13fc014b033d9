"""The table of a step's traffic: what the ledger counted beside what the formulas say."""

from __future__ import annotations

from megafour.comm.ledger import CONTROL, Entry
from megafour.config.schema import Config
from megafour.cost.step import Place, Reach, Stages, StepTraffic
from megafour.cost.traffic import Traffic
from megafour.data.batch import MicroBatch
from megafour.mesh import Mesh
from megafour.model.stage import layout_of
from megafour.parallel.context import places_of
from megafour.parallel.context.mask import Masks
from megafour.parallel.pipeline.partition import partition_layers
from megafour.parallel.pipeline.select import pipeline_of
from megafour.parallel.tensor.cross_entropy import chunk_tokens
from megafour.sizes import PRODUCTION, Sizes
from megafour.trainer.step import TrainState


def formulas(config: Config, mesh: Mesh, vocab_size: int, sizes: Sizes = PRODUCTION) -> StepTraffic:
    """The formulas for a resolved config, from where this rank stands."""
    place = Place(mesh.group("pp").rank, mesh.group("tp").rank, mesh.group("ring").rank, mesh.group("dp_cp").rank)
    pipeline = pipeline_of(config)
    spans = partition_layers(config, pipeline, vocab_size)
    stages = Stages(pipeline.placement.rank_of, [range(first, first + count) for first, count in spans])
    return StepTraffic(config, place, stages, vocab_size, sizes)


def predicted(config: Config, mesh: Mesh, vocab_size: int, batches: list[MicroBatch], *,
              updated: bool = True, sizes: Sizes = PRODUCTION) -> Traffic:
    """Bytes of the step on these micro-batches; `updated`: whether the optimizer stepped."""
    return formulas(config, mesh, vocab_size, sizes).step(
        chunk_tokens=chunk_tokens(-(-vocab_size // mesh.tp), sizes), reach=_reach(config, mesh, batches),
        updated=updated)


def _reach(config: Config, mesh: Mesh, batches: list[MicroBatch]) -> Reach | None:
    """How far keys travel, asked of the batch itself where packed documents end their way; None where none do."""
    if all(batch.document_starts is None for batch in batches) or mesh.cp == 1:
        return None
    places = places_of(layout_of(config, mesh), mesh)
    masks = [Masks(batch.document_starts) for batch in batches]
    return lambda index, window: places.reach(masks[index].within(window))


def table(config: Config, state: TrainState, batches: list[MicroBatch], seconds: float, *, updated: bool = True) -> str:
    """This rank's traffic in a step that took `seconds`, as aligned text: one row for each axis and primitive."""
    mesh, ledger = state.mesh, state.mesh.ledger
    assert ledger is not None
    want = predicted(config, mesh, state.stage.build.vocab_size, batches, updated=updated, sizes=state.buckets.sizes)
    said = {(axis, primitive): nbytes for axis, primitive, _, nbytes in want.rows()}
    counted = ledger.totals()
    lines = [f"{'axis':<12}{'primitive':<16}{'calls':>8}{'bytes':>18}{'predicted':>18}{'time':>8}"]
    for key in sorted(counted.keys() | said.keys()):
        lines.append(_line(*key, counted.get(key, Entry()), said.get(key, 0), seconds))
    together = Entry(sum(e.calls for e in counted.values()), sum(e.nbytes for e in counted.values()),
                     sum(e.seconds for e in counted.values()))
    lines.append(_line("total", "", together, want.nbytes, seconds))
    control = [entry for (_, _, phase), entry in ledger.counts.items() if phase == CONTROL]
    if control:
        share = sum(entry.seconds for entry in control) / seconds
        lines.append(f"apart: {sum(entry.calls for entry in control)} all-reduces of control scalars, "
                     f"{round(sum(entry.nbytes for entry in control))} bytes, {share:.1%} of the time")
    return "\n".join(lines)


def _line(axis: str, primitive: str, entry: Entry, want: int, seconds: float) -> str:
    differs = "" if round(entry.nbytes) == want else "  differs"
    return (f"{axis:<12}{primitive:<16}{entry.calls:>8}{round(entry.nbytes):>18,}{want:>18,}"
            f"{entry.seconds / seconds:>8.1%}{differs}")
