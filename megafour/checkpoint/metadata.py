"""The index of a checkpoint: read without trusting its pickle, checked against its files and the caller's tensors."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from megafour.checkpoint.checksum import SummedFiles
from megafour.checkpoint.errors import CheckpointError, listed

INDEX = ".metadata"
"""The file that torch.distributed.checkpoint writes beside the shards."""

Entry = tuple[str, tuple[int, ...], torch.dtype]

_CLASSES = {
    (owner.__name__, name): getattr(owner, name)
    for owner, names in (
        (metadata, ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex",
                    "StorageMeta", "_MEM_FORMAT_ENCODING")),
        (filesystem, ("_StorageInfo",)),
    )
    for name in names
}


_MEMORY_FORMATS: Any = metadata._MEM_FORMAT_ENCODING


class _IndexUnpickler(pickle.Unpickler):
    """Admits the classes of a checkpoint's index and nothing else: a pickle can otherwise run any code."""

    def find_class(self, module: str, name: str) -> Any:
        """The class of that name, if an index of tensors needs it."""
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index of tensors holds")


def _layout(name: str) -> torch.layout:
    if name != "torch.strided":
        raise pickle.UnpicklingError(f"it names the layout {name}")
    return torch.strided


def _member(owner: Any, name: str) -> Any:
    """How Python 3.11.0 to 3.11.3 pickle a member of an enumeration, and only that: `getattr(owner, name)`."""
    if owner is not _MEMORY_FORMATS or name not in _MEMORY_FORMATS.__members__:
        raise pickle.UnpicklingError(f"it asks for {name} of {owner}, which no index of tensors holds")
    return _MEMORY_FORMATS[name]


def read_index(path: Path) -> Metadata:
    """Read a checkpoint's index through the restricted unpickler, and check that it is one of plain tensors.

    Raises:
        CheckpointError: for an index that is missing, damaged, or holds anything but tensors.
    """
    try:
        with open(path / INDEX, "rb") as file:
            index = _IndexUnpickler(file).load()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not a checkpoint: it has no {INDEX}") from None
    except Exception as error:      # a damaged pickle raises almost anything
        raise CheckpointError(f"{path / INDEX} cannot be read: {error}") from error
    if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
        raise CheckpointError(f"{path / INDEX} holds no index of a checkpoint")
    other = [key for key, entry in index.state_dict_metadata.items() if not isinstance(entry, TensorStorageMetadata)]
    if other:
        raise CheckpointError(f"{path / INDEX} has entries that are no tensors: {listed(other)}")
    return index


def file_sizes(index: Metadata) -> dict[str, int]:
    """Bytes that each shard file has by the index.

    Raises:
        CheckpointError: for a name that is no plain file name, which could lead out of the checkpoint.
    """
    sizes: dict[str, int] = {}
    for info in (index.storage_data or {}).values():
        name = info.relative_path
        if Path(name).name != name or info.transform_descriptors:
            raise CheckpointError(f"the index names the file {name!r}, which is no plain file of the checkpoint")
        sizes[name] = max(sizes.get(name, 0), info.offset + info.length)
    return sizes


def check_whole(path: Path, index: Metadata) -> None:
    """Check that every element of every tensor was written once (torch checks overlaps when it plans).

    Raises:
        CheckpointError: naming each tensor that is not covered.
    """
    wrong = []
    for name, entry in index.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        written = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
        if written != math.prod(entry.size):
            wrong.append(f"{name} has {written} of {math.prod(entry.size)} elements")
    if wrong:
        raise CheckpointError(f"{path} is not whole: {listed(sorted(wrong))}")


def joined_entries(held: Iterable[Iterable[Entry]]) -> dict[str, Entry]:
    """The entries of all ranks by name.

    Raises:
        CheckpointError: where two ranks disagree on a shape or a type.
    """
    found: dict[str, Entry] = {}
    for rank, entries in enumerate(held):
        for entry in entries:
            known = found.setdefault(entry[0], entry)
            if known != entry:
                raise CheckpointError(
                    f"{entry[0]} is {shown(*known[1:])} on one rank and {shown(*entry[1:])} on rank {rank}")
    return found


def compare(path: Path, index: Metadata, wanted: dict[str, Entry], only: tuple[str, ...], cast: bool) -> None:
    """Check that the checkpoint holds exactly the wanted tensors: names, shapes and types.

    Args:
        only: prefixes of the keys that count; the others of the checkpoint are not asked for.
        cast: a differing type is converted instead of refused.
    Raises:
        CheckpointError: naming every key that is missing, unknown, or of another shape or type.
    """
    stored = {name: entry for name, entry in index.state_dict_metadata.items() if name.startswith(only)}
    missing = sorted(wanted.keys() - stored.keys())
    unknown = sorted(stored.keys() - wanted.keys())
    shapes, types = [], []
    for name in sorted(wanted.keys() & stored.keys()):
        entry, (_, shape, dtype) = stored[name], wanted[name]
        assert isinstance(entry, TensorStorageMetadata)
        if tuple(entry.size) != tuple(shape):
            shapes.append(f"{name} is {tuple(entry.size)} in the checkpoint, {tuple(shape)} in this model")
        elif entry.properties.dtype != dtype and not cast:
            types.append(f"{name} is {_type(entry.properties.dtype)} in the checkpoint, {_type(dtype)} here")
    problems = [f"{what} ({len(names)}): {listed(names)}" for what, names in (
        ("missing in the checkpoint", missing), ("unknown to this model", unknown),
        ("of another shape", shapes), ("of another type", types)) if names]
    if problems:
        raise CheckpointError(f"{path} does not fit this model; " + "; ".join(problems))


def shown(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Shape and type for a message."""
    return f"{tuple(shape)} {_type(dtype)}"


def _type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Reader(FileSystemReader):
    """Reads shards by an index that was read and checked before."""

    def __init__(self, path: Path, index: Metadata) -> None:
        super().__init__(path)
        self.index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index that was given."""
        return self.index


class Writer(FileSystemWriter):
    """Writes one synced file a rank, summed, and an index that does not name the folder it was written to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, per_thread_copy_ahead=0)     # one tensor at a time, as `ScratchPlanner` needs it
        self.fs = self.files = SummedFiles()

    def storage_meta(self) -> StorageMeta:
        """Nothing about this machine: the folder is renamed, copied, published."""
        return StorageMeta(save_id=self.save_id)
