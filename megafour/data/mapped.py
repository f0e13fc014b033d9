"""Arrays in files: through a memory map, or read piece by piece where the file system has none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeAlias

import numpy as np

from megafour.config.file_system import NOT_SUPPORTED
from megafour.config.notes import say_note
from megafour.data.errors import DataError


class FileArray:
    """A one-dimensional array in a file, read when it is sliced; any number of threads may."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self._path, self.dtype = path, dtype
        self._file = open(path, "rb", buffering=0)
        self._length = os.fstat(self._file.fileno()).st_size // dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> np.ndarray:
        """The values of a slice without steps.

        Raises:
            DataError: naming the file, where it cannot be read.
        """
        start, stop, step = part.indices(self._length)
        assert step == 1
        wanted, at, blocks = max(0, stop - start) * self.dtype.itemsize, start * self.dtype.itemsize, []
        try:
            while wanted > 0:
                block = os.pread(self._file.fileno(), wanted, at)
                if not block:
                    raise DataError(f"{self._path} has become shorter while it was read")
                blocks.append(block)
                wanted, at = wanted - len(block), at + len(block)
        except OSError as error:
            raise DataError(f"{self._path} cannot be read: {error.strerror}") from error
        return np.frombuffer(b"".join(blocks), self.dtype)


Array: TypeAlias = np.ndarray | FileArray
"""What can be measured and sliced as a one-dimensional array."""


def map_file(path: Path, dtype: np.dtype) -> Array:
    """A file as an array, without reading it.

    Raises:
        DataError: naming the file, where it can be neither mapped nor read.
    """
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    try:
        return np.memmap(path, mode="r", dtype=dtype)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        say_note(f"{path}: the file system has no memory maps ({error.strerror}); the file is read, which is slower")
        return FileArray(path, np.dtype(dtype))
