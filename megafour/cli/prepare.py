"""`megafour prepare`: text, JSON lines or parquet to a tokenized dataset."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

from megafour.cli._arguments import kind_and_path, location, positive
from megafour.data.errors import DataError

DESCRIPTION = """Turns text into the token files that training reads: PREFIX.bin and PREFIX.idx in Megatron's format,
and PREFIX.json (tokenizer, counts). The result is the same for any number of workers; a killed call goes on where it
stopped when it is repeated."""


def add_parser(subparsers: Any) -> None:
    """Adds the verb and its options."""
    parser = subparsers.add_parser("prepare", help="text to tokenized training data", description=DESCRIPTION)
    add = parser.add_argument
    add("inputs", nargs="*", type=location, metavar="INPUT",
        help=".txt, .jsonl, .ndjson or .json (lines), each also .gz, .bz2, .xz or .zst, or .parquet; patterns such as "
             "'DIR/**/*.jsonl'")
    add("--output", required=True, type=location, metavar="PREFIX",
        help="the dataset: PREFIX.bin, PREFIX.idx, PREFIX.json")
    add("--tokenizer", type=_tokenizer, metavar="KIND[:PATH]",
        help="sentencepiece:FILE, huggingface:FILE, tiktoken:FILE or bytes")
    add("--train-tokenizer", type=positive, metavar="SIZE",
        help="first train a sentencepiece BPE model of SIZE entries on the inputs: PREFIX.model, or --tokenizer's path")
    add("--json-key", default="text", metavar="KEY", help="the field or column that holds the text (default: text)")
    add("--split-text", choices=["file", "blank-line", "line"], default="file",
        help="what one document of a .txt file is (default: the file)")
    add("--no-eod", dest="eod", action="store_false", help="no end-of-document token after each document")
    add("--workers", type=positive, default=os.cpu_count() or 1, metavar="N", help="processes (default: one a core)")
    add("--skip-bad", type=_count, default=0, metavar="N", help="leave out up to N unreadable records (default: 0)")
    add("--shard", type=_shard, metavar="I/N", help="do only part I of N, I from 0 to N-1: one job of an array")
    add("--merge", action="store_true", help="join the finished shards of PREFIX")
    add("--overwrite", action="store_true", help="replace an existing dataset")
    parser.set_defaults(parser=parser)


def run(args: argparse.Namespace) -> int:
    """Runs the verb; wrong arguments exit with 2, other failures raise DataError."""
    if os.path.isdir(args.output) or args.output.endswith("/"):
        args.parser.error(f"--output {args.output} is a folder; name a prefix in it, as in "
                          f"{os.path.join(args.output, 'corpus')}")
    started = time.monotonic()
    try:
        done = _merge(args) if args.merge else _prepare(args)
    except OSError as error:    # no such place, no permission, a full disk: what was written stays, to go on from
        raise DataError(f"{args.output}: {error}") from error
    seconds = time.monotonic() - started
    left_out = ", ".join(
        f"{done[key]} {key.replace('_', ' ')}" for key in ("empty_documents", "bad_records") if done[key]
    )
    print(f"{done['documents']} documents, {done['tokens']} tokens of {done['dtype']}"
          f"{', left out: ' + left_out if left_out else ''}; {seconds:.1f} s")
    return 0


def _merge(args: argparse.Namespace) -> dict[str, Any]:
    from megafour.data.merge import merge

    if args.inputs or args.shard or args.train_tokenizer:
        args.parser.error("--merge takes only --output (and --overwrite): it joins what --shard made")
    return merge(args.output, args.overwrite)


def _prepare(args: argparse.Namespace) -> dict[str, Any]:
    from megafour.data.prepare import Job, prepare

    files = _checked(args)
    kind, path = args.tokenizer or ("sentencepiece", None)
    from megafour.data.encode import Recipe

    recipe = Recipe(
        kind,
        path or (args.output + ".model" if args.train_tokenizer else None),
        args.json_key,
        args.split_text,
        args.eod,
    )
    job = Job(
        files=files,
        output=args.output,
        recipe=recipe,
        workers=args.workers,
        skip_bad=args.skip_bad,
        shard=args.shard,
        train_vocab=args.train_tokenizer,
        overwrite=args.overwrite,
        progress=True,
    )
    return prepare(job, lambda line: print(line, file=sys.stderr, flush=True))


def _checked(args: argparse.Namespace) -> list[str]:
    """The input files; ends with exit code 2 where the arguments do not make a job."""
    from megafour.data.sources import expand

    if not args.inputs:
        args.parser.error("name at least one INPUT")
    if not args.tokenizer and not args.train_tokenizer:
        args.parser.error("name a --tokenizer KIND[:PATH], or --train-tokenizer SIZE")
    kind, path = args.tokenizer or ("sentencepiece", None)
    if args.train_tokenizer and kind != "sentencepiece":
        args.parser.error(f"--train-tokenizer trains a sentencepiece model, not {kind}")
    if not args.train_tokenizer and kind != "bytes" and not (path and os.path.exists(path)):
        args.parser.error(f"--tokenizer {kind}: {path + ' does not exist' if path else f'write {kind}:PATH'}")
    files: list[str] = []
    try:
        files = expand(args.inputs)
    except DataError as error:
        args.parser.error(str(error))
    return files


def _tokenizer(text: str) -> tuple[str, str | None]:
    from megafour.data.tokenizer import KINDS

    kind, path = kind_and_path(text)
    if kind not in KINDS:
        raise argparse.ArgumentTypeError(f"unknown kind {kind!r}; known are {', '.join(KINDS)}")
    if kind == "bytes" and path:
        raise argparse.ArgumentTypeError("bytes has no file")
    return kind, path or None


def _shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with I from 0 to N-1")
    return int(index), int(count)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)
