"""The shipped configs: each resolves, and every rank of its world gets shapes that make up the whole model."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch

from megafour.config.load import load_config
from megafour.config.rules import resolve
from megafour.mesh import Mesh
from megafour.model.stage import build_stage
from megafour.parallel.pieces import named_pieces
from tests.test_architecture import check_described

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


@pytest.mark.parametrize(("name", "world"), [("quickstart", 16), ("gpt2-124m", 8), ("llama3-8b", 8),
                                             ("llama3-70b-128k", 128)])
def test_every_rank_builds_its_shapes(name: str, world: int) -> None:
    """On the meta device: as described, and the counted pieces of one replica cover each logical tensor once."""
    config = resolve(load_config(str(CONFIGS / f"{name}.yaml")), world)
    p, vocab = config.parallel, config.model.vocab_size
    vocab = vocab if isinstance(vocab, int) else 2048
    covered: dict[str, int] = defaultdict(int)
    shapes: dict[str, tuple[int, ...]] = {}
    for rank in range(world):
        mesh = Mesh.build(dp=int(p.dp), pp=p.pp, tp=p.tp, cp=p.cp, order=p.order, rank=rank)
        stage = build_stage(config, mesh, vocab, device=torch.device("meta"))
        assert stage.activation_shape(config.train.micro_batch_size)[0] * p.cp * (
            p.tp if p.sequence_parallel else 1) == config.data.seq_length
        if mesh.group("dp_cp").rank:
            continue
        check_described(config, mesh, stage, vocab)
        for _, piece in named_pieces(stage):
            shapes[piece.name] = piece.shape
            covered[piece.name] += piece.counted * torch.Size(piece.size).numel()
    assert covered == {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    layers = {name.split(".")[1] for name in shapes if name.startswith("layers.")}
    assert layers == {str(i) for i in range(config.model.num_layers)}


def test_mesh_orders() -> None:
    """Default: tp fastest, pp slowest; pp-inner swaps pp and dp."""
    outer = [Mesh.build(dp=2, pp=2, tp=2, cp=2, rank=r) for r in range(16)]
    assert outer[0].group("tp").ranks == (0, 1) and outer[0].group("cp").ranks == (0, 2)
    assert outer[0].group("dp").ranks == (0, 4) and outer[0].group("pp").ranks == (0, 8)
    assert outer[5].group("dp_cp").ranks == (1, 3, 5, 7) and outer[5].describe() == "rank 5 (dp1-pp0-tp1-cp0)"
    inner = Mesh.build(dp=2, pp=2, tp=2, cp=2, order="pp-inner", rank=0)
    assert inner.group("pp").ranks == (0, 4) and inner.group("dp").ranks == (0, 8)
    assert outer[0].group("embedding").ranks == (0, 8)


@pytest.mark.parametrize(("env", "expected"), [
    ({}, (0, 1)), ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "SLURM_PROCID": "9"}, (3, 4)),
    ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "1"}, (0, 1)),
    ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2",
      "MASTER_ADDR": "node1"}, (5, 8))])
def test_launchers(env: dict[str, str], expected: tuple[int, int]) -> None:
    """torchrun's variables win over SLURM's; an sbatch shell without srun is a world of one."""
    from megafour.mesh import Launch

    launch = Launch.from_environment(env)
    assert (launch.rank, launch.world) == expected
