"""Megatron's indexed dataset: PREFIX.bin holds the tokens, PREFIX.idx says where each sequence and document begins.

`.idx`, little-endian, no padding: 9 bytes `MMIDIDX\\0\\0`; u64 version 1; u8 dtype code; u64 sequences S; u64 D =
documents + 1; S x i32 lengths in tokens; S x i64 byte offsets into `.bin`; D x i64 document boundaries as sequence
numbers, the first 0.
"""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megafour.config.file_system import naming, sync
from megafour.data.errors import DataError, NoSuchFile
from megafour.data.mapped import Array, map_file

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
CODES = {np.dtype(name): code for code, name in DTYPES.items()}
MAX_LENGTH = 2**31 - 1  # lengths are stored in 32 bits
WRITE_BLOCK = 1 << 20  # sequences per block when an index is written, so that memory stays flat


def token_dtype(vocab_size: int) -> np.dtype:
    """The narrowest type that holds every id of the vocabulary: u16 up to 65,536 entries, else i32."""
    return np.dtype("<u2" if vocab_size <= 65536 else "<i4")


def strip_suffix(prefix: str | os.PathLike[str]) -> str:
    """A dataset is named by its prefix; the name of one of its files is taken for it."""
    text = os.fspath(prefix)
    return text[:-4] if text.endswith((".bin", ".idx")) else text


class IndexedDataset:
    """A dataset in Megatron's format, read through memory maps: opening costs neither memory nor a pass over the index.

    lengths: i32 [S], tokens of each sequence. pointers: i64 [S], byte offsets. documents: i64 [D], boundaries as
    sequence numbers. Raises DataError when a file is missing, cut short, of another format, or not a gapless stream of
    tokens.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = strip_suffix(prefix)
        self.bin_path, self.idx_path = Path(self.prefix + ".bin"), Path(self.prefix + ".idx")
        for path in (self.idx_path, self.bin_path):
            if not path.is_file():
                raise NoSuchFile(
                    f"{path} does not exist; a dataset is PREFIX.bin and PREFIX.idx, made by `megafour prepare`"
                )
        try:
            self._map_index()
            self.tokens = self._map_tokens()
        except OSError as error:
            raise DataError(f"{error.filename or self.prefix} cannot be read: {error.strerror}") from error
        self._check_gapless()

    def _map_index(self) -> None:
        size = self.idx_path.stat().st_size
        with open(self.idx_path, "rb") as file:
            head = file.read(HEADER.size)
        if len(head) < HEADER.size or head[:9] != MAGIC:
            raise DataError(f"{self.idx_path} is no Megatron index: it must start with {MAGIC!r}, found {head[:9]!r}")
        _, version, code, sequences, boundaries = HEADER.unpack(head)
        if version != 1 or code not in DTYPES:
            raise DataError(
                f"{self.idx_path}: version {version} with dtype code {code}; known are version 1, codes 1 to 8"
            )
        self.dtype = np.dtype(DTYPES[code])
        if self.dtype.kind == "f":
            raise DataError(f"{self.idx_path}: holds {self.dtype.name} values, not token ids")
        expected = HEADER.size + 12 * sequences + 8 * boundaries
        if size != expected:
            raise DataError(
                f"{self.idx_path}: {size} bytes, but {sequences} sequences, {boundaries - 1} documents take {expected}"
            )
        raw = map_file(self.idx_path, np.dtype(np.uint8))[:]
        at = HEADER.size
        self.lengths = np.frombuffer(raw, "<i4", sequences, at)
        self.pointers = np.frombuffer(raw, "<i8", sequences, at + 4 * sequences)
        self.documents = np.frombuffer(raw, "<i8", boundaries, at + 12 * sequences)

    def _map_tokens(self) -> Array:
        size = self.bin_path.stat().st_size
        if size % self.dtype.itemsize:
            raise DataError(f"{self.bin_path}: {size} bytes is no whole number of {self.dtype.name} tokens")
        return map_file(self.bin_path, self.dtype)

    def _check_gapless(self) -> None:
        """Samples are cut from the stream itself: sequences must follow one another in it. Looks at 1,024 places."""
        count = len(self.lengths)
        if count == 0:
            if len(self.tokens):
                raise DataError(
                    f"{self.idx_path} lists no sequence, but {self.bin_path} holds {len(self.tokens)} tokens"
                )
            return
        places = np.unique(np.linspace(0, count - 1, min(count, 1024)).astype(np.int64))
        ends = self.pointers[places] + self.lengths[places].astype(np.int64) * self.dtype.itemsize
        stream_end = len(self.tokens) * self.dtype.itemsize
        following = np.where(places + 1 < count, self.pointers[np.minimum(places + 1, count - 1)], stream_end)
        if self.pointers[0] != 0 or (ends != following).any():
            at = int(places[np.argmax(ends != following)])
            raise DataError(
                f"{self.prefix}: index and tokens disagree near sequence {at} (it ends at byte "
                f"{int(ends[places == at][0])}, "
                f"the next begins at {int(following[places == at][0])}); is {self.bin_path} whole?"
            )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        """Sequence `index` as a read-only view [length] of the stored dtype."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.prefix} has {len(self)} sequences, asked for {index}")
        start = int(self.pointers[index]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[index])]

    @property
    def num_documents(self) -> int:
        """Documents, of one or more sequences each."""
        return max(0, len(self.documents) - 1)

    def token_offset(self, document: int) -> int:
        """Where a document begins in the token stream, in tokens; the number of documents gives the stream's end."""
        sequence = int(self.documents[document]) if len(self.documents) else 0
        if sequence >= len(self.lengths):
            return len(self.tokens)
        return int(self.pointers[sequence]) // self.dtype.itemsize


class IndexedWriter:
    """Writes PREFIX.bin and PREFIX.idx aside and renames both in `finish`: a dataset is whole or absent.

    Every id is checked against the vocabulary before it is stored, so that nothing wraps in 16 bits.
    As a context manager it finishes on success and leaves nothing behind on an exception.
    """

    def __init__(self, prefix: str | os.PathLike[str], vocab_size: int) -> None:
        self.prefix, self.vocab_size, self.dtype = strip_suffix(prefix), vocab_size, token_dtype(vocab_size)
        Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
        self._aside = [Path(f"{self.prefix}.{kind}.{os.getpid()}.tmp") for kind in ("bin", "idx")]
        self._bin: BinaryIO = open(self._aside[0], "wb")
        self._lengths: list[int] = []

    def add(self, tokens: np.ndarray | list[int]) -> None:
        """One document of one sequence; it may be empty."""
        values = np.asarray(tokens, dtype=np.int64).reshape(-1)
        check_ids(values, self.vocab_size, f"{self.prefix}: document {len(self._lengths)}")
        if len(values) > MAX_LENGTH:
            raise DataError(
                f"{self.prefix}: document {len(self._lengths)} has {len(values)} tokens, more than {MAX_LENGTH}"
            )
        self._bin.write(values.astype(self.dtype).tobytes())
        self._lengths.append(len(values))

    def finish(self) -> None:
        """Closes the dataset and moves it to its name."""
        self._bin.close()
        write_index(self._aside[1], np.asarray(self._lengths, dtype="<i4"), self.dtype)
        publish(self._aside[0], self.prefix + ".bin")
        publish(self._aside[1], self.prefix + ".idx")

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
            return
        self._bin.close()
        for path in self._aside:
            path.unlink(missing_ok=True)


def check_ids(values: np.ndarray, vocab_size: int, where: str) -> None:
    """Refuses ids outside [0, vocab_size), naming `where` and the first such id."""
    if len(values) and (int(values.max()) >= vocab_size or int(values.min()) < 0):
        bad = values[(values >= vocab_size) | (values < 0)]
        raise DataError(f"{where} holds token id {int(bad[0])}, outside the vocabulary of {vocab_size} entries")


def write_index(path: str | os.PathLike[str], lengths: Array, dtype: np.dtype) -> None:
    """Writes the index of a stream whose documents are one sequence each. lengths: i32 [S], in memory or in a file."""
    count = len(lengths)
    with naming(path), open(path, "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, CODES[np.dtype(dtype)], count, count + 1))
        for start in range(0, count, WRITE_BLOCK):
            file.write(np.asarray(lengths[start : start + WRITE_BLOCK], dtype="<i4").tobytes())
        offset = 0
        for start in range(0, count, WRITE_BLOCK):
            sizes = np.asarray(lengths[start : start + WRITE_BLOCK], dtype=np.int64) * dtype.itemsize
            ends = offset + np.cumsum(sizes)
            file.write((ends - sizes).astype("<i8").tobytes())
            offset = int(ends[-1])
        for start in range(0, count + 1, WRITE_BLOCK):
            file.write(np.arange(start, min(start + WRITE_BLOCK, count + 1), dtype="<i8").tobytes())
        sync(file)


def publish(aside: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Moves a finished file to its name in one step, its content on disk first."""
    with open(aside, "rb+") as file:
        sync(file)
    os.replace(aside, path)


def append_file(source: str | os.PathLike[str], target: BinaryIO) -> None:
    """Appends a whole file in large blocks."""
    with naming(target.name), open(source, "rb") as file:
        shutil.copyfileobj(file, target, 16 << 20)
