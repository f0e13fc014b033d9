"""`megafour inspect`: a checkpoint, a dataset or a config in words; two of a kind, what differs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megafour.cli._arguments import kind_and_path, location


def add_parser(subparsers: Any) -> None:
    """Declare the verb's arguments."""
    parser = subparsers.add_parser(
        "inspect", help="a checkpoint, a dataset or a config in words; two of a kind: their differences",
        description="Show what a checkpoint (step, samples, config; shape, norm and NaNs of each tensor), a dataset "
                    "(documents, tokens, longest, a sample) or a config holds. Given two of a kind, what differs.")
    parser.add_argument("path", type=location,
                        help="a run folder, a checkpoint or a Hugging Face folder; a dataset's PREFIX; a .yaml")
    parser.add_argument("other", nargs="?", type=location, help="another of the same kind")
    parser.add_argument("--document", type=int, default=0, metavar="N", help="the document to show (default 0)")
    parser.add_argument("--tokenizer", type=kind_and_path, metavar="KIND:PATH",
                        help="decodes a dataset's sample (default: the tokenizer that lies beside the dataset)")


def run(args: argparse.Namespace) -> int:
    """Print line by line, as it is found."""
    from megafour.config.errors import ConfigError
    from megafour.inference import inspect_dataset, inspection

    kind = inspection.kind_of(Path(args.path))
    if args.other is None:
        if kind == "dataset":
            lines = inspect_dataset.dataset_lines(args.path, _tokenizer(args.tokenizer), args.document)
        else:
            lines = (inspection.checkpoint_lines if kind == "checkpoint" else inspection.config_lines)(Path(args.path))
    else:
        other = inspection.kind_of(Path(args.other))
        if other != kind:
            raise ConfigError(f"{args.path} is a {kind} and {args.other} a {other}: only two of a kind are compared")
        if kind == "dataset":
            lines = inspect_dataset.dataset_differences(args.path, args.other)
        else:
            lines = (inspection.checkpoint_differences if kind == "checkpoint" else inspection.config_differences)(
                Path(args.path), Path(args.other))
    for line in lines:
        print(line, flush=True)
    return 0


def _tokenizer(given: tuple[str, str] | None) -> Any:
    """The tokenizer that `KIND:PATH` names."""
    from megafour.config.errors import ConfigError
    from megafour.data.tokenizer import load_tokenizer

    if given is None:
        return None
    kind, path = given
    if not path and kind != "bytes":
        raise ConfigError(f"--tokenizer {kind}: must be KIND:PATH, such as huggingface:tokenizer.json")
    return load_tokenizer(kind, path or None)
