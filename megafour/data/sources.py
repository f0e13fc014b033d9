"""Input files of `megafour prepare` as chunks of whole records: always the same chunks, in the corpus's order."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from typing import Any, BinaryIO

from megafour.data.errors import DataError
from megafour.data.text_files import Kind, decompressed, kind_of, reading

CHUNK_BYTES = (
    1 << 20
)  # of text handed to a worker at once: large against the cost of handing over, small against memory
CHUNK_ROWS = 512  # parquet rows handed over at once
SAMPLED = 1 << 16  # bytes at either end of a file that go into a fingerprint


@dataclass(frozen=True)
class Piece:
    """Part of an input file: the records whose first byte lies in [start, end); files that cannot be cut are one."""

    path: str
    start: int
    end: int
    kind: Kind

    @property
    def format(self) -> str:
        """'.txt', '.jsonl' or '.parquet'."""
        return self.kind.format


@dataclass(frozen=True)
class Chunk:
    """Whole records of a piece. first_line counts from 1 at the piece's start; read_bytes: of the file, read for it."""

    piece: Piece
    first_line: int
    payload: bytes | list[Any]
    read_bytes: int


def expand(patterns: Sequence[str]) -> list[str]:
    """Files that the arguments name, in the order given, each pattern's matches sorted.

    Raises DataError for a pattern without a match, a missing file, a file named twice, and what `kind_of` refuses.
    """
    files: list[str] = []
    for pattern in patterns:
        found = [pattern] if os.path.exists(pattern) else sorted(glob(pattern, recursive=True))
        found = [path for path in found if os.path.isfile(path)]
        if not found:
            reason = (
                "is a folder; name its files, as in"
                if os.path.isdir(pattern)
                else "no such file; a pattern is written like"
            )
            raise DataError(f"{pattern}: {'matches no file' if has_magic(pattern) else reason + ' DIR/**/*.jsonl'}")
        files += found
    seen: set[str] = set()
    for path in files:
        kind_of(path)
        place = os.path.abspath(path)
        if place in seen:
            raise DataError(f"{path} is named twice among the inputs")
        seen.add(place)
    return files


def fingerprint(files: Sequence[str], *options: object) -> str:
    """A hash of what a result depends on: the files' names, sizes, first and last 64 KiB, and the options."""
    digest = hashlib.sha256(repr(options).encode())
    for path in files:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            checksum = zlib.crc32(file.read(SAMPLED))
            file.seek(max(0, size - SAMPLED))
            checksum = zlib.crc32(file.read(SAMPLED), checksum)
        digest.update(f"{os.path.basename(path)}:{size}:{checksum};".encode())
    return digest.hexdigest()


def pieces(files: Sequence[str], shard: int = 0, shards: int = 1, other: str | None = None) -> list[Piece]:
    """The part of the corpus that shard `shard` of `shards` (from 0) reads; the shards in order are the whole corpus.

    Shares are equal in bytes of the files. Plain JSON lines are cut within files, at lines; other files are cut only
    between them. An empty file holds no document, wherever it stands. other: as in `kind_of`.
    """
    kinds = [kind_of(path, other) for path in files]
    total = sum(os.path.getsize(path) for path in files)
    low, high = total * shard // shards, total * (shard + 1) // shards
    result, begin = [], 0
    for path, kind in zip(files, kinds, strict=True):
        size = os.path.getsize(path)
        if kind == Kind(".jsonl"):
            start, end = max(0, low - begin), min(size, high - begin)
            if start < end:
                result.append(Piece(path, start, end, kind))
        elif (size and low <= begin < high) or not os.path.isfile(path):
            result.append(Piece(path, 0, size, kind))
        begin += size
    return result


def chunks(parts: Sequence[Piece], json_key: str, split_text: str) -> Iterator[Chunk]:
    """All records of `parts` in order. split_text: a .txt document is a 'file', ends at a 'blank-line', or is a 'line'.

    Raises DataError, naming the file, for unreadable or damaged files and a parquet file without the column `json_key`.
    """
    for piece in parts:
        if piece.format == ".parquet":
            found = _parquet(piece, json_key)
        elif piece.format == ".txt" and split_text == "file":
            found = _whole(piece)
        else:
            blank = piece.format == ".txt" and split_text == "blank-line"
            found = _blocks(piece, (b"\n\n", b"\n\r\n") if blank else (b"\n",))
        while True:
            with reading(piece.path):
                chunk = next(found, None)
            if chunk is None:
                break
            yield chunk


def _whole(piece: Piece) -> Iterator[Chunk]:
    with open(piece.path, "rb") as raw:
        yield Chunk(piece, 1, decompressed(piece.path, piece.kind.compression, raw).read(), piece.end)


def _blocks(piece: Piece, separators: Sequence[bytes]) -> Iterator[Chunk]:
    """Text blocks of about CHUNK_BYTES that end after a separator."""
    with open(piece.path, "rb") as raw:
        plain = not piece.kind.compression
        left = -1
        if plain:
            begin, end = (_line_start(raw, offset) for offset in (piece.start, piece.end))
            raw.seek(begin)
            left = end - begin
        stream = decompressed(piece.path, piece.kind.compression, raw)
        line, seen, parts = 1, raw.tell(), [b""]
        while block := stream.read(CHUNK_BYTES if left < 0 else min(CHUNK_BYTES, left)):
            left -= len(block) if plain else 0
            cut = max(found + len(mark) if (found := block.rfind(mark)) >= 0 else 0 for mark in separators)
            parts.append(block[:cut])
            if cut:
                payload = b"".join(parts)
                yield Chunk(piece, line, payload, raw.tell() - seen)
                line, seen, parts = line + payload.count(b"\n"), raw.tell(), []
            parts.append(block[cut:])
        if any(parts):
            yield Chunk(piece, line, b"".join(parts), raw.tell() - seen)


def _line_start(raw: BinaryIO, offset: int) -> int:
    """The first line start at or after `offset`."""
    if offset == 0:
        return 0
    raw.seek(offset - 1)
    raw.readline()
    return raw.tell()


def _parquet(piece: Piece, column: str) -> Iterator[Chunk]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(piece.path)
        if column not in file.schema_arrow.names:
            names = ", ".join(file.schema_arrow.names)
            raise DataError(f"{piece.path} has no column {column!r}; it has {names}. Name one with --json-key")
        row, total = 1, max(1, file.metadata.num_rows)
        for batch in file.iter_batches(CHUNK_ROWS, columns=[column], use_threads=False):
            yield Chunk(piece, row, batch.column(0).to_pylist(), piece.end * len(batch) // total)
            row += len(batch)
    except pyarrow.ArrowException as error:
        raise DataError(f"{piece.path}: {' '.join(str(error).split())}") from error


def line_of(chunk: Chunk, relative: int) -> int:
    """The file's line (row), from 1, that lies `relative` lines into the chunk; counts what precedes a piece."""
    before = 0
    if chunk.piece.start:
        with open(chunk.piece.path, "rb") as raw:
            left = _line_start(raw, chunk.piece.start)
            raw.seek(0)
            while left > 0 and (block := raw.read(min(left, 1 << 24))):
                before += block.count(b"\n")
                left -= len(block)
    return before + chunk.first_line + relative
