"""`megafour evaluate`: how well a model predicts a text or a dataset."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megafour.cli._arguments import location, path

if TYPE_CHECKING:
    import numpy as np

    from megafour.config.launch import Launch
    from megafour.config.schema import Config
    from megafour.data.mapped import Array
    from megafour.data.tokenizer import Tokenizer


def add_parser(subparsers: Any) -> None:
    """Declare the verb's arguments."""
    parser = subparsers.add_parser(
        "evaluate", help="nats per token of a text or a dataset",
        description="Mean negative log-likelihood (nats per token), perplexity and tokens counted, on one process or, "
                    "under `torchrun -m megafour`, on any mesh. Windows of data.seq_length tokens (the run's; for a "
                    "Hugging Face folder the model's longest), the same on every mesh, predict every token but the "
                    "first once.")
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--checkpoint", type=path, help="a run folder, one checkpoint, or a Hugging Face folder")
    model.add_argument("--hf", type=path, metavar="DIR", help="a Hugging Face folder")
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--text", type=location, metavar="FILE",
                      help="UTF-8 text, taken whole, no begin or end mark added; or .jsonl, .ndjson, .json (lines) or "
                           ".parquet, whose records each end with the end-of-document mark; compressed or not")
    text.add_argument("--data", type=location, metavar="PREFIX", help="a tokenized dataset, PREFIX.bin and PREFIX.idx")
    parser.add_argument("--json-key", default="text", metavar="KEY",
                        help="the field or column of --text that holds the text (default: text)")
    parser.add_argument("--json", action="store_true", help="print one JSON object: loss, perplexity, tokens")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value",
                        help="the mesh (parallel.tp=2), train.precision (fp32 unless told), data.seq_length, ...")


def run(args: argparse.Namespace) -> int:
    """Evaluate, and print on the first rank."""
    from megafour.config.launch import Launch

    launch = Launch.from_environment()
    launch.check_address()      # before torch, which takes seconds to import

    from megafour.checkpoint.errors import CheckpointError
    from megafour.checkpoint.folder import is_huggingface
    from megafour.config.errors import ConfigError
    from megafour.data.errors import DataError
    from megafour.inference.load import find_models, model_settings, open_tokenizer

    if args.hf is not None and not is_huggingface(args.hf):
        raise CheckpointError(f"--hf {args.hf} is no Hugging Face folder: it has no config.json")
    models = find_models(args.checkpoint or args.hf)
    config = model_settings(models[0], args.overrides)
    tokenizer = open_tokenizer(models[0], config)
    if tokenizer is None and args.text is not None:
        raise CheckpointError(f"{models[0]} has no tokenizer for --text {args.text}; give tokens with --data PREFIX")
    try:
        stream, begins, where = _stream(args, tokenizer)
    except DataError as error:
        raise ConfigError(str(error)) from None     # of an argument, before any process group
    sized = any(word.startswith("train.micro_batch_size=") for word in args.overrides)
    return _evaluate(launch, models, config, (stream, where, begins), sized, args.json)


def _stream(args: argparse.Namespace, tokenizer: Tokenizer | None) -> tuple[Array, np.ndarray, str]:
    """Token ids, where documents begin in them, and what to call them."""
    import numpy as np

    from megafour.data.description import check_tokenizer
    from megafour.data.encode import encode_file
    from megafour.data.errors import DataError
    from megafour.data.indexed import IndexedDataset

    if args.data is not None:
        dataset = IndexedDataset(args.data)
        if tokenizer is not None:
            check_tokenizer(dataset.prefix, tokenizer.info)
        ends = np.concatenate([[0], np.cumsum(dataset.lengths, dtype=np.int64)])
        stream: Array = dataset.tokens
        begins, where = ends[dataset.documents[:-1]], f"--data {args.data}"
    else:
        assert tokenizer is not None
        (stream, begins), where = encode_file(args.text, tokenizer, args.json_key), f"--text {args.text}"
    if len(stream) < 2:
        raise DataError(f"{where} has {len(stream)} tokens: the first is never predicted, so it takes two or more")
    return stream, begins, where


def _evaluate(launch: Launch, models: list[Path], config: Config, what: tuple[Array, str, np.ndarray], sized: bool,
              as_json: bool) -> int:
    """Join the world, load this rank's part of the first whole one of `models` (one run's checkpoints), evaluate `what`
    (the stream, its name, where documents begin)."""
    from megafour.inference.evaluate import evaluate, settings_for
    from megafour.inference.load import first_whole, load_stage
    from megafour.trainer.setup import build_mesh, choose_device
    from megafour.world import start_distributed, stop_distributed

    stream, where, begins = what
    settings = settings_for(config, launch.world, len(stream), config.train.micro_batch_size if sized else None)
    config = settings.config
    device = choose_device(config, launch)
    start_distributed(launch, device)
    mesh = build_mesh(config, device)
    model = load_stage(first_whole(models, mesh.group("world").pg), config, mesh)
    result = evaluate(model, stream, where, settings.window, begins)
    if launch.rank == 0:
        numbers = {"loss": result.loss, "perplexity": result.perplexity, "tokens": result.tokens}
        if as_json:
            print(json.dumps({k: v if math.isfinite(v) else None for k, v in numbers.items()}))
        else:
            print(f"{result.loss:.6f} nats per token, perplexity {result.perplexity:.6g}, {result.tokens:,} tokens")
    stop_distributed()
    return 0
