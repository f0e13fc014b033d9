"""The logical tensors of a whole model by name and shape, without building one."""

from __future__ import annotations

import torch

from megafour.config.schema import Config
from megafour.mesh import Mesh
from megafour.model.stage import build_stage
from megafour.parallel.pieces import named_pieces

ONE_PROCESS = {"parallel.dp": 1, "parallel.pp": 1, "parallel.tp": 1, "parallel.cp": 1, "parallel.context": {},
               "parallel.zero_stage": 0, "parallel.zero_size": None,
               "parallel.pipeline.partition": "auto", "parallel.pipeline.schedule": "1f1b",
               "parallel.pipeline.virtual_stages": None, "train.micro_batch_size": 1, "train.recompute": "none"}
"""What of a training config changes when one process holds the whole model."""


def logical_shapes(config: Config, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Every logical tensor's shape, in the order of registration: what any mesh of this model holds together."""
    alone = Mesh.build(rank=0)    # imagined: the process may be one of many
    stage = build_stage(config.replace(dict(ONE_PROCESS)), alone, vocab_size, device=torch.device("meta"))
    return {piece.name: piece.shape for _, piece in named_pieces(stage)}
