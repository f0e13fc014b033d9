"""The tokenizer that a run's config and its datasets agree on, or the line that says why they do not."""

import json

import pytest

from megafour.config.load import config_from
from megafour.data.dataset import build_datasets
from megafour.data.description import tokenizer_info
from megafour.data.errors import DataError
from megafour.data.indexed import IndexedWriter
from megafour.data.tokenizer import load_tokenizer

BYTES = load_tokenizer("bytes").info


@pytest.fixture
def config(tmp_path):
    """A config over one dataset of 64 tokens; `describe` writes what its PREFIX.json says."""
    with IndexedWriter(tmp_path / "c", 257) as writer:
        writer.add(list(range(64)))

    def make(description=None, **sections):
        if description is not None:
            (tmp_path / "c.json").write_text(json.dumps(description))
        data = {"train": [{"path": str(tmp_path / "c")}], "seq_length": 8, **sections.pop("data", {})}
        return config_from({"data": data, **sections})
    return make


def described(**changes):
    known = {"kind": BYTES.kind, "hash": BYTES.hash, "vocab_size": BYTES.vocab_size, "eod_id": BYTES.eod_id}
    return {"tokenizer": {**known, **changes}}


def test_the_datasets_own_description_is_enough(config):
    made = config(described())
    assert tokenizer_info(made) == BYTES
    assert build_datasets(made, BYTES).train.num_samples == 7


def test_a_dataset_of_another_tool_needs_a_vocabulary(config):
    with pytest.raises(DataError, match=r"no vocabulary is known: .*c\.json .* data\.tokenizer or model\.vocab_size"):
        tokenizer_info(config())
    info = tokenizer_info(config(model={"vocab_size": 50}))
    assert (info.vocab_size, info.hash) == (50, "")
    with pytest.raises(DataError, match="token id 5., outside the vocabulary of 50"):
        train = build_datasets(config(model={"vocab_size": 50}), info).train
        for index in range(train.num_samples):
            train.sample(index)


def test_another_tokenizer_is_refused_by_name(config):
    other = described(kind="sentencepiece", hash="f" * 64, vocab_size=2048)
    made = config(other, data={"tokenizer": {"kind": "bytes"}})
    with pytest.raises(DataError, match=r"c\.json: made with another tokenizer \(sentencepiece, vocabulary 2048, hash "
                                        r"ffffffffffff\) than the run's \(bytes, vocabulary 257"):
        build_datasets(made, tokenizer_info(made))


@pytest.mark.parametrize("description", [{}, [], {"tokenizer": {}}, {"tokenizer": {"kind": "bytes"}}])
def test_a_damaged_description_is_named(config, description):
    with pytest.raises(DataError, match=r"c\.json is not the description of a dataset"):
        tokenizer_info(config(description))
