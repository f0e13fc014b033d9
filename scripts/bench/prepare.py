"""Speed of `megafour prepare` against the tokenizer library's own batch call, in turn, on the same text and cores.

python scripts/bench/prepare.py --text CORPUS.jsonl --tokenizer sentencepiece:MODEL [--tokenizer KIND:FILE ...]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path


def library_call(kind: str, path: str, threads: int) -> Callable[[list[str]], object]:
    """The library's own fastest batch call, on `threads` threads."""
    if kind == "sentencepiece":
        import sentencepiece

        model = sentencepiece.SentencePieceProcessor(model_file=path)
        return lambda texts: model.encode(texts, out_type=int, num_threads=threads)
    if kind == "huggingface":
        from tokenizers import Tokenizer

        library = Tokenizer.from_file(path)
        return lambda texts: library.encode_batch_fast(texts, add_special_tokens=False)
    from megafour.data.tokenizer import load_tokenizer

    encoding = load_tokenizer(kind, path)._model  # type: ignore[attr-defined]
    return lambda texts: encoding.encode_ordinary_batch(texts, num_threads=threads)


def seconds_of(call: Callable[[], object]) -> float:
    """Wall-clock seconds of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def compare(text: Path, spec: str, workers: int, rounds: int) -> dict[str, float | str]:
    """Medians over `rounds` turns: the library on texts that lie in memory, the command from start to exit."""
    kind, _, path = spec.partition(":")
    texts = [json.loads(line)["text"] for line in text.read_bytes().splitlines()]
    library = library_call(kind, path, workers)
    library(texts[:100])
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds):
            theirs.append(seconds_of(lambda: library(texts)))
            command = [sys.executable, "-m", "megafour", "prepare", str(text), "--tokenizer", spec]
            command += ["--output", f"{folder}/{turn}", "--workers", str(workers)]
            ours.append(seconds_of(lambda c=command: subprocess.run(c, check=True, stdout=subprocess.DEVNULL)))
        tokens = json.loads(Path(folder, "0.json").read_text("utf-8"))["tokens"]
    mine, other = statistics.median(ours), statistics.median(theirs)
    return {"tokenizer": kind, "library": tokens / other, "prepare": tokens / mine, "ratio": other / mine}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="a .jsonl with a text field; 50 MB or more says more")
    parser.add_argument("--tokenizer", action="append", required=True, metavar="KIND:PATH")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    size = args.text.stat().st_size / 1e6
    print(f"{size:.1f} MB, {args.workers} workers against {args.workers} library threads, median of {args.rounds}")
    print(f"{'tokenizer':<16}{'library tok/s':>16}{'prepare tok/s':>16}{'ratio':>8}")
    for spec in args.tokenizer:
        row = compare(args.text, spec, args.workers, args.rounds)
        print(f"{row['tokenizer']:<16}{row['library']:>16,.0f}{row['prepare']:>16,.0f}{row['ratio']:>8.2f}")


if __name__ == "__main__":
    main()
