"""Text to token ids and back: SentencePiece models, Hugging Face tokenizer.json, tiktoken rank files, raw bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenizerInfo:
    """What datasets and models need to know of a tokenizer. hash: of its files' content; eod_id: the end-of-document mark, or None."""

    kind: str
    hash: str
    vocab_size: int
    eod_id: int | None
