"""Checksums of files: taken from the stream while a shard is written, and read back before one is trusted."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint.filesystem import FileSystem

from megafour.config.file_system import naming
from megafour.sizes import PRODUCTION


def crc32(path: Path, block_bytes: int = PRODUCTION.checksum_block) -> int:
    """CRC-32 of a whole file, read block by block.

    It finds damage; it is no signature, and nothing that is loaded depends on trusting it.

    Raises:
        OSError: when the file cannot be read.
    """
    found = 0
    with naming(path), open(path, "rb", buffering=0) as file:
        while block := file.read(block_bytes):
            found = zlib.crc32(block, found)
    return found


class SummedFiles(FileSystem):
    """The file system that torch.distributed.checkpoint writes to; it keeps the CRC-32 of every file it wrote.

    The sum is of what was meant, not of what the disk holds: reading back what was just written would show the cache.
    """

    def __init__(self) -> None:
        self.sums: dict[str, int] = {}
        """CRC-32 of each file that was written through this object, by its name."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:  # type: ignore[override]
        """Open a file; one that is written is summed."""
        with naming(path), super().create_stream(path, mode) as stream:
            if "w" not in mode:
                yield stream
                return
            summed = _Summed(cast(Any, stream))
            try:
                yield summed
            except Exception as error:
                # torch's archive writer meets a full disk with complaints of its own about positions
                raise summed.error or error from None
            self.sums[Path(path).name] = summed.sum


class _Summed:
    """A file open for writing in order, and the checksum of what went into it."""

    def __init__(self, file: Any) -> None:
        self._file, self.sum = file, 0
        self.error: OSError | None = None
        self.tell, self.flush, self.fileno, self.close = file.tell, file.flush, file.fileno, file.close

    def write(self, data: Any) -> int:
        self.sum = zlib.crc32(data, self.sum)
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
