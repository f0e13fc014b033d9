"""The toy data of a verification: random samples by index, with tokens left out so that valid counts are uneven."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from megafour.config.schema import Config
from megafour.data.batch import PAD, MicroBatch
from megafour.data.loader import BatchLoader
from megafour.parallel.context.layout import Layout

VALID = ("all", "uneven", "empty-rank")
"""Which tokens are trained: all; an uneven number in each sample, one sample none; a data- or context-parallel rank
none. `mixed` takes one after the other, a step each; `one` trains a single token of the whole batch."""


EVALUATION = (1000, "uneven")
"""The step whose batch is evaluated, which no training reaches, and which tokens of it count."""

GENERATED = 6
"""Tokens that a saved model continues a prompt by."""


def prompt_of(vocab_size: int, seq_length: int) -> list[int]:
    """The prompt that is continued: so long that with its last tokens it no longer fits the sequence."""
    return [(7 * i + 3) % vocab_size for i in range(max(1, seq_length - GENERATED // 2))]


class ToyDataset:
    """Sample i of the run, drawn from (seed, i); `left_out` tells which of its tokens are not there."""

    endless, num_samples = True, 0

    def __init__(self, config: Config, vocab_size: int, valid: str) -> None:
        self.config, self.vocab_size, self.valid = config, vocab_size, valid
        self.seq_length = config.data.seq_length

    def sample(self, index: int) -> np.ndarray:
        """int64 `[seq_length + 1]`, PAD where a token is left out."""
        rng = np.random.default_rng([self.config.run.seed, index])
        row = rng.integers(self.vocab_size, size=self.seq_length + 1)
        step, member = divmod(index, self.config.train.global_batch_size)
        kind = VALID[step % len(VALID)] if self.valid == "mixed" else self.valid
        row[self._left_out(kind, member, rng)] = PAD
        return row

    def documents(self, index: int) -> np.ndarray:
        """int64 `[seq_length + 1]`: many short documents, or a long one and then single tokens, or one alone."""
        size = self.seq_length + 1
        rng = np.random.default_rng([self.config.run.seed, index, 1])
        long = size * 5 // 8
        lengths = (rng.integers(1, 9, size), np.r_[long, np.ones(3, int), size], np.r_[size])[index % 3]
        return np.repeat(np.arange(len(lengths)), lengths)[:size]

    def _left_out(self, kind: str, member: int, rng: np.random.Generator) -> np.ndarray:
        """Boolean `[seq_length + 1]`."""
        none = np.zeros(self.seq_length + 1, dtype=bool)
        parallel, batch = self.config.parallel, self.config.train.global_batch_size
        if kind == "one":
            kept = np.arange(self.seq_length + 1)
            return ~((kept == 3) | (kept == 4)) if member == 0 else ~none
        if kind == "uneven":
            if member == 1:
                return ~none
            return rng.random(self.seq_length + 1) < 0.3 * (member % 4) / 3
        if kind == "empty-rank" and int(parallel.dp) > 1:
            last = batch // int(parallel.dp) * (int(parallel.dp) - 1)
            return ~none if member >= last else none
        if kind == "empty-rank" and parallel.cp > 1:
            layout = parallel.context.layout
            held = Layout(self.seq_length, parallel.cp, layout).positions(1).numpy()
            # A token that is left out takes its neighbour's label too: every other one would leave none at all.
            none[held[: self.seq_length // 4] if layout == "striped" and parallel.cp == 2 else held] = True
        return none


def toy_batches(config: Config, split: Config, vocab_size: int, step: int, valid: str, *, dp_rank: int,
                positions: Tensor) -> list[MicroBatch]:
    """The micro-batches of one rank, cut by the loader that training uses.

    `config` is the mesh's and says what the global batch holds; `split` says how it is divided (the reference: not).
    """
    dataset: Any = ToyDataset(config, vocab_size, valid)
    loader = BatchLoader(
        dataset, dp_rank=dp_rank, dp_size=int(split.parallel.dp), global_batch_size=config.train.global_batch_size,
        micro_batch_size=split.train.micro_batch_size, positions=positions,
        document_mask=config.data.document_mask)
    return loader.step(step * config.train.global_batch_size)
