"""Everything that a step moves, built from config and mesh in one place."""

from __future__ import annotations

from functools import partial

import torch

from megafour.comm.group import Group, solo
from megafour.config.errors import ConfigError
from megafour.config.launch import Launch
from megafour.config.schema import Config
from megafour.cost.memory import sharing
from megafour.kernels.matmul import wide_dtype
from megafour.mesh import Mesh, device_of
from megafour.model.stage import DTYPES, Stage, attention_kernel, build_stage, initialize_parameter
from megafour.optim.optimizer import ShardedOptimizer
from megafour.parallel.context import Core
from megafour.parallel.data.buckets import GradientBuckets
from megafour.parallel.pipeline.actions import Pair
from megafour.parallel.pipeline.select import micro_batches, pipeline_of
from megafour.sizes import PRODUCTION, Sizes
from megafour.trainer.scaler import LossScaler
from megafour.trainer.spikes import SpikeGuard
from megafour.trainer.step import TrainState


def choose_device(config: Config, launch: Launch) -> torch.device:
    """Where this rank computes, once this machine is known to have what the config asks of it.

    Raises:
        ConfigError: run.device asks for more GPUs than there are, or kernels.attention for a backend that this device
        does not have.
    """
    device = device_of(launch, config.run.device)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and gpus < launch.local_world:
        raise ConfigError(f"run.device = cuda needs one GPU per local rank: this machine has {gpus} GPUs and "
                          f"{launch.local_world} local ranks; launch fewer ranks, or set run.device=auto, which then "
                          f"takes the CPU")
    try:
        attention_kernel(config, device.type)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return device


def build_mesh(config: Config, device: torch.device, *, ledger: bool | None = None) -> Mesh:
    """The mesh that a resolved config asks for, over the default process group."""
    from megafour.comm.ledger import Ledger

    p = config.parallel
    counting = config.logging.traffic if ledger is None else ledger
    ulysses = int(p.context.ulysses) if p.context.ulysses != "auto" else 1
    return Mesh.build(dp=int(p.dp), pp=p.pp, tp=p.tp, cp=p.cp, ulysses=ulysses, inner_ring=p.context.inner_ring or 1,
                      zero_size=p.zero_size, order=p.order, device=device, ledger=Ledger() if counting else None,
                      two_lanes=runs_pairs(config, device))


def runs_pairs(config: Config, device: torch.device) -> bool:
    """Whether forwards run beside backwards: the schedule has pairs, and there are collectives within them to hide.

    Under ZeRO 3 both halves gather weights over one group, and on GPUs both would need a stream: there the halves of a
    pair run one after the other.
    """
    p = config.parallel
    if device.type != "cpu" or p.tp * p.cp == 1 or sharing(p)[0] == 3:
        return False
    return any(isinstance(step.compute, Pair) for steps in pipeline_of(config).table(micro_batches(config)).steps
               for step in steps)


def sharing_groups(config: Config, mesh: Mesh) -> tuple[Group, Group]:
    """(ranks that share one copy of what ZeRO shards, ranks that hold the same share): together dp×cp."""
    if sharing(config.parallel)[0] == 0:
        return solo("shard", mesh.rank), mesh.group("dp_cp")
    return mesh.group("shard"), mesh.group("replicas")


def build_buckets(config: Config, mesh: Mesh, vocab_size: int, *, attention: Core | None = None,
                  trained: bool = True, sizes: Sizes = PRODUCTION) -> tuple[Stage, GradientBuckets]:
    """What this rank holds, with uninitialised weights: under ZeRO 3 only its share of them ever has storage."""
    (shard, replicas), (zero_stage, _) = sharing_groups(config, mesh), sharing(config.parallel)
    stage = build_stage(config, mesh, vocab_size, attention=attention,
                        weights=torch.device("meta") if zero_stage == 3 else None, sizes=sizes)
    accumulate = wide_dtype(DTYPES[config.train.precision])
    return stage, GradientBuckets(stage.parameters(), shard, replicas=replicas, zero_stage=zero_stage,
                                  accumulate=accumulate, units=stage.units(), device=mesh.device, trained=trained,
                                  sizes=sizes)


def build_state(config: Config, mesh: Mesh, vocab_size: int, *, attention: Core | None = None,
                sizes: Sizes = PRODUCTION) -> TrainState:
    """Stage, buckets, optimizer and pipeline of this rank, with initial weights from run.seed."""
    stage, buckets = build_buckets(config, mesh, vocab_size, attention=attention, sizes=sizes)
    buckets.fill(partial(initialize_parameter, seed=config.run.seed, tile_size=sizes.init_tile))
    optimizer = ShardedOptimizer(config.optimizer, buckets)
    groups = {"tp": mesh.group("tp"), "kv": mesh.kv_replicas(config.model.kv_heads),
              "embedding": mesh.group("embedding")}
    return TrainState(mesh, stage, buckets, optimizer, pipeline_of(config),
                      LossScaler.for_precision(config.train.precision),
                      groups, config.train.grad_clip, spikes=SpikeGuard.of(config.train))
