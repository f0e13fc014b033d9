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
        `begin` (global sample with which this blend began), `seq_length`, and for each of `sources` its identity (path,
        tokens, documents, checksums), number (which its order of samples depends on), weight, `start` (its own samples
        consumed at `begin`) and `consumed` (until now). `retired`: the same of sources that an earlier blend had.
    """
    blend = dataset.blend
    sources = [dict(source.identity, number=source.number, weight=weight, start=start,
                    consumed=start + blend.count(index, consumed - dataset.begin))
               for index, (source, weight, start) in enumerate(
                   zip(dataset.sources, dataset.weights, dataset.starts, strict=True))]
    return dict(begin=dataset.begin, seq_length=dataset.seq_length, sources=sources, retired=dataset.retired)


def changed(dataset: GlobalDataset, saved: dict[str, Any]) -> str | None:
    """How the blend differs from the saved one, in words; None when it is the same, wherever its files lie."""
    old = saved["sources"]
    same = len(old) == len(dataset.sources) and all(map(_is, dataset.sources, old))
    if not (same and Blend([one["weight"] for one in old]).counts == dataset.blend.counts):
        new = [dict(path=source.data.prefix, weight=weight)
               for source, weight in zip(dataset.sources, dataset.weights, strict=True)]
        return " -> ".join(", ".join(f"{one['path']} ({one['weight']:g})" for one in blend) for blend in (old, new))
    return "; ".join(text for text in map(rewritten, dataset.sources, old) if text) or None


def rewritten(source: Source, one: dict[str, Any]) -> str | None:
    """How a source differs from what was saved of it, in words; None when it is the same data.

    A checkpoint of an earlier version has no checksums: then only the number of tokens is compared.
    """
    path = source.data.prefix
    if source.num_tokens != one["tokens"]:
        return f"{path} was rewritten: {one['tokens']:,} -> {source.num_tokens:,} tokens"
    for what, key in (("index or tokens differ", "content"), ("its .json differs", "description")):
        old, new = one.get(key), source.identity[key] if one.get(key) else None
        if old and new and old != new:
            return f"{path} was rewritten: {one['tokens']:,} tokens as before, but {what} (checksum {old} -> {new})"
    return None


def without_checksums(saved: dict[str, Any]) -> list[str]:
    """Paths of the saved sources that carry no checksums."""
    return [one["path"] for one in saved["sources"] if not one.get("content")]


def rewritten_sets(sets: dict[str, GlobalDataset], saved: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, how it differs) of each validation set that names the same data as before, which was rewritten since.

    Args:
        saved: of each set, what its sources' identities were.
    """
    return [(name, text) for name, dataset in sets.items()
            for source, one in zip(dataset.sources, saved.get(name, ()), strict=False)
            if _is(source, one) and (text := rewritten(source, one))]


def go_on(dataset: GlobalDataset, saved: dict[str, Any], consumed: int) -> list[str]:
    """Read on where the saved run stopped: the same blend goes on in its order; of a changed one the sources that were
    there before go on after their own last sample, and new ones start at 0. One whose tokens were rewritten is new:
    which of its samples the run has seen can no longer be told.

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
        found = next((one for one in known if _is(source, one) and _same_tokens(source, one)), None)
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


def _same_tokens(source: Source, one: dict[str, Any]) -> bool:
    """Whether a source's samples are those of the saved one; what is beside them (PREFIX.json) does not count."""
    same = not one.get("content") or one["content"] == source.identity["content"]
    return source.num_tokens == one["tokens"] and same
