"""The mean negative log-likelihood of a token stream on any mesh: windows, padded where needed, padding uncounted."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from megafour.config.rules import resolve
from megafour.config.schema import Config
from megafour.data.batch import PAD, MicroBatch, collate
from megafour.data.errors import DataError
from megafour.data.indexed import check_ids
from megafour.data.mapped import Array
from megafour.inference.load import Loaded
from megafour.trainer.step import evaluate_batch

MICRO_TOKENS = 4096
"""Tokens that a micro-batch holds where the config does not say its size: enough to keep the matrix products busy."""


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found."""

    loss: float
    """Mean over the counted tokens of -ln p(token | tokens before it in its window), in nats."""
    tokens: int
    """Predicted tokens: each of the stream but the first (of each document, under data.document_mask)."""

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


@dataclass(frozen=True)
class Settings:
    """How a stream is evaluated on a mesh."""

    config: Config
    """Resolved; `data.seq_length` is the window, padded to a length that the mesh divides."""
    window: int
    """Tokens of a window that count: the same on every mesh, so that each token is predicted from the same others."""


def settings_for(config: Config, world: int, length: int, micro_batch_size: int | None = None) -> Settings:
    """The configuration resolved for a mesh and for a stream of `length` tokens.

    A window has `data.seq_length` tokens, or as many as a shorter stream needs. Where the mesh does not divide it, it
    is padded: padding stands after the window's tokens, which are causal, and so never see it.

    Raises:
        ConfigError: for a broken rule.
    """
    p, limit = config.parallel, config.model.max_position_embeddings or config.data.seq_length
    window = min(length - 1, config.data.seq_length)
    if config.model.position == "learned":
        window = min(window, limit)
    unit = math.lcm(2 * p.cp if p.cp > 1 else 1, p.cp * p.tp)
    padded = -(-window // unit) * unit
    rows = -(-(length - 1) // window)
    size = micro_batch_size or max(1, min(MICRO_TOKENS // padded, -(-rows // world)))
    # Only padding lies beyond a table of learned positions, which keeps its size.
    resolved = resolve(config.replace({
        "data.seq_length": padded, "train.micro_batch_size": size, "train.global_batch_size": size * world,
        "model.max_position_embeddings": max(limit, padded)}), world, data=False)
    return Settings(resolved.replace({"model.max_position_embeddings": limit}), window)


def evaluate(model: Loaded, stream: Array, where: str, window: int,
             begins: np.ndarray | None = None) -> Evaluation:
    """The mean negative log-likelihood of a stream of tokens. Every rank of the mesh calls it together.

    The stream is cut into windows that overlap by one token, so that every token but the first is predicted once, from
    the tokens before it in its window: nothing sees across windows.

    Args:
        model: on the mesh.
        stream: token ids, 1-D integers, at least two; a memory map is read piece by piece.
        where: names the stream in messages.
        window: tokens of a window, at most the model's data.seq_length; the rest of a row is padding.
        begins: offsets at which documents begin, ascending; under data.document_mask no document sees another, and
            a document's first token is not predicted, as in training. None: the stream is one document.
    Raises:
        DataError: for a stream of fewer than two tokens, or an id outside the vocabulary.
    """
    if len(stream) < 2:
        raise DataError(f"{where} has {len(stream)} tokens: the first is never predicted, so it takes two or more")
    total, tokens = 0.0, 0
    for batches in _global_batches(model, stream, where, window, begins):
        part, count = evaluate_batch(model, [batch.to(model.mesh.device) for batch in batches])
        total, tokens = total + part, tokens + count
    return Evaluation(total / max(tokens, 1), tokens)


def _global_batches(model: Loaded, stream: Array, where: str, window: int,
                    begins: np.ndarray | None) -> Iterator[list[MicroBatch]]:
    """This rank's micro-batches of one global batch after the other; the last is filled up with padding."""
    train, padded = model.config.train, model.config.data.seq_length
    dp, size = model.mesh.group("dp"), train.micro_batch_size
    share = train.global_batch_size // dp.size
    for first in range(0, -(-(len(stream) - 1) // window), train.global_batch_size):
        rows = np.full((share, padded + 1), PAD, dtype=np.int64)
        ids = np.zeros_like(rows) if begins is not None and model.config.data.document_mask else None
        for index in range(share):
            start = (first + dp.rank * share + index) * window
            piece = np.asarray(stream[start : start + window + 1], dtype=np.int64)
            check_ids(piece, int(model.config.model.vocab_size), where)
            rows[index, : len(piece)] = piece
            if ids is not None and begins is not None:
                ids[index] = np.searchsorted(begins, np.arange(start, start + padded + 1), side="right")
        yield [collate(rows[i : i + size], torch.arange(i, i + size), model.stage.build.positions,
                       document_ids=None if ids is None else ids[i : i + size]) for i in range(0, share, size)]
