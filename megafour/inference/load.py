"""A trained model for inference, on one process or a mesh: from a run folder, a checkpoint or a Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megafour.architecture.model import logical_shapes
from megafour.checkpoint import huggingface, store, whole
from megafour.checkpoint.agreement import rank_in
from megafour.checkpoint.errors import CheckpointError
from megafour.checkpoint.folder import find_any, is_huggingface
from megafour.checkpoint.safetensors_file import ignored
from megafour.checkpoint.tensors import LogicalTensor
from megafour.checkpoint.whole import sound_at_a_glance
from megafour.config.errors import say_line
from megafour.config.huggingface import huggingface_family, read_huggingface
from megafour.config.launch import Launch
from megafour.config.load import load_config
from megafour.config.notes import say_note
from megafour.config.rules import resolve
from megafour.config.schema import Config
from megafour.cost.memory import sharing
from megafour.data.description import rows_note
from megafour.data.tokenizer import FILE_NAMES, Tokenizer, load_tokenizer
from megafour.mesh import Mesh
from megafour.model.stage import Stage, build_stage
from megafour.parallel.pieces import named_pieces
from megafour.parallel.pipeline.select import Pipeline, pipeline_of
from megafour.trainer.saving import shard_parts
from megafour.trainer.setup import build_buckets


@dataclass
class Loaded:
    """This rank's part of a model in evaluation mode."""

    config: Config
    mesh: Mesh
    stage: Stage
    pipeline: Pipeline


def find_model(path: Path) -> Path:
    """The folder with the weights that a user means: a Hugging Face folder, or a checkpoint, by itself or in its run.

    Raises:
        CheckpointError: where there is none.
    """
    return Path(path) if is_huggingface(Path(path)) else store.find(Path(path))


def find_models(path: Path) -> list[Path]:
    """As `find_model`, with the older checkpoints of a run's folder after it, the newest first.

    Of several, those whose small files (config, tokenizer) or sizes are damaged are left out, with a line on standard
    error; what the shards hold is not read here.

    Raises:
        CheckpointError: where there is none, or none is whole.
    """
    models = find_any(path)
    sound, damaged = sound_at_a_glance(models)
    if models[0] not in sound and Launch.from_environment().rank == 0:
        _say_skipped(damaged)
    return sound


def first_whole(models: list[Path], group: ProcessGroup | None) -> Path:
    """The first of what `find_models` gave whose bytes are whole. Every rank of the group calls it together.

    Raises:
        CheckpointError: on all ranks alike, where none is.
    """
    if is_huggingface(models[0]):
        return models[0]        # it carries no checksums
    model, damaged = whole.first_whole(models, group)
    if rank_in(group) == 0:
        _say_skipped(damaged)
    return model


def _say_skipped(damaged: list[str]) -> None:
    for text in damaged:
        say_line(f"skipped: {text}")


def model_settings(folder: Path, overrides: list[str] | None = None, precision: str = "fp32") -> Config:
    """The configuration under which a folder's model is used: its own model and data, all else at defaults.

    How it was trained (mesh, batch, device) does not count here, nor does dropout. Not resolved yet.

    Args:
        folder: as `find_model` gives it.
        overrides: `section.key=value`.
        precision: of weights and activations, where the overrides do not say it.
    Raises:
        ConfigError: for what cannot be computed, by name.
    """
    if is_huggingface(folder):
        values = huggingface_values(folder)
    else:
        trained = load_config(str(folder / "config.yaml"))
        kept = trained.model_dump()
        values = {"model": kept["model"], "run": {"seed": trained.run.seed}, "data": {
            key: kept["data"][key] for key in ("seq_length", "document_mask", "tokenizer")}}
    values["model"].update(attention_dropout=0.0, hidden_dropout=0.0)
    values["train"] = {"precision": precision}
    return load_config(None, overrides, values)


def huggingface_values(folder: Path) -> dict[str, Any]:
    """Sections `model` and `data` of a Hugging Face folder: its shape, its longest sequence, its tokenizer."""
    model = read_huggingface(folder)
    data: dict[str, Any] = {"seq_length": model["max_position_embeddings"]}
    for kind in ("huggingface", "sentencepiece"):
        if (folder / FILE_NAMES[kind]).is_file():
            data["tokenizer"] = {"kind": kind, "path": str(folder / FILE_NAMES[kind])}
            break
    return {"model": model, "data": data}


def vocabulary_of(folder: Path, config: Config) -> int:
    """The number of token ids, which a saved or converted model always knows."""
    if not isinstance(config.model.vocab_size, int):
        raise CheckpointError(f"{folder}: model.vocab_size={config.model.vocab_size} is no number")
    return config.model.vocab_size


def load_stage(folder: Path, config: Config, mesh: Mesh) -> Loaded:
    """Build this rank's stage and read its weights. Every rank of the mesh calls it together.

    With `parallel.zero_stage` 3 data-parallel ranks keep a share of the weights each, and gather them layer by layer.

    Args:
        folder: as `first_whole` gives it: a checkpoint's files are not summed again.
        config: resolved for the mesh.
    Raises:
        CheckpointError: on all ranks, where the folder is damaged or does not fit its own config.
    """
    vocab_size = vocabulary_of(folder, config)
    if sharing(config.parallel)[0] == 3:
        stage, buckets = build_buckets(config, mesh, vocab_size, trained=False)
        held = [LogicalTensor(f"weights/{name}", shape, bucket.weight_shard.dtype, parts, True)
                for bucket in buckets.buckets for name, shape, _, parts in shard_parts(bucket, bucket.weight_shard)]
    else:
        stage = build_stage(config, mesh, vocab_size)
        held = [LogicalTensor(f"weights/{piece.name}", piece.shape, param.dtype,
                              [(piece.offset, piece.size, param.data[piece.rows])], True)
                for param, piece in named_pieces(stage)]
    group = mesh.group("world").pg
    with torch.no_grad():
        if is_huggingface(folder):
            for note in ignored(folder):
                say_note(note)
            huggingface.load(folder, huggingface_family(folder), logical_shapes(config, vocab_size), held, group)
        else:
            store.load(folder, held, group, only=("weights/",), cast=True, verified=True)
    return Loaded(config, mesh, stage.eval(), pipeline_of(config))


def load_model(path: Path, precision: str = "fp32") -> tuple[Stage, Tokenizer | None, Config]:
    """Weights, tokenizer and config of a model, whole on the CPU.

    Args:
        path: a run folder or a folder of checkpoints (the newest whole one), one checkpoint, or a Hugging Face folder.
        precision: dtype of weights and activations.
    Raises:
        CheckpointError: where there is no whole checkpoint, or it does not fit its own config.
    """
    folder = first_whole(find_models(path), None)
    config = resolve(model_settings(folder, precision=precision), 1, data=False)
    return load_stage(folder, config, Mesh.single()).stage, open_tokenizer(folder, config), config


def open_tokenizer(folder: Path, config: Config) -> Tokenizer | None:
    """The tokenizer that was saved with the model; None where there is none. Ids beyond the model's rows are said."""
    wanted = config.data.tokenizer
    if wanted is None:
        return None
    tokenizer = load_tokenizer(wanted.kind, None if wanted.kind == "bytes" else str(folder))
    for note in (*tokenizer.notes, *rows_note(tokenizer.info, vocabulary_of(folder, config))):
        say_note(note)
    return tokenizer
