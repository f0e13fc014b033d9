"""`megafour generate`: continue a prompt with a trained model."""

from __future__ import annotations

import argparse
import math
from typing import Any

from megafour.cli._arguments import path


def add_parser(subparsers: Any) -> None:
    """Declare the verb's arguments."""
    parser = subparsers.add_parser("generate", help="continue a prompt with a trained model",
                                   description="Continue a prompt, on one process, from the checkpoint of any mesh.")
    parser.add_argument("--checkpoint", required=True, type=path,
                        help="a run folder, one checkpoint, or a Hugging Face folder")
    parser.add_argument("--prompt", required=True, help="the text to continue")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens to add at most (default 64)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    parser.add_argument("--top-k", type=int, default=50, help="sample among so many tokens; 0: all (default 50)")
    parser.add_argument("--seed", type=int, default=0, help="of the samples (default 0)")


def run(args: argparse.Namespace) -> int:
    """Print the prompt and its continuation."""
    from megafour.checkpoint.errors import CheckpointError
    from megafour.config.errors import ConfigError
    from megafour.config.launch import Launch

    for name, value, least in (("--max-tokens", args.max_tokens, 1), ("--temperature", args.temperature, 0),
                               ("--top-k", args.top_k, 0)):
        if not least <= value < math.inf:
            raise ConfigError(f"{name} {value}: a number, at least {least}")
    if not 0 <= args.seed < 2**63:
        raise ConfigError(f"--seed {args.seed}: a whole number from 0 to 2^63 - 1")

    world = Launch.from_environment().world
    if world > 1:
        raise ConfigError(f"generate runs on one process, and was launched on {world}; leave out torchrun: python -m "
                          f"megafour generate …")

    from megafour.inference.generate import generate
    from megafour.inference.load import load_model

    stage, tokenizer, config = load_model(args.checkpoint)
    if tokenizer is None:
        raise CheckpointError(f"{args.checkpoint} has no tokenizer (the run's data.tokenizer was null)")
    ids = tokenizer.encode(args.prompt)
    rows = int(config.model.vocab_size)
    beyond = next((i for i in ids if i >= rows), None)
    if beyond is not None:
        raise ConfigError(f"--prompt holds {tokenizer.decode([beyond])!r}, token id {beyond}, and the model has {rows} "
                          "embedding rows: leave it out, or give the model a row for it")
    if not ids and tokenizer.eod_id is not None and tokenizer.eod_id < rows:
        ids = [tokenizer.eod_id]
    if not ids:
        raise ConfigError("--prompt is empty, and the tokenizer has no end-of-document mark to start from")
    added = list(generate(stage, ids, args.max_tokens, temperature=args.temperature, top_k=args.top_k, seed=args.seed,
                          stop=tokenizer.eod_id))
    print(tokenizer.decode(ids + added))
    return 0
