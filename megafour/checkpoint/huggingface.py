"""Hugging Face folders: weights read into any mesh's shards, and mesh-free weights written as such a folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafour.checkpoint.agreement import collect, first_does, share
from megafour.checkpoint.errors import CheckpointError, listed
from megafour.checkpoint.folder import HUGGINGFACE_CONFIG, write_file
from megafour.checkpoint.huggingface_names import Shape, Slot, is_buffer, known_name, slots
from megafour.checkpoint.safetensors_file import (
    DTYPES,
    INDEX,
    ONE_FILE,
    Outgoing,
    SafetensorsFolder,
    write_safetensors,
)
from megafour.checkpoint.tensors import LogicalTensor
from megafour.config.file_system import sync_folder

GENERATION = "generation_config.json"
CARRIED = (GENERATION, "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
           "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja")
"""Files beside the weights that go with them both ways; none of them is code."""
SHARD_BYTES = 5 * 10**9
"""Bytes of weights in one file of an export."""


def carried_files(folder: Path) -> dict[str, Path | str]:
    """The tokenizer's and generation's files of a folder, by name."""
    return {name: folder / name for name in CARRIED if (folder / name).is_file()}


class HuggingFaceWeights:
    """The logical tensors of an open Hugging Face folder."""

    def __init__(self, files: SafetensorsFolder, family: str, shapes: dict[str, Shape]) -> None:
        """Match the folder's tensors with the model's.

        Args:
            files: open.
            family: its `model_type`.
            shapes: every logical tensor of the whole model.
        Raises:
            CheckpointError: naming every tensor that is missing, unknown, quantized or of another shape.
        """
        self.files = files
        self.slots = slots(family, shapes)
        self.names = {known_name(family, name, files.tensors): name for name in files.tensors}
        self._check()

    def _check(self) -> None:
        wanted = {slot.name: slot.shape for slot in self.slots.values()}
        tied = {"lm_head.weight"} if "lm_head.weight" not in wanted else set()
        missing = sorted(wanted.keys() - self.names.keys())
        unknown = sorted(name for name in self.names.keys() - wanted.keys() - tied if not is_buffer(name))
        shapes, types = [], []
        for name in sorted(wanted.keys() & self.names.keys()):
            stored = self.files.tensors[self.names[name]]
            if stored.dtype not in DTYPES:
                types.append(f"{name} is {stored.dtype}")
            elif stored.shape != wanted[name]:
                shapes.append(f"{name} is {stored.shape} in the file, {wanted[name]} in this model")
        problems = [f"{what} ({len(names)}): {listed(names)}" for what, names in (
            ("missing in the files", missing), ("unknown to this model", unknown), ("of another shape", shapes),
            (f"quantized, or of a type other than {', '.join(DTYPES)}", types)) if names]
        if problems:
            raise CheckpointError(f"{self.files.folder} does not fit this model; " + "; ".join(problems))

    def check_tied(self) -> None:
        """A head stored beside a tied embedding must be the embedding, or one of the two would be lost.

        Raises:
            CheckpointError: when it is not.
        """
        if "head.weight" in self.slots or "lm_head.weight" not in self.names:
            return
        stored = self.names["lm_head.weight"]
        embedding = self.files.read(self.names[self.slots["embedding.weight"].name])
        known = self.files.tensors[stored].dtype in DTYPES
        head = self.files.read(stored) if known else None
        if head is None or head.dtype != embedding.dtype or not torch.equal(head, embedding):
            raise CheckpointError(f"{self.files.folder}: tie_word_embeddings is true, but lm_head.weight differs from "
                                  "the embedding; set it to false in config.json if the head is meant")

    def read(self, name: str, offset: Shape, size: Shape) -> Tensor:
        """A rectangle of a logical tensor, in its stored type."""
        slot = self.slots[name]
        x = self.files.read(self.names[slot.name], slot.index(offset, size))
        return x.t() if slot.transposed else x

    def whole(self, name: str, shape: Shape) -> Tensor:
        """A logical tensor, as a view of the file's memory map."""
        slot = self.slots[name]
        x = self.files.read(self.names[slot.name])[slot.index((0,) * len(shape), shape)]
        return x.t() if slot.transposed else x


def load(folder: Path, family: str, shapes: dict[str, Shape], held: list[LogicalTensor],
         group: ProcessGroup | None) -> None:
    """Read a Hugging Face folder into what each rank holds; each reads its own slices. All ranks call it together.

    Args:
        folder: with config.json and safetensors, on a disk that every rank sees.
        family: its `model_type`.
        shapes: every logical tensor of the whole model, by name.
        held: `weights/NAME` entries; their parts are filled in place, converted to their type.
        group: all ranks; None: this process alone.
    Raises:
        CheckpointError: on all ranks, with the same message; a folder that does not fit changes no tensor.
    """
    what = f"loading {folder}"

    def check() -> None:
        with SafetensorsFolder(folder) as files:
            HuggingFaceWeights(files, family, shapes).check_tied()

    first_does(check, group, what)
    problem: str | None = None
    try:
        with SafetensorsFolder(folder) as files, torch.no_grad():
            weights = HuggingFaceWeights(files, family, shapes)
            for tensor in held:
                for offset, size, target in tensor.parts:
                    target.copy_(weights.read(tensor.name.removeprefix("weights/"), offset, size))
    except Exception as error:    # any rank's failure must reach the others, which wait for it
        problem = f"{what} failed: {error}"
    problems = collect(problem, group)
    problem = share(next((p for p in problems or () if p), None), group)
    if problem:
        raise CheckpointError(problem)


def export(out: Path, family: str, config: dict[str, Any], shapes: dict[str, Shape], dtypes: dict[str, torch.dtype],
           read: Callable[[str], Tensor], extra_files: dict[str, Path | str],
           shard_bytes: int = SHARD_BYTES) -> list[str]:
    """Write a Hugging Face folder: whole or absent, holding one tensor in memory at a time.

    Args:
        out: the folder, which must not exist yet, or be empty.
        family: its `model_type`.
        config: the content of config.json.
        shapes, dtypes: of every logical tensor, by name; the types are written as they are.
        read: gives a whole logical tensor of that type.
        extra_files: copied beside the weights.
        shard_bytes: weights beyond this go into further files.
    Returns:
        the names of the files with weights.
    Raises:
        CheckpointError: when it cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} exists already and is not empty; give a folder that does not")
    aside = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    try:
        aside.mkdir(parents=True)
        files = _write_weights(aside, _outgoing(family, shapes, dtypes, read), shard_bytes)
        write_file(aside / HUGGINGFACE_CONFIG, json.dumps(config, indent=2) + "\n")
        for name, source in extra_files.items():
            write_file(aside / name, source.read_bytes() if isinstance(source, Path) else source)
        sync_folder(aside)
        if out.is_dir():
            out.rmdir()
        os.rename(aside, out)
        return files
    except OSError as error:
        raise CheckpointError(f"writing {out} failed: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _outgoing(family: str, shapes: dict[str, Shape], dtypes: dict[str, torch.dtype],
              read: Callable[[str], Tensor]) -> list[Outgoing]:
    """The Hugging Face tensors, each put together from its logical ones when its turn comes."""
    fused: dict[str, list[tuple[str, Slot]]] = {}
    for name, slot in slots(family, shapes).items():
        fused.setdefault(slot.name, []).append((name, slot))

    def maker(members: list[tuple[str, Slot]]) -> Callable[[], Tensor]:
        def make() -> Tensor:
            (first, slot), *others = members
            if not others:
                return read(first).t() if slot.transposed else read(first)
            whole = torch.empty(slot.shape, dtype=dtypes[first])
            for name, place in members:
                part = read(name)
                whole[place.index((0,) * part.dim(), tuple(part.shape))] = part.t() if place.transposed else part
            return whole
        return make

    return [Outgoing(name, members[0][1].shape, dtypes[members[0][0]], maker(members))
            for name, members in fused.items()]


def _write_weights(folder: Path, tensors: list[Outgoing], shard_bytes: int) -> list[str]:
    """One file, or shards of at most `shard_bytes` (a larger tensor has one of its own) and their index."""
    shards: list[list[Outgoing]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(t.nbytes for t in shards[-1]) + tensor.nbytes > shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    if len(shards) == 1:
        write_safetensors(folder / ONE_FILE, tensors)
        return [ONE_FILE]
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(folder / name, shard)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors)},
             "weight_map": {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}}
    write_file(folder / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")
    return names
