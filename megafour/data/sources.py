"""Input files of `megafour prepare` as chunks of whole records: always the same chunks, in the corpus's order."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from typing import Any, BinaryIO

from megafour.data.errors import DataError

CHUNK_BYTES = (
    1 << 20
)  # of text handed to a worker at once: large against the cost of handing over, small against memory
CHUNK_ROWS = 512  # parquet rows handed over at once
FORMATS = (".txt", ".jsonl", ".parquet")
COMPRESSIONS = (".gz", ".zst")
BOM = b"\xef\xbb\xbf"
SAMPLED = 1 << 16  # bytes at either end of a file that go into a fingerprint


@dataclass(frozen=True)
class Piece:
    """Part of an input file: the records whose first byte lies in [start, end); files that cannot be cut are one."""

    path: str
    start: int
    end: int

    @property
    def format(self) -> str:
        """'.txt', '.jsonl' or '.parquet'."""
        return file_format(self.path)


@dataclass(frozen=True)
class Chunk:
    """Whole records of a piece. first_line counts from 1 at the piece's start; read_bytes: of the file, read for it."""

    piece: Piece
    first_line: int
    payload: bytes | list[Any]
    read_bytes: int


def file_format(path: str) -> str:
    """The format that a file's name says, below any compression. Raises DataError for others."""
    bare = path.removesuffix(_compression(path))
    suffix = os.path.splitext(bare)[1].lower()
    if suffix not in FORMATS or (suffix == ".parquet" and bare != path):
        raise DataError(
            f"{path}: unknown kind of file; known are .txt and .jsonl, alone or with .gz or .zst, and .parquet"
        )
    return suffix


def _compression(path: str) -> str:
    return next((end for end in COMPRESSIONS if path.endswith(end)), "")


def expand(patterns: Sequence[str]) -> list[str]:
    """Files that the arguments name, in the order given, each pattern's matches sorted.

    Raises DataError for a pattern without a match, a missing file, a file named twice, an unknown format.
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
        file_format(path)
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


def pieces(files: Sequence[str], shard: int = 0, shards: int = 1) -> list[Piece]:
    """The part of the corpus that shard `shard` of `shards` (from 0) reads; the shards in order are the whole corpus.

    Shares are equal in bytes of the files. Plain .jsonl is cut within files, at lines; other files are cut only between
    them.
    """
    total = sum(os.path.getsize(path) for path in files)
    low, high = total * shard // shards, total * (shard + 1) // shards
    result, begin = [], 0
    for path in files:
        size = os.path.getsize(path)
        if path.lower().endswith(".jsonl"):
            start, end = max(0, low - begin), min(size, high - begin)
            if start < end:
                result.append(Piece(path, start, end))
        elif low <= begin < high:
            result.append(Piece(path, 0, size))
        begin += size
    return result


def chunks(parts: Sequence[Piece], json_key: str, split_text: str) -> Iterator[Chunk]:
    """All records of `parts` in order. split_text: a .txt document is a 'file', ends at a 'blank-line', or is a 'line'.

    Raises DataError, naming the file, for unreadable or damaged files and a parquet file without the column `json_key`.
    """
    for piece in parts:
        try:
            if piece.format == ".parquet":
                yield from _parquet(piece, json_key)
            elif piece.format == ".txt" and split_text == "file":
                with open(piece.path, "rb") as raw:
                    yield Chunk(piece, 1, _decompressed(piece.path, raw).read(), piece.end)
            else:
                separators = (b"\n\n", b"\n\r\n") if piece.format == ".txt" and split_text == "blank-line" else (b"\n",)
                yield from _blocks(piece, separators)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{piece.path}: {error}") from error


def _decompressed(path: str, raw: BinaryIO) -> Any:
    if path.endswith(".gz"):
        return gzip.GzipFile(fileobj=raw)
    if path.endswith(".zst"):
        return ZstdReader(path, raw)
    return raw


class ZstdReader:
    """Reads a .zst file of any number of frames; the library's own stream ends silently where a frame is cut short."""

    def __init__(self, path: str, raw: BinaryIO) -> None:
        import zstandard

        self._path, self._raw, self._library = path, raw, zstandard
        self._frame: Any = None
        self._unread = b""

    def read(self, size: int = -1) -> bytes:
        """About `size` bytes, all that is left for -1; empty at the file's end."""
        parts, length = [], 0
        while size < 0 or length < size:
            block = self._unread or self._raw.read(1 << 17)
            if not block:
                if self._frame is not None:
                    raise DataError(f"{self._path}: ends in the middle of a zstd frame")
                break
            self._unread = b""
            self._frame = self._frame or self._library.ZstdDecompressor().decompressobj()
            try:
                parts.append(self._frame.decompress(block))
            except self._library.ZstdError as error:
                raise DataError(f"{self._path}: damaged ({error})") from error
            length += len(parts[-1])
            if self._frame.eof:
                self._unread, self._frame = self._frame.unused_data, None
        return b"".join(parts)


def _blocks(piece: Piece, separators: Sequence[bytes]) -> Iterator[Chunk]:
    """Text blocks of about CHUNK_BYTES that end after a separator."""
    with open(piece.path, "rb") as raw:
        plain = not _compression(piece.path)
        left = -1
        if plain:
            begin, end = (_line_start(raw, offset) for offset in (piece.start, piece.end))
            raw.seek(begin)
            left = end - begin
        stream, line, seen, parts = _decompressed(piece.path, raw), 1, raw.tell(), [b""]
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
