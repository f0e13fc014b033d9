"""From token streams to numbered samples: which tokens the run's sample number i holds, alike on every mesh.

A source is one indexed dataset, or the part of its documents that a split takes. Its documents stay in file order as
one token stream, end-of-document marks included; sample k of an epoch is the window of seq+1 tokens that begins at k x
seq, so that every token is predicted once. The windows of an epoch are visited in the order of a permutation keyed by
(seed, source, epoch). Epoch 0 cuts from the stream's first token; later epochs start at another place of the stream,
taken as a ring, so that windows are cut elsewhere and the remainder (under one sample) that an epoch leaves out is
another one each time.

Nothing is built, stored or shared: opening is two memory maps per source, whatever its size, and there is no cache to
race for. Since windows hold neighbouring documents, a corpus sorted by kind is better shuffled before it is prepared.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from megafour.data import fingerprint
from megafour.data.batch import PAD
from megafour.data.description import check_tokenizer
from megafour.data.errors import DataError
from megafour.data.indexed import IndexedDataset, check_ids
from megafour.data.permute import Blend, Permutation, address
from megafour.data.tokenizer import TokenizerInfo


class Source:
    """The documents [first, last) of one indexed dataset as windows of seq_length + 1 tokens.

    `tail` keeps the last, shorter window (padded) as well: an evaluation then predicts every token once.
    """

    def __init__(
        self,
        data: IndexedDataset,
        seq_length: int,
        *,
        seed: int,
        number: int = 0,
        documents: tuple[int, int] | None = None,
        vocab_size: int | None = None,
        tail: bool = False,
    ) -> None:
        first, last = documents or (0, data.num_documents)
        self.data, self.seq_length, self.vocab_size = data, seq_length, vocab_size
        self._start = data.token_offset(first)
        self.num_tokens = data.token_offset(last) - self._start
        steps = self.num_tokens - 1
        self.num_samples = -(-steps // seq_length) if tail else steps // seq_length
        if self.num_samples < 1:
            raise DataError(self._too_small(last - first))
        self._seed = seed
        self.renumber(number)

    def renumber(self, number: int) -> None:
        """Take the order of samples that this number stands for: a source keeps its own when a blend changes."""
        self.number = number
        self._key = address(self._seed, number)
        # of one epoch; replaced whole, so that threads that read ahead never mix two
        self._order = (0, self._permutation(0))

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What tells this source from one that is written later under its name, ready for JSON."""
        return dict(path=self.data.prefix, tokens=self.num_tokens, documents=self.data.num_documents,
                    content=fingerprint.content(self.data), description=fingerprint.description(self.data.prefix))

    def _too_small(self, documents: int) -> str:
        if self.num_tokens == 0:
            return f"{self.data.bin_path}: no tokens in its {documents} documents; nothing to read"
        return (
            f"{self.data.bin_path}: {self.num_tokens} tokens in {documents} documents are fewer than one sample of "
            f"data.seq_length + 1 = {self.seq_length + 1}; use more text or a smaller data.seq_length"
        )

    def _permutation(self, epoch: int) -> Permutation:
        return Permutation(self.num_samples, address(self._key, epoch, 0))

    def window(self, index: int) -> np.ndarray:
        """Tokens int64 [seq_length + 1] of the source's sample `index`; with `tail`, PAD after the stream's end."""
        row, size, begin = np.full(self.seq_length + 1, PAD, np.int64), 0, -1
        for first, last in self._ranges(index):
            row[size : size + last - first] = self.data.tokens[first:last]
            size, begin = size + last - first, first if begin < 0 else begin
        if self.vocab_size is not None:
            check_ids(row[:size], self.vocab_size, f"{self.data.bin_path}: the sample at token {begin}")
        return row

    def documents(self, index: int) -> np.ndarray:
        """Which document each token of `window(index)` belongs to: int64 [seq_length + 1] that grow from 0."""
        ids, at, document = np.zeros(self.seq_length + 1, np.int64), 0, -1
        for first, last in self._ranges(index):
            # the last of the documents that begin at or before it: empty ones begin where the next does
            number = bisect_right(range(self.data.num_documents), first, key=self.data.token_offset) - 1
            while first < last:
                number, document = number + 1, document + 1
                end = min(self.data.token_offset(number), last)
                ids[at : at + end - first] = document
                at, document, first = at + end - first, document - (end == first), end
        ids[at:] = document + 1
        return ids

    def _ranges(self, index: int) -> Iterator[tuple[int, int]]:
        """The one or two ranges of the token stream that the source's sample `index` is made of."""
        epoch, place = divmod(index, self.num_samples)
        kept, order = self._order
        if kept != epoch:
            order = self._permutation(epoch)
            self._order = (epoch, order)
        phase = address(self._key, epoch, 1) % self.num_tokens if epoch else 0
        offset = order[place] * self.seq_length
        size = min(self.seq_length + 1, self.num_tokens - offset)
        begin = (phase + offset) % self.num_tokens
        straight = min(size, self.num_tokens - begin)
        yield self._start + begin, self._start + begin + straight
        if straight < size:
            yield self._start, self._start + size - straight


class GlobalDataset:
    """The run's samples by number. Training draws from its sources by weight, each epoch after epoch, without end.

    With `endless=False` (evaluation) the sources are joined, each sample once in a fixed shuffled order, and numbers
    past the end give samples of PAD alone: a batch may reach there, and on every rank alike adds nothing to the loss.
    """

    def __init__(
        self, sources: Sequence[Source], weights: Sequence[float] | None = None, *, seed: int, endless: bool = True
    ) -> None:
        if not sources:
            raise DataError("a dataset needs at least one source")
        self.sources, self.endless = list(sources), endless
        self.seq_length = sources[0].seq_length
        self.weights = [float(weight) for weight in weights or [1] * len(sources)]
        self.begin = 0
        """Global sample with which this blend began (`data/progress.py`)."""
        self.starts = [0] * len(sources)
        """Samples of each source that were consumed before."""
        self.retired: list[dict[str, Any]] = []
        """Where sources stopped that an earlier blend had."""
        self._ends = np.cumsum([source.num_samples for source in sources])
        self.num_samples = int(self._ends[-1])
        self._blend = Blend(list(weights or [1] * len(sources))) if endless else None
        self._order = None if endless else Permutation(self.num_samples, address(seed, 0xE7A1))

    @property
    def blend(self) -> Blend:
        """How the sources of a training set are interleaved."""
        if self._blend is None:
            raise ValueError("an evaluation set has no blend")
        return self._blend

    def locate(self, index: int) -> tuple[int, int] | None:
        """(source, that source's own sample number) of sample `index`; None past the end of an evaluation set."""
        if self._blend is not None:
            source, position = self._blend.locate(index - self.begin)
            return source, self.starts[source] + position
        if self._order is None or index >= self.num_samples:
            return None
        place = self._order[index]
        source = int(np.searchsorted(self._ends, place, side="right"))
        return source, place - (int(self._ends[source - 1]) if source else 0)

    def sample(self, index: int) -> np.ndarray:
        """Tokens int64 [seq_length + 1] of global sample `index`; PAD where there is none.

        Raises DataError, naming the file, when an id lies outside the vocabulary.
        """
        found = self.locate(index)
        if found is None:
            return np.full(self.seq_length + 1, PAD, np.int64)
        source, position = found
        return self.sources[source].window(position)

    def documents(self, index: int) -> np.ndarray:
        """Which document each token of `sample(index)` belongs to, int64 [seq_length + 1]; padding is one more."""
        found = self.locate(index)
        if found is None:
            return np.zeros(self.seq_length + 1, np.int64)
        return self.sources[found[0]].documents(found[1])


@dataclass(frozen=True)
class Datasets:
    """What a run reads: the training set, the named validation sets, and the split's test set."""

    train: GlobalDataset
    valid: dict[str, GlobalDataset]
    test: GlobalDataset | None
    tokenizer: str = ""
    """Hash of the tokenizer that made the tokens; empty when it is not known."""


def build_datasets(config: Any, tokenizer: TokenizerInfo) -> Datasets:
    """Opens every dataset that `data` of the config names.

    `data.split` ("98,1,1") cuts each training source by documents into train, validation ("valid") and test. Sets in
    `data.valid` are read whole. Raises DataError for a missing or broken file, a tokenizer other than the one a dataset
    was made with, a source with less than one sample, a share of the split that gets no document, and one name for two
    validation sets.
    """
    data = config.data
    reader = _Reader(config.run.seed, data.seq_length, tokenizer)
    shares = parse_split(data.split)
    if not any(entry.weight > 0 for entry in data.train):
        raise DataError("data.train names no dataset (with a weight above 0)")
    train, valid = reader.blend([entry for entry in data.train if entry.weight > 0], shares, 0), {}
    for name, entries in (data.valid or {}).items():
        valid[name] = reader.joined(entries)
    if shares and shares[1]:
        if "valid" in valid:
            raise DataError(
                f'data.split={data.split} makes a validation set named "valid", and data.valid has one too; rename it'
            )
        valid["valid"] = reader.joined(data.train, shares, 1)
    test = reader.joined(data.train, shares, 2) if shares and shares[2] else None
    return Datasets(train, valid, test, tokenizer.hash)


class _Reader:
    """Opens sources under one seed, sequence length and tokenizer."""

    def __init__(self, seed: int, seq_length: int, tokenizer: TokenizerInfo) -> None:
        self.seed, self.seq_length, self.tokenizer = seed, seq_length, tokenizer

    def blend(self, entries: Sequence[Any], shares: list[float] | None, part: int) -> GlobalDataset:
        sources = [self._open(entry.path, number, shares, part, False) for number, entry in enumerate(entries)]
        return GlobalDataset(sources, [entry.weight for entry in entries], seed=self.seed)

    def joined(self, entries: Sequence[Any], shares: list[float] | None = None, part: int = 0) -> GlobalDataset:
        sources = [self._open(entry.path, number, shares, part, True) for number, entry in enumerate(entries)]
        return GlobalDataset(sources, seed=self.seed, endless=False)

    def _open(self, path: str, number: int, shares: list[float] | None, part: int, tail: bool) -> Source:
        data = IndexedDataset(path)
        check_tokenizer(data.prefix, self.tokenizer)
        documents = None
        if shares:
            bounds = split_bounds(data.num_documents, shares)
            documents = (bounds[part], bounds[part + 1])
            if documents[0] == documents[1]:
                name = ("train", "validation", "test")[part]
                raise DataError(
                    f"data.split leaves no document for {name} in {data.idx_path} ({data.num_documents} documents)"
                )
        return Source(
            data,
            self.seq_length,
            seed=self.seed,
            number=number,
            documents=documents,
            vocab_size=self.tokenizer.vocab_size,
            tail=tail,
        )


def parse_split(split: str | Sequence[float] | None) -> list[float] | None:
    """'98,1,1' or [98, 1, 1] -> three shares of one (train, validation, test; missing ones 0); None for None."""
    if split is None:
        return None
    try:
        parts = [float(part) for part in (split.split(",") if isinstance(split, str) else split)]
    except ValueError:
        parts = []
    if not 1 <= len(parts) <= 3 or not np.isfinite(parts).all() or min(parts) < 0 or parts[0] == 0:
        raise DataError(f'data.split={split}: write the shares of train, validation and test, as in "98,1,1"')
    parts += [0.0] * (3 - len(parts))
    return [part / sum(parts) for part in parts]


def split_bounds(documents: int, shares: Sequence[float]) -> list[int]:
    """Document numbers at which train, valid and test begin, and the end: four numbers from 0 to `documents`."""
    bounds = [0]
    for end in np.cumsum(shares):
        bounds.append(min(documents, int(round(float(end) * documents))))
    bounds[-1] = documents
    return bounds
