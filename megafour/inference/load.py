"""A trained model on one process, from a run folder or from the checkpoint of any mesh."""

from __future__ import annotations

from pathlib import Path

import torch

from megafour.checkpoint import store
from megafour.checkpoint.errors import CheckpointError
from megafour.checkpoint.tensors import LogicalTensor
from megafour.config.load import load_config
from megafour.config.rules import resolve
from megafour.config.schema import Config
from megafour.data.tokenizer import Tokenizer, load_tokenizer
from megafour.mesh import Mesh
from megafour.model.stage import Stage, build_stage
from megafour.parallel.pieces import named_pieces

ONE_PROCESS = {"parallel.dp": 1, "parallel.pp": 1, "parallel.tp": 1, "parallel.cp": 1, "parallel.context": {},
               "parallel.zero_stage": 0, "parallel.pipeline": {}, "train.micro_batch_size": 1,
               "train.recompute": "none"}
"""What of a training config changes when one process holds the whole model."""


def load_model(path: Path, precision: str = "fp32") -> tuple[Stage, Tokenizer | None, Config]:
    """Weights, tokenizer and config of a checkpoint, on the CPU.

    Args:
        path: a run folder (its newest checkpoint), a folder of checkpoints, or one checkpoint.
        precision: dtype of weights and activations.
    Raises:
        CheckpointError: where there is no whole checkpoint, or it does not fit its own config.
    """
    folder = store.find(path)
    config = load_config(str(folder / "config.yaml")).replace({**ONE_PROCESS, "train.precision": precision})
    config = resolve(config, 1, data=False)
    if not isinstance(config.model.vocab_size, int):
        raise CheckpointError(f"{folder / 'config.yaml'}: model.vocab_size={config.model.vocab_size} is no number")
    stage = build_stage(config, Mesh.single(), config.model.vocab_size)
    with torch.no_grad():
        held = [LogicalTensor(f"weights/{piece.name}", piece.shape, param.dtype,
                              [(piece.offset, piece.size, piece.view(param.data))], True)
                for param, piece in named_pieces(stage)]
        store.load(folder, held, None, only=("weights/",), cast=True)
    return stage.eval(), _tokenizer(folder, config), config


def _tokenizer(folder: Path, config: Config) -> Tokenizer | None:
    """The tokenizer that was saved in the checkpoint; None where the run had none."""
    wanted = config.data.tokenizer
    if wanted is None:
        return None
    return load_tokenizer(wanted.kind, None if wanted.kind == "bytes" else str(folder))
