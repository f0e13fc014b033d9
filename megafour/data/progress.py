"""How far each source of the training blend has been read, and how a blend that was changed goes on from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megafour.data.dataset import GlobalDataset, Source
from megafour.data.permute import Blend


def positions(dataset: GlobalDataset, consumed: int) -> dict[str, Any]:
    """What a checkpoint keeps of a blend, ready for JSON.

    Args:
        consumed: global samples that the run has consumed.
    Returns:
        `begin` (global sample with which this blend began), `seq_length`, and for each of `sources` its path, tokens,
        number (which its order of samples depends on), weight, `start` (its own samples consumed at `begin`) and
        `consumed` (until now). `retired`: the same of sources that an earlier blend had.
    """
    blend = dataset.blend
    sources = [dict(path=source.data.prefix, tokens=source.num_tokens, number=source.number, weight=weight, start=start,
                    consumed=start + blend.count(index, consumed - dataset.begin))
               for index, (source, weight, start) in enumerate(
                   zip(dataset.sources, dataset.weights, dataset.starts, strict=True))]
    return dict(begin=dataset.begin, seq_length=dataset.seq_length, sources=sources, retired=dataset.retired)


def changed(dataset: GlobalDataset, saved: dict[str, Any]) -> str | None:
    """How the blend differs from the saved one, as `old -> new`; None when it is the same, wherever its files lie."""
    old = saved["sources"]
    same = len(old) == len(dataset.sources) and all(map(_is, dataset.sources, old))
    if same and Blend([one["weight"] for one in old]).counts == dataset.blend.counts:
        return None
    new = [dict(path=source.data.prefix, weight=weight)
           for source, weight in zip(dataset.sources, dataset.weights, strict=True)]
    return " -> ".join(", ".join(f"{one['path']} ({one['weight']:g})" for one in blend) for blend in (old, new))


def go_on(dataset: GlobalDataset, saved: dict[str, Any], consumed: int) -> list[str]:
    """Read on where the saved run stopped: the same blend goes on in its order; of a changed one the sources that were
    there before go on after their own last sample, and new ones start at 0.

    Args:
        dataset: the training set as the config has it; changed in place.
        saved: what `positions` gave.
        consumed: global samples that the run has consumed.
    Returns:
        a line for each source, where the blend has changed.
    """
    dataset.retired = saved["retired"]
    length, new_length = saved["seq_length"], dataset.seq_length
    if changed(dataset, saved) is None and length == new_length:
        dataset.begin, dataset.starts = saved["begin"], [one["start"] for one in saved["sources"]]
        for source, one in zip(dataset.sources, saved["sources"], strict=True):
            source.renumber(one["number"])
        return []
    known = [*saved["sources"], *saved["retired"]]
    free = max(one["number"] for one in known) + 1
    dataset.begin, dataset.starts, notes = consumed, [], []
    for source in dataset.sources:
        found = next((one for one in known if _is(source, one)), None)
        if found is None:
            start, number, free = 0, free, free + 1
        else:
            known.remove(found)
            start, number = -(-found["consumed"] * length // new_length), found["number"]   # as many tokens
        source.renumber(number)
        dataset.starts.append(start)
        notes.append(f"data.train: {source.data.prefix} {'goes on' if found else 'starts'} at its sample {start}")
    dataset.retired = known
    return notes


def _is(source: Source, one: dict[str, Any]) -> bool:
    """Whether a source is the one that was saved: the same file, or one of its name and length elsewhere."""
    here, there = Path(source.data.prefix), Path(one["path"])
    moved = source.num_tokens == one["tokens"] and here.name == there.name
    return moved or here.absolute() == there.absolute()
