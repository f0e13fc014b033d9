"""Text to token ids and back: SentencePiece models, Hugging Face tokenizer.json, tiktoken rank files, raw bytes.

The text of a document is data: what looks like a control token in it ("<|endoftext|>") is encoded as ordinary text, so
that no document can end itself. No kind adds a begin mark. Libraries are imported when a tokenizer of their kind is
opened.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megafour.config.json_file import read_object
from megafour.data.errors import DataError, NoSuchFile

FILE_NAMES = {"sentencepiece": "tokenizer.model", "huggingface": "tokenizer.json", "tiktoken": "tokenizer.tiktoken"}
KINDS = (*FILE_NAMES, "bytes")

# A tokenizer.json does not say which token ends a document; without a tokenizer_config.json beside it these are looked
# for.
EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", "[EOS]", "[SEP]")

# The published splitting patterns (tiktoken's own source), by the largest number of ranks that they are used with.
TIKTOKEN_PATTERNS = (
    (60_000, r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""),
    (
        150_000,
        r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|"""
        r"""\s+(?!\S)|\s""",
    ),
    (
        10**9,
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"""
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"""
        r"""\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
    ),
)
# Ranks in the file -> (end-of-document id, vocabulary): p50k, cl100k, Llama 3, o200k. Any other file: the id after its
# last rank.
TIKTOKEN_EOD = {
    50_280: (50_256, 50_281),
    100_256: (100_257, 100_277),
    128_000: (128_001, 128_256),
    199_998: (199_999, 200_019),
}


@dataclass(frozen=True)
class TokenizerInfo:
    """What datasets and models need to know of a tokenizer.

    hash: SHA-256 of its kind and files. vocab_size: every id is smaller. eod_id: the end-of-document mark, or None.
    """

    kind: str
    hash: str
    vocab_size: int
    eod_id: int | None


class Tokenizer(ABC):
    """One tokenizer, whatever its library."""

    kind: str
    vocab_size: int
    eod_id: int | None
    notes: tuple[str, ...] = ()
    """Lines that whoever encodes text should show: what of the file is not followed."""

    def __init__(self, files: dict[str, Path]) -> None:
        self._files = files
        digest = hashlib.sha256(self.kind.encode())
        for path in files.values():
            digest.update(path.read_bytes())
        self.hash = digest.hexdigest()

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without begin or end marks."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, in which end-of-document marks leave no trace."""

    def encode(self, text: str) -> list[int]:
        """Ids of one text, without begin or end marks."""
        return self.encode_batch([text])[0]

    def files(self) -> dict[str, Path]:
        """The files that make it, under the names by which `load_tokenizer(kind, FOLDER)` finds them again."""
        return dict(self._files)

    @property
    def info(self) -> TokenizerInfo:
        """What datasets and models need to know of it."""
        return TokenizerInfo(self.kind, self.hash, self.vocab_size, self.eod_id)


class BytesTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0 to 255, and 256 for end of document."""

    kind, vocab_size, eod_id = "bytes", 257, 256

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without begin or end marks."""
        return [list(text.encode("utf-8")) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without end-of-document marks."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model; its end-of-document mark is the model's `</s>`."""

    kind = "sentencepiece"

    def __init__(self, path: Path) -> None:
        import sentencepiece

        super().__init__({FILE_NAMES[self.kind]: path})
        try:
            # From memory: what the library does with an open file should not depend on the file system.
            self._model = sentencepiece.SentencePieceProcessor()
            self._model.LoadFromSerializedProto(path.read_bytes())
        except RuntimeError as error:
            raise DataError(f"{path} is not a SentencePiece model ({error})") from error
        self.vocab_size = self._model.get_piece_size()
        self.eod_id = self._model.eos_id() if self._model.eos_id() >= 0 else None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without begin or end marks."""
        return self._model.encode(list(texts), out_type=int, num_threads=1)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without end-of-document marks."""
        return self._model.decode([int(i) for i in ids if i != self.eod_id and i < self.vocab_size])


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`; end of document is the tokenizer_config.json's `eos_token`, or a token of a known name."""

    kind = "huggingface"

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Library

        settings = path.with_name("tokenizer_config.json")
        super().__init__({FILE_NAMES[self.kind]: path, **({settings.name: settings} if settings.is_file() else {})})
        try:
            self._model = Library.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{path} is not a tokenizer.json ({error})") from error
        self._model.no_truncation()  # a file may carry both, and either would falsify the corpus
        self._model.no_padding()
        self._model.encode_special_tokens = True
        self._switch_off_sampling(path)
        self._encode = getattr(self._model, "encode_batch_fast", self._model.encode_batch)  # without offsets
        self.vocab_size = max(self._model.get_vocab(with_added_tokens=True).values()) + 1
        self.eod_id = self._find_eod(settings)

    def _switch_off_sampling(self, path: Path) -> None:
        """Encode a text alike each time: BPE dropout and the sampling of unigram models are for other trainings."""
        model = self._model.model
        for name in ("dropout", "alpha", "nbest_size"):
            value = getattr(model, name, None)
            if value:
                setattr(model, name, None)
                self.notes += (f"{path}: model.{name}={value:g} samples how a text is split; text is encoded without "
                               "it, alike each time",)

    def _find_eod(self, settings: Path) -> int | None:
        names: Sequence[str] = EOD_NAMES
        if settings.is_file():
            named = read_object(settings, DataError).get("eos_token")
            named = named.get("content") if isinstance(named, dict) else named
            names = [named, *EOD_NAMES] if isinstance(named, str) else EOD_NAMES
        return next((i for name in names if (i := self._model.token_to_id(name)) is not None), None)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without begin or end marks."""
        return [encoding.ids for encoding in self._encode(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without end-of-document marks."""
        return self._model.decode([int(i) for i in ids if i != self.eod_id], skip_special_tokens=False)


class TiktokenTokenizer(Tokenizer):
    """A tiktoken rank file: base64 and rank a line. Their number gives the pattern and the end-of-document id."""

    kind = "tiktoken"

    def __init__(self, path: Path) -> None:
        import tiktoken

        super().__init__({FILE_NAMES[self.kind]: path})
        ranks = _read_ranks(path)
        pattern = next(pattern for limit, pattern in TIKTOKEN_PATTERNS if len(ranks) <= limit)
        following = max(ranks.values()) + 1
        self.eod_id, self.vocab_size = TIKTOKEN_EOD.get(len(ranks), (following, following + 1))
        marks = {"<|endoftext|>": self.eod_id}
        self._model = tiktoken.Encoding(path.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=marks)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without begin or end marks."""
        return [self._model.encode_ordinary(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without end-of-document marks."""
        return self._model.decode([int(i) for i in ids if i != self.eod_id])


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Read here, since the library's own reader keeps a copy under the path's name and would miss a changed file."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise DataError(f"{path}:{number} is no line of a tiktoken rank file (base64 and a number)") from error
    if not ranks:
        raise DataError(f"{path} is no tiktoken rank file: it holds no rank")
    return ranks


def load_tokenizer(kind: str, path: str | Path | None = None) -> Tokenizer:
    """Opens a tokenizer. path: its file, or a folder that holds it under its usual name; None for bytes.

    Raises DataError for an unknown kind, a missing or a foreign file.
    """
    if kind not in KINDS:
        raise DataError(f"unknown tokenizer {kind!r}; known are {', '.join(KINDS)}")
    if kind == "bytes":
        return BytesTokenizer({})
    if path is None:
        raise DataError(f"a {kind} tokenizer needs its file: data.tokenizer.path, or --tokenizer {kind}:PATH")
    file = Path(path)
    if file.is_dir():
        file = file / FILE_NAMES[kind]
    if not file.is_file():
        raise NoSuchFile(f"{file} does not exist; it was to be the {kind} tokenizer")
    try:
        if kind == "sentencepiece":
            return SentencePieceTokenizer(file)
        return HuggingFaceTokenizer(file) if kind == "huggingface" else TiktokenTokenizer(file)
    except OSError as error:
        raise DataError(f"{error.filename or file} cannot be read: {error.strerror or error}") from error
