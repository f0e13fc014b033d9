"""Saving while training goes on: a snapshot of the step in host memory, written by a thread over a group of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megafour.checkpoint import store
from megafour.checkpoint.agreement import message
from megafour.checkpoint.errors import CheckpointError
from megafour.checkpoint.tensors import LogicalTensor

TIMEOUT = timedelta(minutes=30)
"""How long a rank's thread waits for the others': the slowest rank's write."""


class BackgroundSaver:
    """One save at a time, behind the training that goes on.

    The thread's collectives run on a gloo group that nothing else uses: two threads on one group would pair their
    messages in an order that differs between ranks.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        """Make the thread's group; every rank of `group` (None: this process alone) calls it together."""
        ranks = None if group is None else dist.get_process_group_ranks(group)
        self._group = None if ranks is None else dist.new_group(
            ranks, backend="gloo", timeout=TIMEOUT, group_desc="checkpoint")
        self._gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._buffers: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self.step: int | None = None
        """Step of the save that is under way, or that nobody has waited for yet; None: there is none."""
        self.seconds = 0.0
        """How long the last save took, from its snapshot to its name."""

    def start(self, folder: Path, step: int, held: list[LogicalTensor], state: dict[str, Any],
              files: dict[str, Path | str], after: Callable[[Path], None]) -> None:
        """Take the snapshot and begin to write it; arguments as for `store.save`. The save before must be over.

        `after` is called in the thread, on every rank, with the checkpoint's folder once it is whole.
        """
        if self._thread is not None:
            raise RuntimeError(f"the save of step {self.step} has not been waited for")
        began = time.monotonic()
        snapshot = self._snapshot(held)
        self.step = step

        def work() -> None:
            try:
                if self._gpu is not None:
                    torch.cuda.set_device(self._gpu)    # a new thread's is the first GPU, whoever's that is
                after(store.save(folder, step, snapshot, state, files, self._group))
            except BaseException as error:      # whatever it is: a thread's exception ends nothing by itself
                text = message(error, f"saving {store.step_path(folder, step)} in the background")
                self._error = CheckpointError(text)
                self._error.__cause__ = error
            self.seconds = time.monotonic() - began

        # A daemon: a rank that fails must not wait at its exit for peers that are gone.
        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    def _snapshot(self, held: list[LogicalTensor]) -> list[LogicalTensor]:
        """What this rank writes, copied to the host. The buffers are kept: fresh memory costs as much as the copy."""
        copied = []
        for tensor in held:
            if not tensor.primary:
                copied.append(tensor)       # only its name, shape and type are asked for
                continue
            parts = []
            for offset, size, values in tensor.parts:
                buffer = self._buffers.get((tensor.name, offset))
                if buffer is None or buffer.shape != values.shape or buffer.dtype != values.dtype:
                    buffer = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
                    self._buffers[tensor.name, offset] = buffer
                parts.append((offset, size, buffer.copy_(values, non_blocking=True)))
            copied.append(replace(tensor, parts=parts))
        if self._gpu is not None:
            torch.cuda.current_stream().synchronize()
        return copied

    @property
    def failed(self) -> bool:
        """Whether the save has failed; it may still be under way on other ranks."""
        return self._error is not None

    @property
    def done(self) -> bool:
        """Whether a save has ended and `wait` would not block."""
        return self._thread is not None and not self._thread.is_alive()

    def wait(self) -> int | None:
        """Wait for the save that is under way.

        Returns:
            its step; None when there was none.
        Raises:
            CheckpointError: it failed; the same message on every rank.
        """
        if self._thread is None:
            return None
        self._thread.join()
        self._thread, step, self.step = None, self.step, None
        if self._error is not None:
            raise self._error
        return step
