"""Text files to one indexed dataset: workers encode chunks, one process writes them in order, and a kill costs seconds.

Until it is whole a dataset lives in PREFIX.partial/; a journal there says up to which chunk it is safely written, and
the same command goes on from it. Order, and so every byte of the result, is that of the input, whatever the number of
workers.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any

import numpy as np

from megafour.config.file_system import Locked, lock, naming, sync
from megafour.config.notes import say_note
from megafour.console import open_console
from megafour.data.encode import Encoded, Recipe, encode_chunk, open_tokenizer, read_texts
from megafour.data.errors import DataError
from megafour.data.indexed import publish, token_dtype, write_index
from megafour.data.mapped import map_file
from megafour.data.sources import Chunk, chunks, fingerprint, line_of, pieces
from megafour.data.tokenizer import TokenizerInfo
from megafour.data.train_tokenizer import train_sentencepiece

FORMAT = 1  # of PREFIX.json
JOURNAL_SECONDS = 5.0
CHUNKS_AHEAD = 4  # per worker: enough to keep it busy while the slowest chunk is written
SMALL_INPUT = 4 << 20  # bytes; starting processes takes longer than encoding this


@dataclass(frozen=True)
class Job:
    """A call of `megafour prepare`. files: the whole corpus, also for a shard. train_vocab: tokenizer to train."""

    files: Sequence[str]
    output: str
    recipe: Recipe
    workers: int = 1
    skip_bad: int = 0
    shard: tuple[int, int] | None = None
    train_vocab: int | None = None
    overwrite: bool = False
    progress: bool = False

    @property
    def prefix(self) -> str:
        """Where this job's dataset goes: the output, or the shard's own prefix."""
        return self.output if self.shard is None else shard_prefix(self.output, *self.shard)


@dataclass
class Counts:
    """What has been safely written so far."""

    chunks: int = 0
    documents: int = 0
    tokens: int = 0
    empty: int = 0
    bad: int = 0


def shard_prefix(output: str, shard: int, shards: int) -> str:
    """Prefix of one shard's dataset."""
    return f"{output}.shard-{shard:05d}-of-{shards:05d}"


def prepare(job: Job, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Runs a job to the end, or finds that it was run before; returns the content of PREFIX.json.

    Raises DataError: a record that cannot be read beyond `skip_bad` (as file:line), no text at all, an existing other
    dataset, another process at work on the same prefix.
    """
    Path(job.prefix).parent.mkdir(parents=True, exist_ok=True)
    recipe = job.recipe
    spec = f"train {job.train_vocab}" if job.train_vocab else open_tokenizer(recipe.kind, recipe.path).hash
    mark = fingerprint(job.files, spec, recipe.json_key, recipe.split_text, recipe.eod)
    if done := finished(job.prefix, mark, job.overwrite):
        say(f"{job.prefix} is complete already: {done['documents']} documents, {done['tokens']} tokens")
        return done
    if job.train_vocab and recipe.path:
        say(f"training a tokenizer of {job.train_vocab} entries")
        train_sentencepiece(corpus(job), job.train_vocab, Path(recipe.path))
    tokenizer = open_tokenizer(recipe.kind, recipe.path)
    if recipe.eod and tokenizer.eod_id is None:
        raise DataError(
            f"{recipe.path}: the tokenizer has no end-of-document token; --no-eod packs documents without a mark"
        )
    for note in tokenizer.notes:
        say_note(note)
    with Partial(job.prefix, mark, tokenizer.info) as partial:
        if partial.counts.chunks:
            say(f"going on after {partial.counts.documents} documents, {partial.counts.tokens} tokens")
        encode_all(job, partial, say)
        if partial.counts.documents == 0 and job.shard is None:
            raise DataError(f"{job.files[0]}{' and others' if len(job.files) > 1 else ''}: no document with any text")
        trained = os.path.basename(recipe.path) if job.train_vocab and recipe.path else None
        return partial.publish(describe(tokenizer.info, partial.counts, mark, trained))


def describe(info: TokenizerInfo, counts: Counts, mark: str, trained: str | None) -> dict[str, Any]:
    """The content of PREFIX.json. trained: name of the tokenizer's file beside the dataset, if it was made with it."""
    dtype = token_dtype(info.vocab_size).name
    tokenizer = {**asdict(info), **({"file": trained} if trained else {})}
    tally = {
        "documents": counts.documents,
        "tokens": counts.tokens,
        "empty_documents": counts.empty,
        "bad_records": counts.bad,
    }
    return {"format": FORMAT, "tokenizer": tokenizer, "dtype": dtype, **tally, "made_from": mark}


def finished(prefix: str, mark: str, overwrite: bool) -> dict[str, Any] | None:
    """The description of the dataset at `prefix` if it was made from the same; refuses another, unless `overwrite`."""
    if not os.path.exists(prefix + ".idx"):
        return None
    try:
        info = json.loads(Path(prefix + ".json").read_text(encoding="utf-8"))
        name = info["tokenizer"].get("file")
        same = info.get("made_from") == mark and (name is None or Path(prefix).with_name(name).is_file())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        same, info = False, None
    if same and os.path.exists(prefix + ".bin") and not overwrite:
        return info
    if not overwrite:
        raise DataError(
            f"{prefix}.idx exists and was made from other inputs or options; use another --output, or --overwrite"
        )
    return None


def corpus(job: Job) -> Iterator[str]:
    """The corpus's texts in order, for a tokenizer's training; records that cannot be read are left to the encoding."""
    for chunk in chunks(pieces(job.files), job.recipe.json_key, job.recipe.split_text):
        yield from read_texts(job.recipe, chunk)[0]


def encode_all(job: Job, partial: Partial, say: Callable[[str], None]) -> None:
    """Encodes what the journal does not hold yet, and writes it in order."""
    parts = pieces(job.files, *(job.shard or (0, 1)))
    size = sum(part.end - part.start for part in parts)
    workers = job.workers if size > SMALL_INPUT else 1
    with progress_bar(size, job.progress) as bar:
        stream = unseen(chunks(parts, job.recipe.json_key, job.recipe.split_text), partial.counts.chunks, bar.update)
        for chunk, encoded in in_order(job.recipe, stream, workers):
            report_bad(job, partial.counts, chunk, encoded, say)
            partial.add(encoded)
            bar.update(chunk.read_bytes)
    partial.save()


def unseen(stream: Iterable[Chunk], seen: int, skipped: Callable[[int], Any]) -> Iterator[Chunk]:
    """The chunks after the first `seen`, which are read (chunks are cut alike each time) but not encoded again."""
    for number, chunk in enumerate(stream):
        if number < seen:
            skipped(chunk.read_bytes)
        else:
            yield chunk


def in_order(recipe: Recipe, stream: Iterable[Chunk], workers: int) -> Iterator[tuple[Chunk, Encoded]]:
    """Encodes chunks in `workers` processes and gives them back in their order, a bounded number at a time."""
    if workers <= 1:
        for chunk in stream:
            yield chunk, encode_chunk(recipe, chunk)
        return
    # One thread a worker; and spawned rather than forked, since the tokenizer libraries run threads of their own.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"),
                               initializer=partial(open_console, tolerant=True))
    pending: deque[tuple[Chunk, Future[Encoded]]] = deque()
    try:
        for chunk in stream:
            pending.append((chunk, pool.submit(encode_chunk, recipe, chunk)))
            if len(pending) > workers * CHUNKS_AHEAD:
                first, future = pending.popleft()
                yield first, future.result()
        while pending:
            first, future = pending.popleft()
            yield first, future.result()
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process died, most likely out of memory; use fewer --workers and start again"
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def report_bad(job: Job, counts: Counts, chunk: Chunk, encoded: Encoded, say: Callable[[str], None]) -> None:
    """Names each record that could not be read; refuses the first one beyond those that may be skipped."""
    for line, reason in encoded.bad:
        counts.bad += 1
        where = f"{chunk.piece.path}:{line_of(chunk, line)}: {reason}"
        if counts.bad > job.skip_bad:
            limit = (
                f" (the {counts.bad}th; --skip-bad {job.skip_bad})"
                if job.skip_bad
                else "; --skip-bad N leaves out up to N"
            )
            raise DataError(where + limit)
        say(f"left out {where}")


@dataclass
class Partial:
    """A dataset in the making: PREFIX.partial/ with its tokens, lengths and journal, held by one process at a time."""

    prefix: str
    mark: str
    info: TokenizerInfo
    counts: Counts = field(default_factory=Counts)

    def __enter__(self) -> Partial:
        self.folder = Path(self.prefix + ".partial")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock: IO[str] = open(self.folder / "lock", "w", encoding="utf-8")
        try:
            lock(self._lock)
        except Locked as error:
            self._lock.close()
            raise DataError(f"{self.folder}: another process is preparing this dataset") from error
        self._resume()
        self._saved = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as closing:
            for file in (self._lock, self._lengths, self._tokens):
                closing.enter_context(naming(file.name))
                closing.callback(file.close)

    def _resume(self) -> None:
        journal = self.folder / "journal.json"
        try:
            known = json.loads(journal.read_text(encoding="utf-8"))
            if known.pop("mark") == [self.mark, self.info.hash]:
                self.counts = Counts(**known)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass  # no journal, or not ours: from the beginning
        itemsize = token_dtype(self.info.vocab_size).itemsize
        self._tokens = self._reopen("tokens.bin", self.counts.tokens * itemsize)
        self._lengths = self._reopen("lengths.i32", self.counts.documents * 4)

    def _reopen(self, name: str, size: int) -> IO[bytes]:
        """Opens a file to go on at `size`: what a killed process wrote after its last journal entry is cut off."""
        path = self.folder / name
        path.touch()
        if path.stat().st_size < size:
            raise DataError(f"{path} is shorter than its journal says; remove {self.folder} and start again")
        os.truncate(path, size)
        return open(path, "ab")

    def add(self, encoded: Encoded) -> None:
        """Appends one chunk's documents; the journal follows every few seconds."""
        for file, data in ((self._tokens, encoded.tokens), (self._lengths, encoded.lengths)):
            with naming(file.name):
                file.write(data)
        self.counts.chunks += 1
        self.counts.documents += len(encoded.lengths) // 4
        self.counts.tokens += len(encoded.tokens) // token_dtype(self.info.vocab_size).itemsize
        self.counts.empty += encoded.empty
        if time.monotonic() - self._saved > JOURNAL_SECONDS:
            self.save()

    def save(self) -> None:
        """Puts what was added on disk, then the journal that says so."""
        for file in (self._tokens, self._lengths):
            sync(file)
        aside = self.folder / "journal.tmp"
        aside.write_text(json.dumps({**asdict(self.counts), "mark": [self.mark, self.info.hash]}), encoding="utf-8")
        publish(aside, self.folder / "journal.json")
        self._saved = time.monotonic()

    def publish(self, description: dict[str, Any]) -> dict[str, Any]:
        """Moves the finished dataset to its prefix; the index comes last, so that a dataset with an index is whole."""
        lengths_file = self.folder / "lengths.i32"
        lengths = map_file(lengths_file, np.dtype("<i4"))
        write_index(self.folder / "index", lengths, token_dtype(self.info.vocab_size))
        (self.folder / "description").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
        Path(self.prefix + ".idx").unlink(missing_ok=True)  # of a dataset that is being replaced
        # The journal goes first: were it to outlive the tokens that it speaks of, a restart would not find them.
        (self.folder / "journal.json").unlink(missing_ok=True)
        publish(self.folder / "tokens.bin", self.prefix + ".bin")
        publish(self.folder / "description", self.prefix + ".json")
        publish(self.folder / "index", self.prefix + ".idx")
        shutil.rmtree(self.folder, ignore_errors=True)
        return description


def progress_bar(size: int, shown: bool) -> Any:
    """A bar over the bytes of the input files, on a terminal."""
    from tqdm import tqdm

    return tqdm(total=size, unit="B", unit_scale=True, desc="prepare", disable=None if shown else True, file=sys.stderr)
