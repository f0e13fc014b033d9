"""The tensors of one checkpoint, read whole and one after the other by a single process."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from megafour.checkpoint import metadata, tensors
from megafour.checkpoint.folder import check_files, check_manifest
from megafour.checkpoint.tensors import LogicalTensor, Shape


class CheckpointReader:
    """A checkpoint whose files and index were checked; holds no more than the tensor that was asked for."""

    def __init__(self, path: Path) -> None:
        """Open a checkpoint's folder.

        Raises:
            CheckpointError: for one that is damaged or incomplete.
        """
        self.path = Path(path)
        check_manifest(self.path)
        self.index = metadata.read_index(self.path)
        check_files(self.path, metadata.file_sizes(self.index))
        metadata.check_whole(self.path, self.index)
        self.tensors: dict[str, tuple[Shape, torch.dtype]] = {
            name: (tuple(entry.size), entry.properties.dtype)
            for name, entry in sorted(self.index.state_dict_metadata.items())
            if isinstance(entry, metadata.TensorStorageMetadata)}

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A whole tensor on the CPU, in its stored type or converted."""
        shape, stored = self.tensors[name]
        whole = torch.empty(shape, dtype=stored)
        held = [LogicalTensor(name, shape, stored, [((0,) * len(shape), shape, whole)])]
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")    # torch warns that a single process loads alone, which is meant
            dcp.load(dict(tensors.state_dict(held, primary_only=False)),
                     storage_reader=metadata.Reader(self.path, self.index),
                     planner=dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                     no_dist=True)
        return whole if dtype is None else whole.to(dtype)
