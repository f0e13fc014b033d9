"""What a text file is, by its name and by its first bytes, and its content without compression."""

from __future__ import annotations

import bz2
import json
import lzma
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

from megafour.data.errors import DataError

FORMATS = {".txt": ".txt", ".jsonl": ".jsonl", ".ndjson": ".jsonl", ".json": ".jsonl", ".parquet": ".parquet"}
"""Ending of a name, in lower case, and the format that it means: `.json` is read line by line too."""
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
KNOWN = ".txt, .jsonl, .ndjson and .json (lines), alone or with .gz, .bz2, .xz or .zst, and .parquet"
MAGIC = {
    ".gz": re.compile(rb"\x1f\x8b"),
    ".bz2": re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"),
    ".xz": re.compile(rb"\xfd7zXZ\x00"),
    ".zst": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
    ".parquet": re.compile(rb"PAR1"),
}
BOM = b"\xef\xbb\xbf"
HEAD = 1 << 16  # bytes of a text that are looked at
BLOCK = 1 << 16  # compressed bytes read at once


@dataclass(frozen=True)
class Kind:
    """How a file is read. format: '.txt', '.jsonl' or '.parquet'; compression: its ending, or ''."""

    format: str
    compression: str = ""


def kind_of(path: str, other: str | None = None) -> Kind:
    """The kind of a file: what its name says, once its content agrees; its content, where the name leaves it open.

    Args:
        path: of the file.
        other: the format of a file with another ending; None refuses it.
    Raises:
        DataError: for another kind of file, one that is empty and cannot be, one that holds something else than its
            name says, text that is not UTF-8 but UTF-16 or UTF-32, and a JSON document that is not lines.
    """
    with reading(path):
        form, compression = _named(path, other)
        size = os.path.getsize(path)
        if stat.S_ISFIFO(os.stat(path).st_mode):
            return Kind(form or ".txt", compression)    # a pipe can be read only once
        if size == 0:
            if compression or form == ".parquet":
                raise DataError(f"{path} is empty (0 bytes), as an interrupted download is; fetch it again, or leave "
                                f"it out")
            return Kind(form or ".txt", compression)
        _check_magic(path, compression or (".parquet" if form == ".parquet" else ""))
        if form == ".parquet":
            return Kind(form)
        with open(path, "rb") as raw:
            head = decompressed(path, compression, raw).read(HEAD + 1)
        encoding = json.detect_encoding(head)
        if not encoding.startswith("utf-8"):
            raise DataError(f"{path} is {encoding.upper()} text, and UTF-8 is read; convert it with `iconv -f "
                            f"{encoding.upper()} -t UTF-8`")
        start = head.removeprefix(BOM).lstrip()[:HEAD]
        form = form or (".jsonl" if start.startswith(b"{") and _first_line(start) != "damaged" else ".txt")
        if form == ".jsonl":
            _check_lines(path, start)
        return Kind(form, compression)


def _named(path: str, other: str | None) -> tuple[str | None, str]:
    """(format, compression) by the name alone; format None: `part-0001.gz` says nothing of what is in it."""
    stem, ending = os.path.splitext(os.path.basename(path).lower())
    compression = ending if ending in COMPRESSIONS else ""
    suffix = os.path.splitext(stem)[1] if compression else ending
    form = FORMATS.get(suffix)
    if form == ".parquet" and compression:
        raise DataError(f"{path}: parquet is compressed in itself; unpack it, and name it without {compression}")
    if form is None and compression and not suffix[1:2].isalpha():
        return None, compression
    form = form or other
    if form is None:
        raise DataError(f"{path}: unknown kind of file; known are {KNOWN}")
    return form, compression


def _check_magic(path: str, wanted: str) -> None:
    """Refuses a file whose first bytes are of another kind than its name."""
    with open(path, "rb") as file:
        head = file.read(16)
        file.seek(max(0, os.path.getsize(path) - 4))
        whole = file.read(4) == b"PAR1"
    found = next((kind for kind, magic in MAGIC.items() if magic.match(head)), "")
    if found == ".parquet" and not whole:
        found = ""      # a text may begin with its four letters
    if found == wanted:
        return
    if not wanted:
        raise DataError(f"{path} holds {found[1:]} data, which its name does not say; rename it to end in {found}")
    if found:
        raise DataError(f"{path} holds {found[1:]} data, not {wanted[1:]}; rename it to end in {found}")
    what = "a whole parquet file" if wanted == ".parquet" else f"{wanted[1:]} data"
    raise DataError(f"{path} is not {what}; fetch it again, or rename it to what it holds")


def _first_line(start: bytes) -> str:
    """'value', where a text begins with JSON on a line of its own; 'open', where it goes on below; else 'damaged'.

    A line beyond HEAD is taken for a value.
    """
    line, newline, _ = start.partition(b"\n")
    if not newline and len(start) >= HEAD - 1024:
        return "value"
    text = line.decode("utf-8", errors="replace").rstrip()
    try:
        json.loads(text)
        return "value"
    except json.JSONDecodeError as error:
        return "open" if newline and error.pos >= len(text) else "damaged"
    except RecursionError:
        return "damaged"


def _check_lines(path: str, start: bytes) -> None:
    """Refuses one JSON document in place of a record per line. A first line that is damaged is left to its reader."""
    array = start.startswith(b"[")
    if array or (start.startswith(b"{") and _first_line(start) == "open"):
        what, query = ("array", "'.[]'") if array else ("document", ".")
        raise DataError(f"{path} is one JSON {what}, and a record per line is read; convert it with `jq -c {query} "
                        f"{path} > NEW.jsonl`")


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Names the file in whatever goes wrong while it is read, as a DataError."""
    try:
        yield
    except EOFError as error:
        raise DataError(f"{path} is cut short: its compressed data has no end; fetch it again") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def decompressed(path: str, compression: str, raw: BinaryIO) -> Any:
    """The content of an open file, as a stream to read from."""
    if compression == ".gz":
        return Decompressed(path, raw, lambda: zlib.decompressobj(wbits=31), zlib.error)
    if compression == ".bz2":
        return Decompressed(path, raw, bz2.BZ2Decompressor, OSError)
    if compression == ".xz":
        return Decompressed(path, raw, lzma.LZMADecompressor, lzma.LZMAError)
    if compression == ".zst":
        import zstandard

        return Decompressed(path, raw, zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError)
    return raw


class Decompressed:
    """Reads a compressed file of any number of streams, one after the other, each to its end.

    The libraries' own file objects end silently where a zstd frame is cut short, and where a second stream of bzip2 or
    xz is damaged.
    """

    def __init__(self, path: str, raw: BinaryIO, start: Callable[[], Any], damaged: type[Exception]) -> None:
        """start: makes the decompressor of one stream; damaged: what it raises."""
        self._path, self._raw, self._start, self._damaged = path, raw, start, damaged
        self._stream: Any = None
        self._unread = b""

    def read(self, size: int = -1) -> bytes:
        """About `size` bytes, all that is left for -1; empty at the file's end.

        Raises:
            EOFError: for a file that ends within a stream.
            DataError: for a damaged one.
        """
        parts, length = [], 0
        while size < 0 or length < size:
            block = self._unread or self._raw.read(BLOCK)
            self._unread = b""
            while self._stream is None and block and not (block := block.lstrip(b"\0")):
                block = self._raw.read(BLOCK)       # padding between streams
            if not block:
                if self._stream is not None:
                    raise EOFError
                break
            self._stream = self._stream or self._start()
            try:
                parts.append(self._stream.decompress(block))
            except self._damaged as error:
                raise DataError(f"{self._path} is damaged ({error}); fetch it again") from error
            length += len(parts[-1])
            if self._stream.eof:
                self._unread, self._stream = self._stream.unused_data, None
        return b"".join(parts)
