"""A chunk of records to tokens: what a worker process of `megafour prepare` does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import numpy as np

from megafour.data.errors import DataError
from megafour.data.indexed import MAX_LENGTH, check_ids, token_dtype
from megafour.data.sources import Chunk, chunks, line_of, pieces
from megafour.data.text_files import BOM
from megafour.data.tokenizer import Tokenizer, load_tokenizer

BLANK_LINES = re.compile(rb"\r?\n[ \t]*\r?\n")


@dataclass(frozen=True)
class Recipe:
    """How records become tokens; small, so that it can travel with every chunk."""

    kind: str
    path: str | None
    json_key: str
    split_text: str
    eod: bool


@dataclass(frozen=True)
class Encoded:
    """Tokens of a chunk in the stored dtype, i32 lengths of its documents, and what was left out.

    bad: (line of the chunk from 0, reason). empty: documents without text.
    """

    tokens: bytes
    lengths: bytes
    bad: list[tuple[int, str]]
    empty: int


class BadRecord(Exception):
    """One record that cannot be read; the message says why."""


@cache  # once a process: opening a large tokenizer takes a second
def open_tokenizer(kind: str, path: str | None) -> Tokenizer:
    """The tokenizer, opened once in each process."""
    return load_tokenizer(kind, path)


def encode_chunk(recipe: Recipe, chunk: Chunk) -> Encoded:
    """Parses and encodes one chunk; records that cannot be read are listed, not raised."""
    tokenizer = open_tokenizer(recipe.kind, recipe.path)
    texts, bad, empty = read_texts(recipe, chunk)
    filled = encode_documents(tokenizer, texts, recipe.eod)
    empty += len(texts) - len(filled)
    lengths = np.array([len(ids) for ids in filled], dtype=np.int64)
    if len(lengths) and lengths.max() > MAX_LENGTH:
        raise DataError(
            f"{chunk.piece.path}: a document of {lengths.max()} tokens; at most {MAX_LENGTH} fit the format"
        )
    tokens = np.fromiter(chain.from_iterable(filled), dtype=np.int64, count=int(lengths.sum()))
    check_ids(
        tokens,
        tokenizer.vocab_size,
        f"{chunk.piece.path}:{line_of(chunk, 0)} and following: the {recipe.kind} tokenizer's output",
    )
    stored = tokens.astype(token_dtype(tokenizer.vocab_size))
    return Encoded(stored.tobytes(), lengths.astype("<i4").tobytes(), bad, empty)


def encode_documents(tokenizer: Tokenizer, texts: list[str], eod: bool) -> list[list[int]]:
    """Ids of each text that has any, with the end-of-document mark after it where `eod` asks for it."""
    filled = [ids for ids in tokenizer.encode_batch(texts) if ids]
    if eod:
        for ids in filled:
            ids.append(tokenizer.eod_id)  # type: ignore[arg-type]
    return filled


def encode_file(path: str, tokenizer: Tokenizer, json_key: str) -> tuple[np.ndarray, np.ndarray]:
    """A text file as one stream of tokens, int64, and the offsets at which its documents begin.

    It is read as `megafour prepare` reads it, and each record ends with the end-of-document mark, if the tokenizer has
    one. Plain text, which is a file of any other name too, is one document and gets no mark.

    Raises:
        DataError: for a file that cannot be read, or a record that cannot, as file:line.
    """
    recipe, documents = Recipe(tokenizer.kind, None, json_key, "file", tokenizer.eod_id is not None), []
    for chunk in chunks(pieces([path], other=".txt"), json_key, recipe.split_text):
        texts, bad, _ = read_texts(recipe, chunk)
        for line, reason in bad:
            raise DataError(f"{path}:{line_of(chunk, line)}: {reason}")
        found = encode_documents(tokenizer, texts, recipe.eod and chunk.piece.format != ".txt")
        documents += [np.array(ids, dtype=np.int64) for ids in found]
    ends = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    return np.concatenate([*documents, np.zeros(0, np.int64)]), ends[:-1]


def read_texts(recipe: Recipe, chunk: Chunk) -> tuple[list[str], list[tuple[int, str]], int]:
    """(texts, bad records, empty documents) of a chunk."""
    texts: list[str] = []
    bad: list[tuple[int, str]] = []
    empty = 0
    for line, record in _records(recipe, chunk):
        try:
            text = _text(recipe, chunk, record)
        except BadRecord as error:
            bad.append((line, str(error)))
            continue
        if text:
            texts.append(text)
        else:
            empty += 1
    return texts, bad, empty


def _records(recipe: Recipe, chunk: Chunk) -> Iterator[tuple[int, Any]]:
    """(line within the chunk, record) of each record; lines without anything on them are none."""
    payload, form = chunk.payload, chunk.piece.format
    if isinstance(payload, list):
        yield from enumerate(payload)
        return
    if chunk.first_line == 1 and chunk.piece.start == 0:
        payload = payload.removeprefix(BOM)
    if form == ".txt" and recipe.split_text == "file":
        yield 0, payload
    elif form == ".txt" and recipe.split_text == "blank-line":
        at, line = 0, 0
        for found in [*(match.span() for match in BLANK_LINES.finditer(payload)), (len(payload), len(payload))]:
            document = payload[at : found[0]]
            if body := document.strip(b"\r\n"):
                yield line + document[: document.find(body[:1])].count(b"\n"), body
            line += payload.count(b"\n", at, found[1])
            at = found[1]
    else:
        for line, content in enumerate(payload.split(b"\n")):
            if content.strip():
                yield line, content.removesuffix(b"\r")


def _text(recipe: Recipe, chunk: Chunk, record: Any) -> str:
    if chunk.piece.format == ".txt":
        return _decode(record)
    value = record if chunk.piece.format == ".parquet" else _json_value(recipe.json_key, record)
    if not isinstance(value, str):
        raise BadRecord(f"{recipe.json_key!r} is {'null' if value is None else type(value).__name__}, not text")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise BadRecord("half of a surrogate pair, which is no text") from error
    return value


def _decode(record: bytes) -> str:
    try:
        return record.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRecord(f"not UTF-8 at byte {error.start} ({error.reason})") from error


def _json_value(key: str, record: bytes) -> Any:
    try:
        value = json.loads(_decode(record))
    except (ValueError, RecursionError) as error:
        raise BadRecord(f"not JSON ({error})") from error
    if not isinstance(value, dict) or key not in value:
        found = ", ".join(map(str, list(value)[:8])) if isinstance(value, dict) else type(value).__name__
        raise BadRecord(f"has no key {key!r} (found: {found}); name one with --json-key")
    return value[key]
