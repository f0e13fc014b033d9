"""Where a new run's weights come from: `checkpoint.init_from`, a checkpoint of any mesh or a Hugging Face folder."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path

from megafour.checkpoint import folder as checkpoints
from megafour.checkpoint.agreement import first_does
from megafour.checkpoint.errors import CheckpointError
from megafour.checkpoint.safetensors_file import check_weight_files
from megafour.config.errors import ConfigError
from megafour.config.huggingface import huggingface_family, read_huggingface
from megafour.config.load import config_from, load_config
from megafour.config.schema import Config, ModelConfig
from megafour.data.errors import DataError
from megafour.data.tokenizer import FILE_NAMES, load_tokenizer
from megafour.trainer.run_folder import skipped_lines
from megafour.trainer.step import TrainState

MEANING = ("num_layers", "hidden_size", "num_attention_heads", "kv_heads", "head_size", "ffn_size", "vocab_size",
           "norm", "norm_eps", "activation", "position", "qk_norm", "qkv_bias", "linear_bias", "tie_embeddings")
"""What weights mean: another value would train other weights, or the same ones wrongly."""
CONTEXT = ("rope_theta", "rope_scaling", "max_position_embeddings", "attention_window")
"""What an extension to longer sequences changes on purpose: said, not refused."""


def check_start(config: Config, tokenizer: str = "", allowed: Collection[str] = ()) -> None:
    """Refuse a starting point that this run cannot take, before any process group exists.

    A run whose own folder holds a whole checkpoint goes on from that one and needs no starting point any more.

    Args:
        config: resolved, with a number for model.vocab_size.
        tokenizer: hash of the run's tokenizer; empty where it is not known.
        allowed: keys whose change this one launch allows.
    Raises:
        ConfigError: naming the key, both values and the fix.
    """
    wanted = config.checkpoint.init_from
    if wanted is None or checkpoints.list_steps(Path(config.checkpoint_dir)):
        return
    try:
        source = _likely(Path(wanted))
        known = _tokenizers_of(source)
        if checkpoints.is_huggingface(source):
            check_weight_files(source)     # before the ranks meet
    except CheckpointError as error:
        raise ConfigError(f"checkpoint.init_from={wanted}: {error}") from None
    if checkpoints.is_huggingface(source) and config.checkpoint.init_optimizer:
        raise ConfigError(f"checkpoint.init_optimizer=true: {source} is a Hugging Face folder, which holds no "
                          "optimizer; set it to false")
    _check_model(source, config)
    if tokenizer and known and tokenizer not in known and not {"data", "data.tokenizer"} & {*allowed}:
        raise ConfigError(f"checkpoint.init_from={wanted} was trained with another tokenizer (hash "
                          f"{' or '.join(one[:12] for one in known)}) than the run's data (hash {tokenizer[:12]}), so "
                          f"its ids mean other text; prepare the data with that tokenizer, or give `--allow-change "
                          f"data.tokenizer` to this launch")


def _likely(path: Path) -> Path:
    """What a run would start from, as far as it shows before the shards are read."""
    points = checkpoints.find_any(path)
    if len(points) == 1:
        return points[0]
    from megafour.checkpoint.whole import sound_at_a_glance  # imports torch.distributed.checkpoint

    return sound_at_a_glance(points)[0][0]


def _check_model(source: Path, config: Config) -> None:
    """Refuse weights of another model, naming every key that differs."""
    wanted, theirs = config.checkpoint.init_from, _model_of(source)
    wrong = differences(theirs, config.model, MEANING)
    if config.model.position == "learned":
        wrong += differences(theirs, config.model, ("max_position_embeddings",))
    if wrong:
        fix = (f"set model.preset={wanted} and no other key of model" if checkpoints.is_huggingface(source) else
               "set them as they are there")
        raise ConfigError(f"checkpoint.init_from={wanted} holds another model: {'; '.join(wrong)}; {fix}")


def differences(theirs: ModelConfig, ours: ModelConfig, keys: tuple[str, ...]) -> list[str]:
    """`model.norm_eps is 1e-06 there, 1e-05 here`, for each key that differs."""
    names = {"kv_heads": "num_key_value_heads", "head_size": "head_dim", "ffn_size": "ffn_hidden_size"}
    return [f"model.{names.get(key, key)} is {_shown(getattr(theirs, key))} there, {_shown(getattr(ours, key))} here"
            for key in keys if getattr(theirs, key) != getattr(ours, key)]


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def weights_have(config: Config, rows: int) -> bool:
    """Whether trained weights, of a starting point or of the run's newest checkpoint, have so many embedding rows."""
    folder = Path(config.checkpoint_dir)
    steps = checkpoints.list_steps(folder)
    source = checkpoints.step_path(folder, steps[-1]) if steps else config.checkpoint.init_from
    if source is None:
        return False
    try:
        return _model_of(_likely(Path(source))).vocab_size == rows
    except (CheckpointError, ConfigError):      # what is wrong there is said where it is opened
        return True


def _model_of(source: Path) -> ModelConfig:
    if checkpoints.is_huggingface(source):
        return config_from({"model": read_huggingface(source)}).model
    return load_config(str(source / "config.yaml")).model


def _tokenizers_of(source: Path) -> list[str]:
    """Hashes of the tokenizers that a starting point carries, in each form it has; none where it says nothing."""
    if not checkpoints.is_huggingface(source):
        saved = checkpoints.read_state(source).get("tokenizer")
        return [str(saved)] if saved else []
    found = []
    for kind, name in FILE_NAMES.items():
        if (source / name).is_file():
            with contextlib.suppress(DataError):    # its library is not installed, say: then no more is known
                found.append(load_tokenizer(kind, source / name).hash)
    return found


def start_from(state: TrainState, config: Config) -> list[str]:
    """Take weights (and moments) from `checkpoint.init_from` at step 0. Every rank calls it together.

    Returns:
        lines that say what was taken, which damaged checkpoints were passed over, and which keys of the model the run
        changes.
    Raises:
        CheckpointError, ConfigError: on all ranks alike, for a source that is damaged or does not fit.
    """
    from megafour.trainer.saving import logical_tensors  # imports torch.distributed.checkpoint

    optimizer, group = config.checkpoint.init_optimizer, state.mesh.group("world").pg
    path = Path(str(config.checkpoint.init_from))
    points = first_does(lambda: checkpoints.find_any(path), group, f"looking for what {path} holds")
    source, held = points[0], logical_tensors(state, optimizer=optimizer)
    damaged: list[str] = []
    notes: list[str] = []
    if not checkpoints.is_huggingface(source):
        from megafour.checkpoint import store, whole

        source, damaged = whole.first_whole(points, group)
        _check_model(source, config)
        only = ("",) if optimizer else ("weights/",)
        saved = store.load(source, held, group, only=only, cast=True, verified=True)
        if optimizer:
            state.optimizer.set_updates(int(saved["optimizer_updates"]))
    else:
        from megafour.architecture.model import logical_shapes
        from megafour.checkpoint import huggingface
        from megafour.checkpoint.safetensors_file import ignored

        shapes = logical_shapes(config, int(config.model.vocab_size))
        notes = ignored(source)
        huggingface.load(source, huggingface_family(source), shapes, held, group)
    state.optimizer.publish()
    changed = differences(_model_of(source), config.model, CONTEXT)
    return [*skipped_lines(damaged), f"weights{' and moments' if optimizer else ''} taken from {source}, at step 0",
            *(f"note: {text}" for text in (*notes, *changed))]
