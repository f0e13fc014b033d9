"""The description of a model against the stages that are built from it, on every rank of meshes of every preset."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch

from megafour.architecture.model import Architecture, Part
from megafour.architecture.weights import ParameterSpec, Split, TensorParallel, Weight
from megafour.config.load import load_config
from megafour.config.presets import PRESETS
from megafour.config.rules import resolve
from megafour.config.schema import Config
from megafour.cost.memory import ELEMENT
from megafour.cost.parameters import parameters, tensor_parallel
from megafour.mesh import Mesh
from megafour.model.stage import Stage, build_stage
from megafour.parallel.data.units import described
from megafour.parallel.pieces import named_pieces, pieces_of, read_by_backward, uses_of

MESHES = {"one rank": (1, []), "tp2": (2, ["parallel.tp=2"]), "tp2 without sp": (2, ["parallel.tp=2",
          "parallel.sequence_parallel=false"]), "pp2-tp2": (4, ["parallel.pp=2", "parallel.tp=2"]),
          "pp2 in a V": (2, ["parallel.pp=2", "parallel.pipeline.schedule=zb_v"]),
          "tp4-cp2": (8, ["parallel.tp=4", "parallel.cp=2"]), "tp16": (16, ["parallel.tp=16"])}


def stages_of(preset: str, mesh: str):
    """(config, mesh, stage on the meta device) of every rank; none where the preset's heads do not fit."""
    world, changes = MESHES[mesh]
    vocab = [] if isinstance(PRESETS[preset].get("vocab_size"), int) else ["model.vocab_size=131"]
    loaded = load_config(None, [f"model.preset={preset}", "model.num_layers=5", "data.seq_length=64", *vocab, *changes])
    tp, heads = loaded.parallel.tp, (loaded.model.num_attention_heads, loaded.model.kv_heads)
    if heads[0] % tp or (heads[1] % tp and tp % heads[1]):
        return
    config = resolve(loaded, world, data=False)
    p = config.parallel
    for rank in range(world):
        at = Mesh.build(dp=int(p.dp), pp=p.pp, tp=p.tp, cp=p.cp, order=p.order, rank=rank)
        yield config, at, build_stage(config, at, int(config.model.vocab_size), device=torch.device("meta"))


def parts_of(stage: Stage) -> list[Part]:
    found = []
    for decoder in stage.decoders:
        layers = [int(name) for name in decoder.layers]
        found.append(Part(range(layers[0], layers[-1] + 1), decoder.first, decoder.last))
    return found


def check_described(config: Config, mesh: Mesh, stage: Stage, vocab: int) -> None:
    """Parameters in their order, their bytes and pieces, and what the formulas of buckets and ZeRO know of them."""
    tp_rank, parts = mesh.group("tp").rank, parts_of(stage)
    specs = [spec for _, held in Architecture(config.model, vocab).units(parts) for spec in held]
    at, built = tensor_parallel(config, tp_rank), list(stage.parameters())
    assert [spec.shape(at) for spec in specs] == [tuple(param.shape) for param in built]
    assert [spec.pieces(at) for spec in specs] == [pieces_of(param) for param in built]
    assert [(s.uses, s.read_by_backward) for s in specs] == [(uses_of(p), read_by_backward(p)) for p in built]
    assert sum(math.prod(spec.shape(at)) for spec in specs) * ELEMENT[config.train.precision] == sum(
        param.nbytes for param in built)
    assert parameters(Architecture(config.model, vocab), parts, at) == described(built, stage.units())


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_rank_builds_what_is_described(preset: str, mesh: str) -> None:
    for config, at, stage in stages_of(preset, mesh):
        check_described(config, at, stage, int(config.model.vocab_size))


@pytest.mark.parametrize("preset", PRESETS)
def test_logical_tensors_are_those_of_one_process(preset: str) -> None:
    ((config, _, stage),) = stages_of(preset, "one rank")
    shapes = Architecture(config.model, int(config.model.vocab_size)).shapes()
    assert list(shapes.items()) == [(piece.name, piece.shape) for _, piece in named_pieces(stage)]


SPLITS = [Split(0, 8), Split(1, 4), Split(0, 2, replicas="kv"), Split(0, 1, replicas="kv"), Split(0, 24, padded=True),
          Split(0, 3, padded=True), None]


@pytest.mark.parametrize(("split", "size"), [*product(SPLITS, (1, 2, 4, 16))])
def test_counted_pieces_cover_a_weight_once(split: Split | None, size: int) -> None:
    """And where several ranks hold the same elements, each copy says which group sums its gradients, if any is due."""
    weight = Weight("w", (24, 8) if split is None or split.units != 3 else (3, 8), split)
    if split is not None and not split.padded and split.replicas is None and split.units % size:
        with pytest.raises(ValueError, match=f"{split.units} units do not divide over {size} tensor-parallel ranks"):
            weight.piece(TensorParallel(size, 0))
        return
    held, counted = np.zeros(weight.shape, int), np.zeros(weight.shape, int)
    for rank in range(size):
        for at in (TensorParallel(size, rank), TensorParallel(size, rank, size > 1)):
            piece = weight.piece(at)
            assert all(n <= most for n, most in zip(piece.size, weight.local_shape(at), strict=True))
        place = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.size, strict=True))
        held[place] += 1
        counted[place] += piece.counted
        copies = size if split is None else split.copies(size)
        assert piece.reduce == (None if copies == 1 else "tp" if split is None else "kv")
        assert weight.piece(TensorParallel(size, rank)).reduce == (piece.reduce if split is not None else None)
    assert (counted == 1).all()
    assert (held == (size if split is None else split.copies(size))).all()


def test_a_fused_parameter_holds_its_weights_one_below_the_other() -> None:
    spec = ParameterSpec(tuple(Weight(f"w{n}", (n, 4), Split(0, n // 4)) for n in (8, 16)))
    at = TensorParallel(2, 1)
    first, second = spec.pieces(at)
    assert spec.shape(at) == (12, 4)
    assert (first.offset, first.size, first.rows) == ((4, 0), (4, 4), slice(0, 4))
    assert (second.offset, second.size, second.rows) == ((8, 0), (8, 4), slice(4, 12))
    assert second.flat_range((12, 4)) == (16, 48)


@pytest.mark.parametrize(("sequence_parallel", "summed"), [
    (False, {"attention.q_norm", "attention.k_norm"}),
    (True, {"attention.q_norm", "attention.k_norm", "attention_norm", "mlp_norm", "norm"})])
def test_weights_whose_gradient_tp_must_sum(sequence_parallel: bool, summed: set[str]) -> None:
    """Each rank normalises its own queries and keys, and under sequence parallelism its share of the tokens."""
    config = load_config(None, ["model.preset=qwen3-0.6b"])
    units = Architecture(config.model, 131).units([Part(range(1), True, True)])
    found = {piece.name for _, held in units for spec in held
             for piece in spec.pieces(TensorParallel(2, 0, sequence_parallel)) if piece.reduce == "tp"}
    assert {name.removeprefix("layers.0.").removesuffix(".weight") for name in found} == summed
