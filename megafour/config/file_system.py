"""What some file systems cannot do, and what is done instead: locks, the sync of a folder; errors that name a file."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from megafour.config.notes import say_note

HELD = frozenset({errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES})
"""What a lock says that another process holds; any other error is of the file system."""
NOT_SUPPORTED = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENODEV, errno.ENOLCK, errno.EINVAL,
                           errno.ENOTTY, errno.EBADF, errno.EPERM})
"""What file systems (NFS without a lock service, FUSE, shared folders of virtual machines) answer to what they lack."""


class Locked(Exception):
    """Another process holds the lock."""


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Give an OSError that names no file (of a write, a sync) this one."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        raise


def sync(file: IO[Any]) -> None:
    """Flush an open file to its disk.

    Raises:
        OSError: naming the file; what may not be on the disk must not be taken for saved.
    """
    with naming(file.name):
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Make names in a folder durable: a rename is lost in a crash until its folder is synced.

    Where the file system cannot do this it is skipped, with a line.

    Raises:
        OSError: naming the folder, for a fault of the disk.
    """
    with naming(path):
        try:
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        except OSError as error:
            if error.errno not in NOT_SUPPORTED | {errno.EACCES, errno.EISDIR}:
                raise
            say_note(f"{os.fspath(path)}: the file system does not sync folders ({error.strerror}); a save may be lost "
                     f"if the machine crashes right after it")


def lock(file: IO[Any]) -> None:
    """Lock an open file for this process until it is closed. Where the file system has no locks, a line says so.

    Raises:
        Locked: when another process holds it.
        OSError: naming the file, for a fault of the disk.
    """
    with naming(file.name):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in HELD:
                raise Locked(file.name) from error
            if error.errno not in NOT_SUPPORTED:
                raise
            say_note(f"{file.name}: the file system has no locks ({error.strerror}); make sure that no other process "
                     f"writes here")
