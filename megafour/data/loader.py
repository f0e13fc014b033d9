"""Step after step, the micro-batches of one data-parallel rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from megafour.data.batch import PAD, MicroBatch, collate
from megafour.data.dataset import GlobalDataset
from megafour.data.errors import DataError

AHEAD = 2  # steps read ahead per worker


class BatchLoader:
    """Iterates over steps; each gives this rank's micro-batches, in order.

    Step k of the run holds the global samples [start, start + global_batch_size); rank r takes a contiguous
    global/dp_size of them, micro-batch m its m-th slice of micro_batch_size. So what a step trains on depends on its
    first sample alone, and a run resumed at any dp or micro-batch size goes on where it stopped: `start_sample` is the
    number of samples consumed.

    positions: int64 [s_local], the global positions that this rank's layout holds. skip_samples: global sample numbers
    that are replaced by samples without tokens or labels. workers: threads that read ahead (reading waits for the disk,
    not for Python); the batches are the same for any number, and an error in one is raised here, with its traceback, at
    the step it belongs to. document_mask: whether documents of a sample are told apart. A training set never ends; an
    evaluation set ends with the step that holds its last sample.
    """

    def __init__(
        self,
        dataset: GlobalDataset,
        *,
        dp_rank: int,
        dp_size: int,
        global_batch_size: int,
        micro_batch_size: int,
        positions: Tensor,
        start_sample: int = 0,
        workers: int = 0,
        skip_samples: Collection[int] = (),
        document_mask: bool = False,
    ) -> None:
        if global_batch_size % (dp_size * micro_batch_size):
            raise DataError(
                f"train.global_batch_size={global_batch_size} is no multiple of dp x train.micro_batch_size = "
                f"{dp_size} x {micro_batch_size}"
            )
        self.dataset, self.global_batch_size, self.micro_batch_size = dataset, global_batch_size, micro_batch_size
        self.per_rank = global_batch_size // dp_size
        self.first = dp_rank * self.per_rank
        self.positions, self.start_sample, self.workers = positions, start_sample, workers
        self.skip, self.document_mask = frozenset(skip_samples), document_mask

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        starts = self._starts()
        if self.workers == 0:
            yield from map(self.step, starts)
            return
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="data")
        pending: deque[Future[list[MicroBatch]]] = deque()
        try:
            for start in starts:
                pending.append(pool.submit(self.step, start))
                if len(pending) > self.workers * AHEAD:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _starts(self) -> Iterator[int]:
        start = self.start_sample
        while self.dataset.endless or start < self.dataset.num_samples:
            yield start
            start += self.global_batch_size

    def step(self, start: int) -> list[MicroBatch]:
        """This rank's micro-batches of the step whose first global sample is `start`."""
        begins = range(self.first, self.first + self.per_rank, self.micro_batch_size)
        return [self._micro_batch(start, range(begin, begin + self.micro_batch_size)) for begin in begins]

    def _micro_batch(self, start: int, members: range) -> MicroBatch:
        rows = np.stack([self._row(start + member) for member in members])
        ids = torch.arange(members.start, members.stop)
        documents = None
        if self.document_mask:
            documents = np.stack([self.dataset.documents(start + member) for member in members])
        return collate(rows, ids, self.positions, samples=ids + start, document_ids=documents)

    def _row(self, index: int) -> np.ndarray:
        if index in self.skip:
            return np.full(self.dataset.seq_length + 1, PAD, np.int64)
        return self.dataset.sample(index)
