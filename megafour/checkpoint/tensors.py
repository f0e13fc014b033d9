"""Mesh-free tensors: what a rank holds of a logical tensor, as rectangles that any other mesh can read."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megafour.checkpoint.errors import CheckpointError

Shape = tuple[int, ...]
Part = tuple[Shape, Shape, Tensor]


@dataclass
class LogicalTensor:
    """What this rank holds of one logical tensor of the model or the optimizer."""

    name: str
    """Its key in the checkpoint, `weights/layers.3.attention.wq.weight`."""
    shape: Shape
    """Shape of the whole logical tensor: true vocabulary, no padding."""
    dtype: torch.dtype
    """Type in which it is stored."""
    parts: list[Part] = field(default_factory=list)
    """Disjoint rectangles (offset, size, tensor); `tensor` is a view of shape `size`, saved from and loaded into."""
    primary: bool = True
    """Whether this rank writes its parts. Over all ranks the primary parts cover every element exactly once."""


def rectangles(offset: Shape, size: Shape, start: int, stop: int) -> list[tuple[Shape, Shape, int, int]]:
    """Cut a half-open flat range of a row-major rectangle into rectangles (of a matrix: at most three).

    Args:
        offset: where the rectangle lies in the logical tensor.
        size: its extents; any number of dims.
        start, stop: the range, in elements of the flattened rectangle.
    Returns:
        `(offset, size, start, stop)` for each, in order: place and extents in the logical tensor, and the range of the
        flattened rectangle that it is. Empty for an empty range.
    Raises:
        ValueError: when the range leaves the rectangle.
    """
    if not 0 <= start <= stop <= math.prod(size):
        raise ValueError(f"the range [{start}, {stop}) leaves a rectangle of {math.prod(size)} elements")
    if start == stop:
        return []
    if not size:
        return [((), (), 0, 1)]
    row = math.prod(size[1:])
    first, last = -(-start // row), stop // row      # the whole rows within the range
    if first > last:
        return _in_row(offset, size, last, start, stop)
    found = _in_row(offset, size, first - 1, start, first * row)
    if first < last:
        found.append(((offset[0] + first, *offset[1:]), (last - first, *size[1:]), first * row, last * row))
    return found + _in_row(offset, size, last, last * row, stop)


def _in_row(offset: Shape, size: Shape, row: int, start: int, stop: int) -> list[tuple[Shape, Shape, int, int]]:
    """The part of a range that lies within one row (index along dim 0)."""
    base = row * math.prod(size[1:])
    if start == stop:
        return []
    inner = rectangles(offset[1:], size[1:], start - base, stop - base)
    return [((offset[0] + row, *o), (1, *s), a + base, b + base) for o, s, a, b in inner]


def flat_parts(offset: Shape, size: Shape, start: int, stop: int, flat: Tensor) -> list[Part]:
    """The parts of a logical tensor that a flat range holds, such as a ZeRO shard of a matrix.

    Args:
        offset, size, start, stop: as for `rectangles`.
        flat: 1-D, the `stop - start` elements of the range.
    """
    if flat.dim() != 1 or flat.numel() != stop - start:
        raise ValueError(f"the range [{start}, {stop}) needs a flat tensor of {stop - start}, not {tuple(flat.shape)}")
    return [(o, s, flat[a - start : b - start].view(s)) for o, s, a, b in rectangles(offset, size, start, stop)]


class Sharded(torch.Tensor):
    """A logical tensor as torch.distributed.checkpoint knows it: the whole shape, and this rank's rectangles.

    It must be a Tensor, since a plain object is refused on load, but it holds no data and has no operations.
    """

    @staticmethod
    def __new__(cls, shape: Shape, dtype: torch.dtype, parts: list[Part]) -> Sharded:
        """Make the empty wrapper of the whole shape."""
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device("cpu"))

    def __init__(self, shape: Shape, dtype: torch.dtype, parts: list[Part]) -> None:
        super().__init__()
        self.parts: dict[Shape, Tensor] = {}
        for offset, size, tensor in parts:
            if 0 in size:
                continue
            if tuple(tensor.shape) != tuple(size) or len(offset) != len(shape):
                raise ValueError(f"a part at {offset} of size {size} holds a tensor of shape {tuple(tensor.shape)}")
            if any(a < 0 or a + n > full for a, n, full in zip(offset, size, shape, strict=True)):
                raise ValueError(f"the part at {offset} of size {size} leaves the logical shape {shape}")
            if tuple(offset) in self.parts:
                raise ValueError(f"two parts start at {offset}")
            self.parts[tuple(offset)] = tensor.detach()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Refuse every operation: there is no data here."""
        raise TypeError(f"{func} on a tensor that only names its parts")

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        """One write for each rectangle."""
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD,
                          tensor_data=TensorWriteData(chunk, TensorProperties(dtype=self.dtype), self.size()))
                for chunk in self.__create_chunk_list__()]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Place and extents of each rectangle."""
        return [ChunkStorageMetadata(torch.Size(offset), torch.Size(tensor.shape))
                for offset, tensor in self.parts.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The rectangle that starts at the index's offset."""
        return self.parts[tuple(index.offset or ())]


def state_dict(tensors: list[LogicalTensor], *, primary_only: bool) -> dict[str, Sharded]:
    """The tensors by name as torch.distributed.checkpoint takes them; parts under one name are joined.

    Raises:
        CheckpointError: for two entries of one name that disagree, or a part that does not fit.
    """
    found: dict[str, LogicalTensor] = {}
    for tensor in tensors:
        if primary_only and not tensor.primary:
            continue
        known = found.setdefault(tensor.name, LogicalTensor(tensor.name, tensor.shape, tensor.dtype))
        if (known.shape, known.dtype) != (tensor.shape, tensor.dtype):
            raise CheckpointError(f"{tensor.name} is {known.shape} {known.dtype} and {tensor.shape} {tensor.dtype}")
        known.parts.extend(tensor.parts)
    result: dict[str, Sharded] = {}
    for name, tensor in found.items():
        try:
            result[name] = Sharded(tuple(tensor.shape), tensor.dtype, tensor.parts)
        except ValueError as error:
            raise CheckpointError(f"{name}: {error}") from None
    return result
