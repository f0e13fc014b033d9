"""What differs between a checkpoint's settings and those of the launch that resumes it: refused, noted or nothing."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from megafour.checkpoint import folder as checkpoints
from megafour.checkpoint.errors import CheckpointError
from megafour.config.errors import ConfigError
from megafour.config.load import to_yaml
from megafour.config.schema import Config
from megafour.config.yaml_text import one_line
from megafour.data.dataset import Datasets
from megafour.data.progress import changed, rewritten_sets, without_checksums

MEANING = ("model", "run.seed", "data.train", "data.split", "data.seq_length", "data.document_mask", "data.tokenizer")
"""Keys and sections without which the rest of the run would be another run's."""
HARMLESS = ("model.attention_dropout", "model.hidden_dropout", "model.init_std", "model.preset")
"""Keys of those sections that a run may change on its way."""
SILENT = ("run.name", "run.dir", "run.device", "parallel", "data.valid", "data.workers", "train.micro_batch_size",
          "train.recompute", "eval", "checkpoint", "kernels", "logging", "model.preset")
"""Keys and sections that change where and how a run computes, and not what."""


def check_allowed(keys: Collection[str]) -> None:
    """Refuse a key of --allow-change that names nothing which needs it.

    Raises:
        ConfigError: naming the key.
    """
    for key in keys:
        if not any(_within(key, part) or _within(part, key) for part in MEANING):
            raise ConfigError(f"--allow-change {key}: no change of that key is refused; those of {', '.join(MEANING)} "
                              f"are")


def check_changes(path: Path, config: Config, datasets: Datasets, allowed: Collection[str]) -> list[str]:
    """Compare a checkpoint's settings with this launch's.

    Args:
        path: the checkpoint.
        allowed: keys or sections whose change this one launch allows.
    Returns:
        a line for each change that is worth one, and for what cannot be compared.
    Raises:
        CheckpointError: the checkpoint's settings cannot be read.
        ConfigError: naming every setting, with its old and new value, that changes what the run means.
    """
    saved = _saved_config(path)
    found = [one for one in _differences(saved, yaml.safe_load(to_yaml(config)))
             if not one[0].startswith("data.train")]
    state = checkpoints.read_state(path)
    _check_optimizer(path, saved, config)
    if "data" in state:
        blend = changed(datasets.train, state["data"])
        found += [("data.train", blend)] if blend else []
    notes = _notes(datasets, state)
    hashes = state.get("tokenizer"), datasets.tokenizer
    if all(hashes):     # the tokenizer itself counts, not where it lies
        found = [one for one in found if not _within(one[0], "data.tokenizer")]
        if hashes[0] != hashes[1]:
            found.append(("data.tokenizer", f"hash {str(hashes[0])[:12]} -> {hashes[1][:12]}"))
    refused = [(key, text) for key, text in found if _meaning(key) and not any(_within(key, one) for one in allowed)]
    if refused:
        fix = " ".join(f"--allow-change {key}" for key, _ in refused)
        raise ConfigError(f"{path} was saved with other settings, and this would go on as another run: "
                          f"{'; '.join(f'{key}: {text}' for key, text in refused)}; set them as they were, or give "
                          f"`{fix}` to this launch")
    return [*(f"changed since the checkpoint: {key}: {text}" for key, text in found
              if not any(_within(key, part) for part in SILENT)), *notes]


def _notes(datasets: Datasets, state: dict[str, Any]) -> list[str]:
    """Lines on data that is not compared, and on validation data, whose change is no reason to refuse a run."""
    bare = without_checksums(state["data"]) if "data" in state else []
    notes = [f"note: the checkpoint carries no checksum of {', '.join(bare)}: a rewrite that keeps the number of "
             f"tokens would go unnoticed"] if bare else []
    return notes + [f"changed since the checkpoint: data.valid.{name}: {text}; valid_loss/{name} before and after "
                    f"cannot be compared" for name, text in rewritten_sets(datasets.valid, state.get("valid") or {})]


def _check_optimizer(path: Path, saved: dict[str, Any], config: Config) -> None:
    """Refuse another optimizer: the checkpoint lacks its state, and --allow-change cannot supply it.

    Raises:
        ConfigError: naming both, and how a run goes on from the weights alone.
    """
    old, new = (saved.get("optimizer") or {}).get("name"), config.optimizer.name
    if old is not None and old != new:
        raise ConfigError(f"optimizer.name={new}, but {path} holds the state of {old}; set optimizer.name={old}, or "
                          f"start another run from its weights: checkpoint.init_from={path} with another run.dir")


def _saved_config(path: Path) -> dict[str, Any]:
    try:
        saved = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CheckpointError(f"{path / 'config.yaml'} cannot be read: {error}") from error
    return saved if isinstance(saved, dict) else {}


def _differences(old: Any, new: Any, key: str = "") -> list[tuple[str, str]]:
    """(key, `old -> new`) of every leaf that both know and that differs; a key of another version is passed over."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [found for name in old if name in new
                for found in _differences(old[name], new[name], f"{key}.{name}" if key else str(name))]
    return [] if old == new else [(key, f"{one_line(old)} -> {one_line(new)}")]


def _meaning(key: str) -> bool:
    return any(_within(key, part) for part in MEANING) and not any(_within(key, part) for part in HARMLESS)


def _within(key: str, part: str) -> bool:
    """Whether a key is a section or lies in it."""
    return key == part or key.startswith(part + ".")
