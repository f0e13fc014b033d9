"""What torch writes of each tensor: a copy in memory that is used again, so that a save holds a block and no more."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from megafour.sizes import PRODUCTION


class ScratchPlanner(DefaultSavePlanner):
    """Hands out tensors of their own storage, one at a time: what was handed out before may be overwritten.

    torch.save writes whole storages, so a view of a flat shard has to be copied. The copies that torch makes stay in
    reference cycles until Python collects them: all of a rank's share, in fresh pages each.
    """

    def __init__(self, most: int = PRODUCTION.save_copies) -> None:
        """`most`: bytes of copies that are kept."""
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._most = most
        self._kept: dict[tuple[torch.Size, torch.dtype], Tensor] = {}

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The tensor of one write, on the host."""
        found = super().resolve_data(write_item)
        if not isinstance(found, Tensor) or (
                found.device.type == "cpu" and found.untyped_storage().nbytes() == found.nbytes):
            return found
        key = (found.shape, found.dtype)
        if key not in self._kept:
            if sum(one.nbytes for one in self._kept.values()) + found.nbytes > self._most:
                for one in self._kept.values():
                    one.untyped_storage().resize_(0)    # the cycles still hold the tensors
                self._kept.clear()
            self._kept[key] = torch.empty(found.shape, dtype=found.dtype)
        return self._kept[key].copy_(found)
