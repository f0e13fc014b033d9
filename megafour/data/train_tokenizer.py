"""Trains a SentencePiece BPE model on a corpus: the same text gives the same model."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from megafour.data.errors import DataError

TRAINING_BYTES = (
    256 << 20
)  # of text, from the corpus's beginning: more hardly moves the merges and would not fit in memory
LINE_BYTES = 4096  # longer lines are cut: the trainer would leave them out without a word


def train_sentencepiece(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Trains on `texts` and writes the model to `path`, aside first.

    Byte fallback, no normalisation and no dummy prefix, so that every text round-trips; digits are split. Raises
    DataError when the corpus has no text, or too few words for `vocab_size` entries.
    """
    import sentencepiece

    model, lines = io.BytesIO(), _lines(texts)
    first = next(lines, None)
    if first is None:
        raise DataError(f"--train-tokenizer {vocab_size}: the inputs hold no text to train on")
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=chain([first], lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=4 * LINE_BYTES,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        # The library begins with its own source's place and condition: "INTERNAL: src/x.cc(744) [a == b] Vocabulary …".
        reason = re.sub(r"^[A-Z_]+: \S+\.cc\(\d+\) \[.*\] *(?=\S)", "", " ".join(str(error).split()))
        raise DataError(f"--train-tokenizer {vocab_size}: {reason}") from error
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    aside.write_bytes(model.getvalue())
    os.replace(aside, path)


def _lines(texts: Iterable[str]) -> Iterator[str]:
    left = TRAINING_BYTES
    for text in texts:
        for line in text.splitlines():
            for start in range(0, len(line), LINE_BYTES):
                piece = line[start : start + LINE_BYTES].replace("\0", " ")
                left -= len(piece)
                if left < 0:
                    return
                if piece.strip():
                    yield piece
