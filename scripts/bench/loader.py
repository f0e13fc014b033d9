"""Tokens a second that one rank's data loader delivers, from a dataset on disk."""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time

import numpy as np
import torch

from megafour.data.dataset import GlobalDataset, Source
from megafour.data.indexed import IndexedDataset, publish, write_index
from megafour.data.loader import BatchLoader


def make_dataset(prefix: str, documents: int) -> None:
    """A dataset of random documents of about 500 tokens."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 1000, documents).astype("<i4")
    with open(prefix + ".bin.tmp", "wb") as file:
        file.write(rng.integers(0, 32_000, int(lengths.sum())).astype("<u2").tobytes())
    write_index(prefix + ".idx", lengths, np.dtype("<u2"))
    publish(prefix + ".bin.tmp", prefix + ".bin")


def main() -> None:
    """Prints one line a setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=200_000)
    parser.add_argument("--consumed", type=float, default=1500, help="tokens/s that training takes, to compare with")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_dataset(folder + "/a", args.documents)
        for seq, micro, workers in itertools.product((512, 1024, 8192), (1, 4), (0, 2)):
            started = time.perf_counter()
            source = Source(IndexedDataset(folder + "/a"), seq, seed=1, vocab_size=32_000)
            dataset = GlobalDataset([source], seed=1)
            loader = BatchLoader(
                dataset,
                dp_rank=0,
                dp_size=1,
                global_batch_size=8,
                micro_batch_size=micro,
                positions=torch.arange(seq),
                workers=workers,
            )
            steps = iter(loader)
            next(steps)
            first = time.perf_counter() - started
            count, started = 200, time.perf_counter()
            for _ in range(count):
                next(steps)
            speed = count * 8 * seq / (time.perf_counter() - started)
            print(
                f"seq {seq:>5}  micro {micro}  workers {workers}: first step {first * 1e3:6.1f} ms, "
                f"{speed:>13,.0f} tokens/s = {speed / args.consumed:,.0f} x training"
            )


if __name__ == "__main__":
    main()
