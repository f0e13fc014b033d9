"""Small training runs on the pool's ranks: the real loop, run folder and checkpoints, on a tiny model and corpus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megafour.config import errors
from megafour.config.load import config_from
from megafour.config.rules import resolve
from megafour.data.dataset import build_datasets
from megafour.data.description import tokenizer_info
from megafour.data.indexed import IndexedWriter
from megafour.mesh import Launch
from megafour.trainer import loop
from megafour.trainer.main import train_on
from megafour.trainer.setup import build_mesh

MODEL = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "ffn_hidden_size": 48,
         "vocab_size": 64}


class Killed(BaseException):
    """Ends a rank as a kill would: nothing in the program catches it."""


def write_corpus(prefix: Path, documents: int = 40, seed: int = 0) -> None:
    """Random documents over 64 token ids."""
    generator = np.random.default_rng(seed)
    with IndexedWriter(prefix, 64) as writer:
        for _ in range(documents):
            writer.add(generator.integers(0, 64, generator.integers(5, 90)))


def settings(folder: Path, parallel: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """Config values of a tiny run in `folder`."""
    values: dict[str, Any] = {
        "run": {"name": "tiny", "dir": str(folder / "run")}, "model": dict(MODEL), "parallel": parallel,
        "data": {"train": [{"path": str(folder / "corpus")}], "seq_length": 16},
        "train": {"steps": 12, "global_batch_size": 8, "precision": "fp64"},
        "optimizer": {"lr": 1e-2}, "logging": {"tensorboard": False}, "checkpoint": {"every": 7}}
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return values


def train(rank: int, world: int, values: dict[str, Any], die_after: int | None = None,
          allowed: tuple[str, ...] = ()) -> int:
    """Run to the end on this rank; `die_after` raises once that many steps are done, as a kill would."""
    config = resolve(config_from(values), world)
    datasets = build_datasets(config, tokenizer_info(config))
    original, errors.REFUSAL_WAIT = loop.train_step, 0.5    # no launcher here whose line would be lost
    if die_after is not None:
        def dying(state: Any, batches: Any, step: int, *rest: Any, **named: Any) -> Any:
            if step >= die_after:
                raise Killed
            return original(state, batches, step, *rest, **named)
        loop.train_step = dying
    try:
        launch = Launch(rank, world, rank, world)
        return train_on(build_mesh(config, torch.device("cpu")), config, launch, None, datasets, allowed)
    except Killed:
        return -9
    finally:
        loop.train_step = original


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of the run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> dict[int, float]:
    """step -> loss."""
    return {line["step"]: line["loss"] for line in metrics(folder)}
