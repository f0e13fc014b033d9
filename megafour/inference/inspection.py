"""What a checkpoint, a dataset or a config holds, in words; of two of a kind, what differs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megafour.architecture.model import logical_shapes
from megafour.checkpoint import folder as checkpoints
from megafour.checkpoint import huggingface
from megafour.checkpoint.reading import CheckpointReader
from megafour.checkpoint.safetensors_file import DTYPES, SafetensorsFolder, ignored
from megafour.config.errors import ConfigError
from megafour.config.huggingface import huggingface_family
from megafour.config.load import load_config
from megafour.config.rules import resolve, smallest_world
from megafour.config.schema import Config
from megafour.config.yaml_text import one_line
from megafour.cost.describe import describe, model_words
from megafour.inference.load import find_models, first_whole, huggingface_values, vocabulary_of
from megafour.parallel.context import balance

BLOCK = 1 << 24
"""Elements of a tensor that are looked at at a time: no fp64 copy of a whole embedding."""


class Held:
    """The tensors of a checkpoint or a Hugging Face folder by logical name, read one after the other."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        """Open it.

        Args:
            path: a run folder, a checkpoint, or a Hugging Face folder.
            stack: closes the files.
        Raises:
            CheckpointError, ConfigError: for a folder that is damaged or cannot be read alike.
        """
        self.folder = first_whole(find_models(path), None)      # a flipped bit shows in no norm
        self.read: Callable[[str], Tensor]
        if checkpoints.is_huggingface(self.folder):
            self.config = resolve(load_config(None, None, huggingface_values(self.folder)), 1, data=False)
            shapes = logical_shapes(self.config, vocabulary_of(self.folder, self.config))
            files = stack.enter_context(SafetensorsFolder(self.folder))
            weights = huggingface.HuggingFaceWeights(files, huggingface_family(self.folder), shapes)
            stored = {name: files.tensors[weights.names[slot.name]] for name, slot in weights.slots.items()}
            self.tensors = {f"weights/{name}": (shape, DTYPES[stored[name].dtype]) for name, shape in shapes.items()}
            self.read = lambda key: weights.whole(key.removeprefix("weights/"), self.tensors[key][0])
            self.state: dict[str, Any] = {}
        else:
            reader = CheckpointReader(self.folder)
            self.config, self.state = load_config(str(self.folder / "config.yaml")), checkpoints.read_state(self.folder)
            self.tensors, self.read = reader.tensors, reader.read

    def facts(self) -> dict[str, object]:
        """Step, samples, tokens, and what else was saved beside the tensors."""
        return {key: self.state[key] for key in ("step", *self.state) if key in self.state}


def checkpoint_lines(path: Path) -> Iterator[str]:
    """Step, samples, config and every tensor of a checkpoint or Hugging Face folder."""
    with ExitStack() as stack:
        held = Held(path, stack)
        if held.state:
            yield f"checkpoint {held.folder}"
            yield from _facts(held.facts())
            yield describe(held.config)
        else:
            yield f"Hugging Face folder {held.folder} ({huggingface_family(held.folder)})"
            yield f"model  {model_words(held.config.model)}"
            yield from (f"note: {text}" for text in ignored(held.folder))
        yield ""
        width = max(len(name) for name in held.tensors)
        yield f"{'tensor':<{width}}  {'shape':<16}{'type':<10}{'norm':>12}  NaN"
        totals = {"elements": 0, "nan": 0, "infinite": 0}
        for name, (shape, dtype) in held.tensors.items():
            norm, nan, infinite = measure(held.read(name))
            totals = {"elements": totals["elements"] + math.prod(shape), "nan": totals["nan"] + nan,
                      "infinite": totals["infinite"] + infinite}
            words = f"{nan}" + (f", {infinite} infinite" if infinite else "")
            yield f"{name:<{width}}  {_shape(shape):<16}{_type(dtype):<10}{norm:>12.6g}  {words}"
        yield (f"{len(held.tensors)} tensors, {totals['elements']:,} numbers, {totals['nan']} NaN, "
               f"{totals['infinite']} infinite")


def measure(x: Tensor) -> tuple[float, int, int]:
    """(Euclidean norm of the finite elements, number of NaNs, number of infinities), in fp64 by blocks."""
    square, nan, infinite = 0.0, 0, 0
    for block in x.reshape(-1).split(BLOCK):
        finite = block.isfinite()
        nan += int(block.isnan().sum())
        infinite += int(block.isinf().sum())
        square += float(torch.where(finite, block, 0).double().square().sum())
    return math.sqrt(square), nan, infinite


def checkpoint_differences(first: Path, second: Path) -> Iterator[str]:
    """What two checkpoints (or Hugging Face folders) differ in: state, config, and each tensor by how much."""
    with ExitStack() as stack:
        a, b = Held(first, stack), Held(second, stack)
        yield f"{a.folder} and {b.folder}"
        yield from mapping_differences(a.facts(), b.facts())
        yield from mapping_differences(flat(a.config), flat(b.config))
        for name in sorted(a.tensors.keys() ^ b.tensors.keys()):
            yield f"{name}: only in the {'first' if name in a.tensors else 'second'}"
        equal, differing = 0, []
        for name in sorted(a.tensors.keys() & b.tensors.keys()):
            if a.tensors[name][0] != b.tensors[name][0]:
                yield f"{name}: {_shape(a.tensors[name][0])} -> {_shape(b.tensors[name][0])}"
                continue
            x, y = a.read(name), b.read(name)
            if x.dtype == y.dtype and torch.equal(x, y):
                equal += 1
            else:
                differing.append((name, *_distance(x, y)))
        for name, largest, relative in sorted(differing, key=lambda row: -row[2]):
            types = f", {_type(a.tensors[name][1])} -> {_type(b.tensors[name][1])}" if (
                a.tensors[name][1] != b.tensors[name][1]) else ""
            yield f"{name}: max |a - b| {largest:.3g}, |a - b| / |a| {relative:.3g}{types}"
        yield f"{equal} tensors are equal, {len(differing)} differ"


def _distance(x: Tensor, y: Tensor) -> tuple[float, float]:
    """(largest difference, norm of the difference over the first one's norm); NaN where either has one."""
    largest, square, whole = 0.0, 0.0, 0.0
    for a, b in zip(x.reshape(-1).split(BLOCK), y.reshape(-1).split(BLOCK), strict=True):
        delta = a.double() - b.double()
        if delta.isnan().any():
            return math.nan, math.nan
        largest = max(largest, float(delta.abs().max())) if len(delta) else largest
        square, whole = square + float(delta.square().sum()), whole + float(a.double().square().sum())
    return largest, math.sqrt(square / whole) if whole else (math.inf if square else 0.0)


def config_lines(path: Path) -> Iterator[str]:
    """What a config trains on its smallest world, and every key that it changes."""
    config = load_config(str(path))
    yield f"config {path}"
    resolved = resolve(config, smallest_world(config), data=False)
    yield describe(resolved)
    yield f"balance {balance.describe(resolved)}"
    changed = mapping_differences(flat(Config()), flat(config))
    yield from ("", "changed from the defaults:", *changed)


def config_differences(first: Path, second: Path) -> Iterator[str]:
    """Every key in which two configs differ, with both values."""
    yield f"{first} and {second}"
    found = list(mapping_differences(flat(load_config(str(first))), flat(load_config(str(second)))))
    yield from found or ["no key differs"]


def flat(config: Config) -> dict[str, object]:
    """`{"parallel.tp": 2, ...}`: every key that is one value."""
    found: dict[str, object] = {}

    def walk(tree: dict[str, Any], prefix: str) -> None:
        for key, value in tree.items():
            if isinstance(value, dict) and value:
                walk(value, f"{prefix}{key}.")
            else:
                found[prefix + key] = value

    walk(config.model_dump(), "")
    return found


def mapping_differences(a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    """`key: old -> new` for every key that differs; one that is not there counts as null."""
    for key in [*a, *(key for key in b if key not in a)]:
        # A nullable mapping is one key where it is null, and its own keys where it is set: those are shown.
        opened = any(other.startswith(f"{key}.") for other in (*a, *b))
        if a.get(key) != b.get(key) and not opened:
            yield f"{key}: {one_line(a.get(key))} -> {one_line(b.get(key))}"


def _facts(facts: dict[str, Any]) -> Iterator[str]:
    yield ", ".join(f"{key.replace('_', ' ')} {value:,}" for key, value in facts.items() if isinstance(value, int))


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def kind_of(path: Path) -> str:
    """`checkpoint`, `dataset` or `config`.

    Raises:
        ConfigError: for a path that is none of them.
    """
    if path.is_file() and path.suffix in (".yaml", ".yml"):
        return "config"
    if Path(f"{str(path).removesuffix('.bin').removesuffix('.idx')}.idx").is_file():
        return "dataset"
    if path.is_dir():
        return "checkpoint"
    raise ConfigError(f"{path} is neither a checkpoint (a run folder, one checkpoint, a Hugging Face folder), nor a "
                      "dataset (PREFIX of PREFIX.bin and PREFIX.idx), nor a config (a .yaml)")
