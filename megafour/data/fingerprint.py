"""What tells a dataset from another one that was written later under its name: counts, and checksums of a sample."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

from megafour.data.indexed import IndexedDataset
from megafour.data.mapped import Array

WHOLE = 1 << 20
"""Bytes up to which an array is summed whole."""
PAGE, PAGES = 4096, 128
"""Of a longer one so many pages of so many bytes are, evenly spread: a terabyte must not be read at a start."""


def content(data: IndexedDataset) -> str:
    """Checksum of a dataset's index and tokens, eight hexadecimal digits; of long ones a sample is read."""
    found = zlib.crc32(data.dtype.str.encode())
    for array in (data.lengths, data.pointers, data.documents, data.tokens):
        found = _sampled(array, found)
    return f"{found:08x}"


def description(prefix: str) -> str | None:
    """Checksum of PREFIX.json; None where there is none."""
    try:
        return f"{zlib.crc32(Path(prefix + '.json').read_bytes()):08x}"
    except OSError:
        return None


def _sampled(array: Array, found: int) -> int:
    """CRC-32 of an array's length and of what is read of it, continued from `found`."""
    size, items = len(array), PAGE // array.dtype.itemsize
    found = zlib.crc32(str(size).encode(), found)
    if size * array.dtype.itemsize <= WHOLE:
        return zlib.crc32(array[:size].tobytes(), found)
    for place in np.linspace(0, size - items, PAGES).astype(np.int64).tolist():
        found = zlib.crc32(array[place : place + items].tobytes(), found)
    return found
