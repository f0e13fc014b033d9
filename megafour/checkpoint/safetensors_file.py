"""Safetensors files: a folder of them read lazily by tensor and slice, and one written tensor by tensor."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megafour.checkpoint.errors import CheckpointError, listed
from megafour.config.file_system import NOT_SUPPORTED, naming, sync
from megafour.config.json_file import read_object
from megafour.config.notes import say_note

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Types of weights, by the format's names. Others are quantized, or no weights."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"
_BLOCK = 64 << 20


@dataclass(frozen=True)
class Stored:
    """What a file's header says of one tensor."""

    file: str
    shape: tuple[int, ...]
    dtype: str
    """As the format names it, `BF16`."""


class SafetensorsFolder:
    """The tensors of a model's folder, in one file or sharded; data is read, through memory maps, when asked for.

    Where a folder holds both, `model.safetensors` is read and the index is not, as `transformers` does. A context
    manager: files stay open within it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}
        self.tensors: dict[str, Stored] = {}

    def __enter__(self) -> SafetensorsFolder:
        """Read every file's header.

        Raises:
            CheckpointError: for a folder without safetensors, with a damaged file, or whose index does not fit.
        """
        wanted = {} if (self.folder / ONE_FILE).is_file() else weight_map(self.folder)
        for file in dict.fromkeys(wanted.values()) if wanted else [only_file(self.folder)]:
            handle = self._stack.enter_context(_opened(self.folder / file))
            self._open[file] = handle
            for name in handle.keys():    # noqa: SIM118  the handle is no mapping
                if not wanted or wanted.get(name) == file:
                    cut = handle.get_slice(name)
                    self.tensors[name] = Stored(file, tuple(cut.get_shape()), cut.get_dtype())
        missing = sorted(wanted.keys() - self.tensors.keys())
        if missing:
            raise CheckpointError(f"{self.folder / INDEX} names tensors that its files lack: {listed(missing)}")
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        self._stack.close()

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        """A tensor, as a view of the file's memory map, or a rectangle of it; in its stored type."""
        stored = self.tensors[name]
        handle = self._open[stored.file]
        return handle.get_tensor(name) if index is None or not stored.shape else handle.get_slice(name)[index]


def _opened(path: Path) -> Any:
    """A file, through the library's memory map, or read where the file system has none; a context manager."""
    try:
        try:
            return safe_open(path, framework="pt")
        except OSError as error:
            number = re.search(r"os error (\d+)", str(error))     # all that the library's error says
            code = error.errno or int(number[1] if number else 0)
            if code not in NOT_SUPPORTED:
                raise
            say_note(f"{path}: the file system has no memory maps ({os.strerror(code)}); the file is read, which is "
                     f"slower")
            return ReadFile(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from None


class ReadFile:
    """A safetensors file that is read tensor by tensor, with what `safe_open` offers of one."""

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            SafetensorError: for a file that is damaged.
        """
        self._path = path
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            try:
                header = json.loads(file.read(min(length, size)))
                header.pop("__metadata__", None)
                self._entries = {name: (entry["dtype"], list(entry["shape"]), 8 + length + entry["data_offsets"][0],
                                        8 + length + entry["data_offsets"][1]) for name, entry in header.items()}
            except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
                raise SafetensorError(f"its header is damaged: {error!r}") from None
        for name, (kind, shape, begin, end) in self._entries.items():
            wrong = kind in DTYPES and math.prod(shape) * DTYPES[kind].itemsize != end - begin
            if wrong or not 8 + length <= begin <= end <= size:
                raise SafetensorError(f"{name} does not fit its place in the file")

    def __enter__(self) -> ReadFile:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing stays open."""

    def keys(self) -> list[str]:
        """Names of the tensors."""
        return list(self._entries)

    def get_tensor(self, name: str) -> Tensor:
        """A tensor, read."""
        kind, shape, begin, end = self._entries[name]
        data = bytearray(end - begin)
        with open(self._path, "rb", buffering=0) as file:
            file.seek(begin)
            view = memoryview(data)
            while view and (count := file.readinto(view)):
                view = view[count:]
        if view:
            raise CheckpointError(f"{self._path} has become shorter while it was read")
        return torch.frombuffer(data, dtype=DTYPES[kind]).reshape(shape) if data else torch.empty(
            shape, dtype=DTYPES[kind])

    def get_slice(self, name: str) -> ReadSlice:
        """A tensor whose shape and type are known before it is read."""
        return ReadSlice(self, name)

    def entry(self, name: str) -> tuple[str, list[int]]:
        """Type, as the format names it, and shape."""
        return self._entries[name][:2]


@dataclass(frozen=True)
class ReadSlice:
    """A tensor of a `ReadFile`, to be read in part."""

    file: ReadFile
    name: str

    def get_shape(self) -> list[int]:
        """Its shape."""
        return self.file.entry(self.name)[1]

    def get_dtype(self) -> str:
        """Its type, as the format names it."""
        return self.file.entry(self.name)[0]

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        return self.file.get_tensor(self.name)[index]


def check_weight_files(folder: Path) -> None:
    """Look for the files that hold a folder's weights, without opening them.

    Raises:
        CheckpointError: for a folder without safetensors, or whose index is damaged or names files that are missing.
    """
    if not (folder / ONE_FILE).is_file() and not weight_map(folder):
        only_file(folder)


def ignored(folder: Path) -> list[str]:
    """A line for weights of a folder that `SafetensorsFolder` does not read; empty where it reads all."""
    if not ((folder / ONE_FILE).is_file() and (folder / INDEX).is_file()):
        return []
    return [f"{folder} holds {ONE_FILE} and {INDEX}: {ONE_FILE} is read, as transformers does, and the index and its "
            f"shards are ignored; delete {ONE_FILE} if the shards are meant"]


def weight_map(folder: Path) -> dict[str, str]:
    """tensor -> file by the index of a sharded model; empty where there is none."""
    path = folder / INDEX
    if not path.is_file():
        return {}
    pairs = read_object(path, CheckpointError).get("weight_map")
    if not isinstance(pairs, dict) or not pairs:
        raise CheckpointError(f"{path} has no weight_map that says which file holds which tensor")
    odd = sorted({str(file) for file in pairs.values() if not isinstance(file, str) or Path(file).name != file
                  or not file.endswith(".safetensors")})
    if odd:
        raise CheckpointError(f"{path} names {listed(odd)}: only safetensors files of the same folder are read")
    lost = sorted(file for file in set(pairs.values()) if not (folder / file).is_file())
    if lost:
        raise CheckpointError(f"{folder} is not whole: {listed(lost)} of {INDEX} missing")
    return pairs


def only_file(folder: Path) -> str:
    """The one safetensors file of a folder without an index.

    Raises:
        CheckpointError: for none or several; a folder of pickles is refused, since loading one can run code.
    """
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if ONE_FILE in found:
        return ONE_FILE
    if len(found) == 1:
        return found[0]
    if found:
        raise CheckpointError(f"{folder} holds {listed(found)} and no {INDEX} that says what lies where")
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if pickles:
        raise CheckpointError(
            f"{folder} holds its weights as {listed(pickles)}: pickles, which can run any code when they are loaded, "
            f"and are not read. Save it as safetensors where it came from: "
            f"model.save_pretrained(FOLDER, safe_serialization=True)")
    raise CheckpointError(f"{folder} holds no safetensors file")


@dataclass(frozen=True)
class Outgoing:
    """A tensor to be written; `make` gives its data when its turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(path: Path, tensors: list[Outgoing]) -> None:
    """Write a file that holds no more than one tensor in memory; synced when it returns.

    Header first, so all shapes are known before any data. Order and padding are the library's own, so that a file
    which it wrote comes back byte for byte.
    """
    ordered = sorted(tensors, key=lambda t: (-t.dtype.itemsize, t.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in ordered:
        header[tensor.name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape),
                               "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with naming(path), open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in ordered:
            data = tensor.make()
            if tuple(data.shape) != tensor.shape or data.dtype != tensor.dtype:
                raise ValueError(f"{tensor.name} is {tuple(data.shape)} {data.dtype}, announced as {tensor}")
            flat = data.contiguous().reshape(-1).view(torch.uint8).numpy()
            for start in range(0, len(flat), _BLOCK):
                file.write(flat[start : start + _BLOCK].data)
        sync(file)
