"""PREFIX.json, what `megafour prepare` says of a dataset; the tokenizer that a run's config and datasets agree on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megafour.data.errors import DataError, NoSuchFile
from megafour.data.indexed import strip_suffix
from megafour.data.tokenizer import TokenizerInfo, load_tokenizer


def tokenizer_info(config: Any) -> TokenizerInfo:
    """The run's tokenizer: `data.tokenizer`, or else the one that the first training dataset's PREFIX.json names.

    Where neither says anything, `model.vocab_size` must be a number; no more is then known.
    """
    asked = config.data.tokenizer
    if asked is not None:
        return load_tokenizer(asked.kind, asked.path).info
    first = strip_suffix(config.data.train[0].path) if config.data.train else None
    info = read_info(first) if first else None
    if info:
        known = info["tokenizer"]
        return TokenizerInfo(known["kind"], known["hash"], int(known["vocab_size"]), known["eod_id"])
    if isinstance(config.model.vocab_size, int):
        return TokenizerInfo("unknown", "", config.model.vocab_size, None)
    raise NoSuchFile(f"no vocabulary is known: {first}.json does not exist; give data.tokenizer or model.vocab_size")


def rows_note(tokenizer: TokenizerInfo, rows: int) -> list[str]:
    """A line for a tokenizer with ids beyond the rows of a trained embedding, such as an added pad token."""
    if tokenizer.vocab_size <= rows:
        return []
    return [f"the model has {rows} embedding rows and its tokenizer {tokenizer.vocab_size} ids: ids from {rows} on are "
            f"refused where a text holds one. To use them, add rows in transformers, "
            f"model.resize_token_embeddings({tokenizer.vocab_size}), and save the folder again"]


def read_info(prefix: str) -> dict[str, Any] | None:
    """PREFIX.json as `megafour prepare` wrote it; None for a dataset made by another tool."""
    path = Path(prefix + ".json")
    if not path.is_file():
        return None
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(info["tokenizer"], dict):
            return None
        missing = [key for key in ("kind", "hash", "vocab_size", "eod_id") if key not in info["tokenizer"]]
        if missing:
            raise KeyError("tokenizer." + missing[0])
        return info
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not the description of a dataset: {error!r}") from error


def check_tokenizer(prefix: str, tokenizer: TokenizerInfo) -> None:
    """Refuses a dataset that was prepared with another tokenizer than the run's."""
    info = read_info(prefix)
    if info and tokenizer.hash and info["tokenizer"].get("hash") != tokenizer.hash:
        other = info["tokenizer"]
        raise DataError(
            f"{prefix}.json: made with another tokenizer ({other.get('kind')}, vocabulary {other.get('vocab_size')}, "
            f"hash {str(other.get('hash'))[:12]}) than the run's ({tokenizer.kind}, vocabulary {tokenizer.vocab_size}, "
            f"hash {tokenizer.hash[:12]}); set data.tokenizer to it, or prepare the text anew"
        )
