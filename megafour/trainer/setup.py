"""Everything that a step moves, built from config and mesh in one place."""

from __future__ import annotations

import torch

from megafour.config.schema import Config
from megafour.mesh import Mesh
from megafour.model.build import AttentionCore
from megafour.model.stage import DTYPES, build_stage, initialize
from megafour.optim.optimizer import ShardedOptimizer
from megafour.parallel.data.buckets import GradientBuckets
from megafour.parallel.pipeline.select import pipeline_of
from megafour.trainer.scaler import LossScaler
from megafour.trainer.step import TrainState


def build_mesh(config: Config, device: torch.device, *, ledger: bool | None = None) -> Mesh:
    """The mesh that a resolved config asks for, over the default process group."""
    from megafour.comm.ledger import Ledger

    p = config.parallel
    counting = config.logging.traffic if ledger is None else ledger
    return Mesh.build(dp=int(p.dp), pp=p.pp, tp=p.tp, cp=p.cp, order=p.order, device=device,
                      ledger=Ledger() if counting else None)


def build_state(config: Config, mesh: Mesh, vocab_size: int, *, attention: AttentionCore | None = None) -> TrainState:
    """Stage, buckets, optimizer and pipeline of this rank, with initial weights from run.seed."""
    stage = build_stage(config, mesh, vocab_size, attention=attention)
    precision = DTYPES[config.train.precision]
    buckets = GradientBuckets(stage.parameters(), mesh.group("dp_cp"), zero_stage=config.parallel.zero_stage,
                              accumulate=torch.promote_types(precision, torch.float32))
    initialize(stage, config.run.seed)
    optimizer = ShardedOptimizer(config.optimizer, buckets)
    groups = {"tp": mesh.group("tp"), "kv": mesh.kv_replicas(config.model.kv_heads),
              "embedding": mesh.group("embedding")}
    return TrainState(mesh, stage, buckets, optimizer, pipeline_of(config),
                      LossScaler.for_precision(config.train.precision),
                      groups, config.train.grad_clip)
