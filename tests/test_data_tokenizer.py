"""Tokenizers: round trips, control tokens in text, end-of-document ids, training that gives the same model twice."""

import base64
import json

import pytest

from megafour.data.errors import DataError
from megafour.data.tokenizer import KINDS, load_tokenizer
from megafour.data.train_tokenizer import train_sentencepiece

TEXT = "Hello <|endoftext|></s>  wörld, 1234 日本語 👋\n\n\tdef f():\r\n    return  0\n"
CORPUS = [
    "the quick brown fox jumps over the lazy dog\n" * 20,
    "pack my box with five dozen liquor jugs " * 30,
    "wörld",
]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """One file of each kind; text stays out of the repository, so they are made here."""
    folder = tmp_path_factory.mktemp("tokenizers")
    train_sentencepiece(CORPUS, 320, folder / "sp.model")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    model = Tokenizer(models.BPE())
    model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(CORPUS, trainer)
    model.enable_truncation(4)  # files carry such settings; a corpus must not be cut by them
    model.enable_padding(length=16)
    model.save(str(folder / "tokenizer.json"))
    ranks = [bytes([b]) for b in range(256)] + [b"th", b"the", b" the"]
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(ranks)]
    (folder / "x.tiktoken").write_bytes(b"\n".join(lines) + b"\n")
    return {
        "sentencepiece": folder / "sp.model",
        "huggingface": folder / "tokenizer.json",
        "tiktoken": folder / "x.tiktoken",
        "bytes": None,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_text_round_trips_and_cannot_end_its_document(paths, kind, tmp_path):
    tokenizer = load_tokenizer(kind, paths[kind])
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT == tokenizer.decode([*ids, tokenizer.eod_id])
    assert tokenizer.eod_id not in ids and 0 <= min(ids) and max(ids) < tokenizer.vocab_size
    assert 0 <= tokenizer.eod_id < tokenizer.vocab_size
    batch = [TEXT, "", "the the the"]
    assert tokenizer.encode_batch(batch) == [tokenizer.encode(text) for text in batch]
    for name, path in tokenizer.files().items():
        (tmp_path / name).write_bytes(path.read_bytes())
    assert load_tokenizer(kind, tmp_path).info == tokenizer.info


def test_sizes_and_marks(paths):
    assert load_tokenizer("bytes").vocab_size == 257
    assert load_tokenizer("sentencepiece", paths["sentencepiece"]).vocab_size == 320
    tiktoken = load_tokenizer("tiktoken", paths["tiktoken"])
    assert (tiktoken.eod_id, tiktoken.vocab_size) == (259, 260) and tiktoken.encode("the the") == [257, 258]
    assert load_tokenizer("huggingface", paths["huggingface"]).eod_id == 0
    assert len({load_tokenizer(kind, paths[kind]).hash for kind in KINDS}) == len(KINDS)


def test_the_end_mark_that_a_folder_names(paths, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(paths["huggingface"].read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "!"}}))
    tokenizer = load_tokenizer("huggingface", tmp_path)
    assert tokenizer.eod_id == tokenizer.encode("!")[0] and set(tokenizer.files()) == {
        "tokenizer.json",
        "tokenizer_config.json",
    }


@pytest.mark.parametrize(("text", "words"), [("{", "cannot be read as JSON"), ("[]", "holds no JSON object")])
def test_damaged_settings_beside_a_tokenizer_are_named(paths, tmp_path, text, words):
    (tmp_path / "tokenizer.json").write_bytes(paths["huggingface"].read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(DataError, match=f"tokenizer_config.json {words}"):
        load_tokenizer("huggingface", tmp_path)


def test_training_is_reproducible(paths, tmp_path):
    train_sentencepiece(iter(CORPUS), 320, tmp_path / "again.model")
    assert (tmp_path / "again.model").read_bytes() == paths["sentencepiece"].read_bytes()
    with pytest.raises(DataError, match="train-tokenizer 9000.*too high"):
        train_sentencepiece(CORPUS, 9000, tmp_path / "big.model")
    with pytest.raises(DataError, match="train-tokenizer 20"):
        train_sentencepiece(CORPUS, 20, tmp_path / "small.model")


@pytest.mark.parametrize("kind", ["sentencepiece", "huggingface", "tiktoken"])
def test_foreign_files_are_refused_by_name(kind, tmp_path):
    (tmp_path / "junk").write_bytes(b"no tokenizer at all")
    (tmp_path / "empty").write_bytes(b"")
    for path, words in ((tmp_path / "junk", "junk"), (tmp_path / "empty", "empty"),
                        (tmp_path / "none", "does not exist"), (None, "needs its file")):
        with pytest.raises(DataError, match=words) as error:
            load_tokenizer(kind, path)
        assert "\n" not in str(error.value)
    with pytest.raises(DataError, match="unknown tokenizer 'gpt'"):
        load_tokenizer("gpt", None)


def test_a_text_has_the_same_ids_each_time_whatever_the_file_samples(paths, tmp_path):
    """BPE dropout is left out and said; the file and its hash stay what they are."""
    content = json.loads(paths["huggingface"].read_text())
    content["model"]["dropout"] = 0.5
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    plain = load_tokenizer("huggingface", paths["huggingface"])
    sampled = load_tokenizer("huggingface", tmp_path)
    for _ in range(5):
        assert sampled.encode_batch(CORPUS) == plain.encode_batch(CORPUS)
    assert plain.notes == () and len(sampled.notes) == 1
    assert sampled.notes[0].startswith(f"{tmp_path / 'tokenizer.json'}: model.dropout=0.5 samples")
    assert sampled.hash != plain.hash
    assert json.loads(sampled.files()["tokenizer.json"].read_text())["model"]["dropout"] == 0.5
