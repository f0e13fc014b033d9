"""Hugging Face folders to checkpoints and back, tensor by tensor, on one process and without a GPU."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from megafour.architecture.model import logical_shapes
from megafour.checkpoint import huggingface, store
from megafour.checkpoint.errors import CheckpointError
from megafour.checkpoint.folder import HUGGINGFACE_CONFIG, is_huggingface
from megafour.checkpoint.reading import CheckpointReader
from megafour.checkpoint.safetensors_file import DTYPES, SafetensorsFolder, ignored
from megafour.checkpoint.tensors import LogicalTensor
from megafour.config.huggingface import huggingface_family
from megafour.config.huggingface_export import family_of, huggingface_config
from megafour.config.json_file import read_object
from megafour.config.load import load_config, to_yaml
from megafour.config.notes import say_note
from megafour.config.rules import resolve
from megafour.config.schema import Config
from megafour.data.errors import DataError
from megafour.data.tokenizer import Tokenizer
from megafour.inference.load import (
    find_models,
    first_whole,
    huggingface_values,
    open_tokenizer,
    vocabulary_of,
)

WEIGHTS = "weights/"


def from_huggingface(folder: Path, out: Path) -> Path:
    """Write a Hugging Face folder as a checkpoint of step 0, in the types in which its weights are stored.

    Args:
        folder: with config.json and safetensors; sharded ones too.
        out: a folder, which will hold the checkpoint `step-00000000`.
    Returns:
        the checkpoint.
    Raises:
        ConfigError, CheckpointError: naming the key or the tensor that this framework would not compute alike.
    """
    if not is_huggingface(folder):
        raise CheckpointError(f"{folder} is no Hugging Face folder: it has no {HUGGINGFACE_CONFIG}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} exists already and is not empty; give a folder that does not")
    config = resolve(load_config(None, None, huggingface_values(folder)), 1, data=False)
    shapes = logical_shapes(config, vocabulary_of(folder, config))
    with SafetensorsFolder(folder) as files:
        weights = huggingface.HuggingFaceWeights(files, huggingface_family(folder), shapes)
        weights.check_tied()
        for note in ignored(folder):
            say_note(note)
        with suppress(DataError):       # it is copied as it is; only its size is looked at
            open_tokenizer(folder, config)
        held = []
        for name, shape in shapes.items():
            whole = weights.whole(name, shape)
            held.append(LogicalTensor(WEIGHTS + name, shape, whole.dtype, [((0,) * len(shape), shape, whole)]))
        extra: dict[str, Path | str] = {"config.yaml": to_yaml(config), **huggingface.carried_files(folder)}
        state = {"consumed_samples": 0, "consumed_tokens": 0, "skipped_steps": 0, "optimizer_updates": 0}
        return store.save(out, 0, held, state, extra, None)


def to_huggingface(checkpoint: Path, out: Path, dtype: torch.dtype | None = None,
                   shard_bytes: int = huggingface.SHARD_BYTES) -> list[str]:
    """Write a checkpoint of any mesh as a Hugging Face folder that `transformers` loads.

    Args:
        checkpoint: a run folder (its newest whole checkpoint), or one checkpoint.
        out: a folder that does not exist yet.
        dtype: of the weights; None: as they are stored (a run's masters are fp32, or fp64 in fp64 runs).
        shard_bytes: size beyond which the weights are cut into several files.
    Returns:
        the names of the files with weights.
    Raises:
        ConfigError: naming the key that no supported Hugging Face family has.
        CheckpointError: for a damaged checkpoint, or one that cannot be written.
    """
    store.find(checkpoint)      # a Hugging Face folder is none
    folder = first_whole(find_models(checkpoint), None)     # every byte: what is exported carries no checksum
    config = load_config(str(folder / "config.yaml"))
    family = family_of(config.model)
    shapes = logical_shapes(config, vocabulary_of(folder, config))
    reader = CheckpointReader(folder)
    _check_shapes(reader, shapes)
    dtypes = {name: dtype or reader.tensors[WEIGHTS + name][1] for name in shapes}
    written = huggingface_config(config.model, str(_widest(dtypes)).removeprefix("torch."),
                                 **_token_ids(folder, open_tokenizer(folder, config), vocabulary_of(folder, config)))
    return huggingface.export(out, family, written, shapes, dtypes,
                              lambda name: reader.read(WEIGHTS + name, dtypes[name]),
                              _tokenizer_files(folder, config), shard_bytes)


def _check_shapes(reader: CheckpointReader, shapes: dict[str, tuple[int, ...]]) -> None:
    """The checkpoint's weights are those of its own config."""
    stored = {name.removeprefix(WEIGHTS): entry for name, entry in reader.tensors.items() if name.startswith(WEIGHTS)}
    odd = {name for name in shapes.keys() & stored.keys()
           if shapes[name] != stored[name][0] or stored[name][1] not in DTYPES.values()}
    wrong = sorted((stored.keys() ^ shapes.keys()) | odd)
    if wrong:
        raise CheckpointError(f"{reader.path} does not fit its own config.yaml: {', '.join(wrong)}")


def _widest(dtypes: dict[str, torch.dtype]) -> torch.dtype:
    return max(dtypes.values(), key=lambda dtype: dtype.itemsize)


def _token_ids(folder: Path, tokenizer: Tokenizer | None, rows: int) -> dict[str, Any]:
    """`eos` and `other_ids` of config.json: what the folder's generation settings say, else the tokenizer's mark.

    A pad id beyond the embedding's rows is left out: `transformers` refuses such a config.
    """
    ids: dict[str, Any] = {}
    path = folder / huggingface.GENERATION
    if path.is_file():
        found = read_object(path, DataError)
        ids = {key: found[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in found}
    pad = ids.get("pad_token_id")
    if isinstance(pad, int) and pad >= rows:
        del ids["pad_token_id"]
    eos = ids.pop("eos_token_id", tokenizer.eod_id if tokenizer else None)
    return {"eos": eos, "other_ids": ids}


def _tokenizer_files(folder: Path, config: Config) -> dict[str, Path | str]:
    """The tokenizer's files, and what `transformers` must know to open a SentencePiece model as we do."""
    files = huggingface.carried_files(folder)
    model = files.get("tokenizer.model")
    if isinstance(model, Path) and "tokenizer_config.json" not in files and "tokenizer.json" not in files:
        files["tokenizer_config.json"] = json.dumps({
            "tokenizer_class": "LlamaTokenizer", "add_bos_token": False, "add_eos_token": False, "legacy": False,
            "add_prefix_space": _adds_space(model), "clean_up_tokenization_spaces": False,
            "model_max_length": config.model.max_position_embeddings}, indent=2)
    return files


def _adds_space(model: Path) -> bool:
    """Whether a SentencePiece model puts a space before a text; `transformers` does not ask the model.

    It puts none before a text that begins with a space, where the model would: there its ids differ from ours.
    """
    import sentencepiece

    pieces = sentencepiece.SentencePieceProcessor(model_file=str(model)).encode("a", out_type=str)
    return pieces[0].startswith("\u2581")
