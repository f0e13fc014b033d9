"""From a command line to a run: everything that can be refused is refused before any process group exists."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import record

from megafour.checkpoint import store
from megafour.checkpoint.errors import CheckpointError
from megafour.config.describe import describe
from megafour.config.errors import ConfigError
from megafour.config.load import load_config
from megafour.config.rules import resolve
from megafour.config.schema import Config
from megafour.data.dataset import Datasets, build_datasets, read_info
from megafour.data.errors import DataError
from megafour.data.tokenizer import Tokenizer, TokenizerInfo, load_tokenizer
from megafour.mesh import Launch, start_distributed, stop_distributed
from megafour.trainer.loop import Run, TrainingError
from megafour.trainer.memory import keep_heap
from megafour.trainer.setup import build_mesh, build_state


def refuse(error: Exception, launch: Launch, code: int) -> int:
    """Say the one line, once a node, and return the exit code."""
    if launch.local_rank == 0:
        print(f"error: {error}", file=sys.stderr, flush=True)
    return code


def check(path: str | None, overrides: list[str], world: int | None) -> int:
    """Validate and resolve without launching; prints what the run would be."""
    launch = Launch.from_environment()
    try:
        config = load_config(path, overrides)
        print(describe(resolve(config, world or launch.world)))
    except ConfigError as error:
        return refuse(error, launch, 2)
    return 0


def run(path: str | None, overrides: list[str]) -> int:
    """Train as the config says."""
    launch = Launch.from_environment()
    try:
        config = resolve(load_config(path, overrides), launch.world)
        tokenizer, info = open_tokenizer(config)
        config = config.replace({"model.vocab_size": vocabulary(config, info)})
        config = resolve(config, launch.world)
        datasets = build_datasets(config, info)
    except ConfigError as error:
        return refuse(error, launch, 2)
    except DataError as error:
        return refuse(error, launch, 1)
    return train(config, launch, tokenizer, datasets)


def open_tokenizer(config: Config) -> tuple[Tokenizer | None, TokenizerInfo]:
    """The run's tokenizer, or what the first dataset's own `.json` says of it."""
    wanted = config.data.tokenizer
    if wanted is not None:
        tokenizer = load_tokenizer(wanted.kind, wanted.path)
        return tokenizer, TokenizerInfo(tokenizer.kind, tokenizer.hash, tokenizer.vocab_size, tokenizer.eod_id)
    known = read_info(config.data.train[0].path)
    if known is not None:
        about = known["tokenizer"]
        return None, TokenizerInfo(about["kind"], about["hash"], int(about["vocab_size"]), about.get("eod_id"))
    if config.model.vocab_size == "auto":
        raise ConfigError(f"model.vocab_size=auto: neither data.tokenizer nor {config.data.train[0].path}.json says how many "
                          f"token ids there are; set model.vocab_size")
    return None, TokenizerInfo("unknown", "", config.model.vocab_size, None)


def vocabulary(config: Config, info: TokenizerInfo) -> int:
    """The model's vocabulary: the tokenizer's, unless the config asks for more."""
    wanted = config.model.vocab_size
    if wanted == "auto":
        return info.vocab_size
    if info.hash and wanted < info.vocab_size:
        raise ConfigError(f"model.vocab_size={wanted} is less than the tokenizer's {info.vocab_size} token ids; "
                          f"set model.vocab_size=auto")
    return wanted


@record
def train(config: Config, launch: Launch, tokenizer: Tokenizer | None, datasets: Datasets) -> int:
    """Join the world, build, resume, train. An unexpected exception leaves with its traceback, named by its rank."""
    from megafour.trainer.run_folder import open_run_folder

    device = launch.device(config.run.device)
    if device.type == "cpu":
        keep_heap()
    start_distributed(launch, device)
    raise SystemExit  # replaced below


__all__ = ["Any", "Callable", "CheckpointError", "Path", "Run", "TrainingError", "build_mesh", "build_state", "check",
           "run", "stop_distributed", "store"]
