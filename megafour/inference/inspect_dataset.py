"""What a tokenized dataset holds, in words; of two, what differs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megafour.data.description import read_info
from megafour.data.errors import DataError
from megafour.data.indexed import IndexedDataset
from megafour.data.tokenizer import Tokenizer, load_tokenizer

SHOWN = 64
"""Tokens of the sample."""


@dataclass(frozen=True)
class Contents:
    """An open dataset and its documents."""

    dataset: IndexedDataset
    lengths: np.ndarray
    """Tokens of each document, i64."""

    @classmethod
    def open(cls, prefix: str) -> Contents:
        """Raises DataError for a dataset that is damaged."""
        dataset = IndexedDataset(prefix)
        ends = np.concatenate([[0], np.cumsum(dataset.lengths, dtype=np.int64)])
        return cls(dataset, np.diff(ends[dataset.documents]))

    def document(self, index: int) -> np.ndarray:
        """A document's token ids."""
        start = self.dataset.token_offset(index)
        return np.asarray(self.dataset.tokens[start : start + int(self.lengths[index])])

    def facts(self) -> dict[str, object]:
        """Counts, by what they count."""
        lengths, info = self.lengths, (read_info(self.dataset.prefix) or {}).get("tokenizer", {})
        longest = int(lengths.argmax()) if len(lengths) else 0
        found: dict[str, object] = {
            "documents": len(lengths), "sequences": len(self.dataset), "tokens": len(self.dataset.tokens),
            "type": self.dataset.dtype.name, "empty documents": int((lengths == 0).sum())}
        if len(lengths):
            found["longest"] = f"document {longest}, {int(lengths[longest]):,} tokens"
            found["mean"] = f"{lengths.mean():.1f} tokens"
        if info:
            found["tokenizer"] = f"{info.get('kind')}, vocabulary {info.get('vocab_size')}, hash {info.get('hash')}"
        return found


def dataset_lines(prefix: str, tokenizer: Tokenizer | None, document: int = 0) -> Iterator[str]:
    """Documents, tokens, the longest, and the start of one document, decoded where a tokenizer is known."""
    contents = Contents.open(prefix)
    yield f"dataset {contents.dataset.prefix}"
    for name, value in contents.facts().items():
        yield f"{name:<16}{value:,}" if isinstance(value, int) else f"{name:<16}{value}"
    if not 0 <= document < len(contents.lengths):
        if document or len(contents.lengths):
            raise DataError(f"{prefix} has {len(contents.lengths)} documents, numbered from 0; there is no {document}")
        return
    ids = contents.document(document)
    shown = ids[:SHOWN].tolist()
    more = f" and {len(ids) - SHOWN:,} more" if len(ids) > SHOWN else ""
    yield f"document {document} begins, {len(shown)} tokens{more}:"
    tokenizer = tokenizer or _own_tokenizer(contents.dataset.prefix)
    yield " ".join(map(str, shown)) if tokenizer is None else repr(tokenizer.decode(shown))
    if tokenizer is None:
        yield "(token ids: give --tokenizer KIND:PATH for text)"


def _own_tokenizer(prefix: str) -> Tokenizer | None:
    """The tokenizer that was trained with the dataset and lies beside it, or plain bytes."""
    info = (read_info(prefix) or {}).get("tokenizer", {})
    if info.get("kind") == "bytes":
        return load_tokenizer("bytes")
    name = Path(str(info.get("file") or "")).name
    if not name or not Path(prefix).with_name(name).is_file():
        return None
    found = load_tokenizer(str(info["kind"]), Path(prefix).with_name(name))
    return found if found.hash == info.get("hash") else None


def dataset_differences(first: str, second: str) -> Iterator[str]:
    """Counts that differ, and the first document that does."""
    a, b = Contents.open(first), Contents.open(second)
    yield f"{a.dataset.prefix} and {b.dataset.prefix}"
    ours, theirs = a.facts(), b.facts()
    for name in dict.fromkeys([*ours, *theirs]):
        if ours.get(name) != theirs.get(name):
            yield f"{name}: {ours.get(name)} -> {theirs.get(name)}"
    count = min(len(a.lengths), len(b.lengths))
    for index in range(count):
        x, y = a.document(index), b.document(index)
        if not np.array_equal(x, y):
            same = min(len(x), len(y))
            at = int(np.argmax(x[:same] != y[:same])) if (x[:same] != y[:same]).any() else same
            yield f"the first document that differs is {index}, from its token {at} on"
            return
    yield ("all documents are equal" if len(a.lengths) == len(b.lengths)
           else f"the first {count} documents are equal")
