"""`megafour convert`: Hugging Face folders to checkpoints, and checkpoints to Hugging Face folders."""

from __future__ import annotations

import argparse
from typing import Any

from megafour.cli._arguments import path

PRECISIONS = ("fp64", "fp32", "bf16", "fp16")


def add_parser(subparsers: Any) -> None:
    """Declare the verb's arguments."""
    parser = subparsers.add_parser(
        "convert", help="Hugging Face folders to checkpoints and back",
        description="Convert weights, config and tokenizer, tensor by tensor: no GPU, and memory for one tensor. "
                    "Families: Llama (SmolLM), Mistral, Qwen2, Qwen3, GPT-2. Only safetensors are read and written.")
    ways = parser.add_subparsers(dest="way", metavar="from-hf|to-hf", required=True)
    way = ways.add_parser("from-hf", help="a Hugging Face folder to a checkpoint of step 0",
                          description="Write a Hugging Face folder as the checkpoint OUT/step-00000000, which any mesh "
                                      "reads; `checkpoint.init_from=OUT` trains from it.")
    way.add_argument("folder", type=path, metavar="DIR", help="the Hugging Face folder")
    way.add_argument("out", type=path, metavar="OUT", help="a folder that does not exist yet")
    way = ways.add_parser("to-hf", help="a checkpoint of any mesh to a Hugging Face folder",
                          description="Write a checkpoint as a folder that transformers loads.")
    way.add_argument("checkpoint", type=path, metavar="CHECKPOINT", help="a run folder, or one checkpoint")
    way.add_argument("out", type=path, metavar="OUT", help="a folder that does not exist yet")
    way.add_argument("--dtype", choices=PRECISIONS, help="of the weights (default: as stored; a run's checkpoint holds "
                                                         "its fp32 masters)")
    way.add_argument("--shard-size", type=float, default=5.0, metavar="GB", help="of one file (default 5)")


def run(args: argparse.Namespace) -> int:
    """Convert, and say what was written."""
    from megafour.config.errors import ConfigError
    from megafour.inference import convert
    from megafour.model.stage import DTYPES

    if args.way == "from-hf":
        print(f"wrote {convert.from_huggingface(args.folder, args.out)}")
        return 0
    if not args.shard_size > 0:
        raise ConfigError(f"--shard-size {args.shard_size:g}: must be above 0")
    files = convert.to_huggingface(args.checkpoint, args.out, DTYPES[args.dtype] if args.dtype else None,
                                   int(args.shard_size * 1e9))
    print(f"wrote {args.out} ({', '.join(files)})")
    return 0
