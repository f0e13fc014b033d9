"""Settings that change between a checkpoint and the launch that resumes it; how far each source has been read."""

import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from megafour.checkpoint import folder as checkpoints
from megafour.config.errors import ConfigError
from megafour.data import fingerprint
from megafour.data.dataset import GlobalDataset, Source
from megafour.data.indexed import IndexedDataset, write_index
from megafour.data.progress import changed, go_on, positions
from megafour.trainer.changes import check_allowed
from tests import training
from tests.training import losses, metrics, settings, write_corpus


@pytest.fixture
def blend(tmp_path):
    """`blend(a=3, b=1)`: a training set of corpora by name and weight, samples of 16 tokens."""
    for number, name in enumerate("abc"):
        write_corpus(tmp_path / name, seed=number, documents=10)

    def make(seq_length=16, place=tmp_path, **weights):
        sources = [Source(IndexedDataset(place / name), seq_length, seed=3, number=number)
                   for number, name in enumerate(weights)]
        return GlobalDataset(sources, list(weights.values()), seed=3)

    return make


def rows(dataset, name, first, last):
    """The samples of one source among the global samples [first, last), in order."""
    wanted = [Path(source.data.prefix).name for source in dataset.sources].index(name)
    found = [dataset.sample(i) for i in range(first, last) if dataset.locate(i)[0] == wanted]
    return np.stack(found)


def through_json(value):
    return json.loads(json.dumps(value))


def test_of_a_changed_blend_kept_sources_go_on_and_new_ones_start_at_0(blend):
    before, after = blend(a=3, b=1), blend(c=2, b=1, a=1)
    saved = through_json(positions(before, 41))
    assert [one["consumed"] for one in saved["sources"]] == [31, 10]
    notes = go_on(after, saved, 41)
    assert [note.rpartition(" ")[2] for note in notes] == ["0", "10", "31"]
    for name, consumed in (("a", 31), ("b", 10), ("c", 0)):
        alone = blend(**({"a": 1} if name == "a" else {"a": 1, "b": 1} if name == "b" else {"a": 1, "b": 1, "c": 1}))
        read = rows(after, name, 41, 121)
        whole = rows(alone, name, 0, 3 * (consumed + len(read) + 1))
        assert np.array_equal(read, whole[consumed : consumed + len(read)])      # its own order, not begun again
    later = through_json(positions(after, 121))
    again = blend(c=2, b=1, a=1)
    assert go_on(again, later, 121) == []
    assert all(np.array_equal(again.sample(i), after.sample(i)) for i in range(121, 181))
    back = blend(a=1)
    go_on(back, later, 121)
    assert len(back.retired) == 2 and back.starts == [51]
    assert any(note.endswith(f"b goes on at its sample {later['sources'][1]['consumed']}")
               for note in go_on(blend(a=1, b=1), through_json(positions(back, 130)), 130))


def test_a_blend_is_the_same_wherever_its_files_lie(blend, tmp_path):
    saved = through_json(positions(blend(a=3, b=1), 41))
    assert changed(blend(a=0.75, b=0.25), saved) is None
    assert changed(blend(a=1, b=1), saved) and changed(blend(b=1, a=3), saved) and changed(blend(a=3), saved)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in "ab":
        for ending in (".bin", ".idx"):
            (elsewhere / f"{name}{ending}").write_bytes((tmp_path / f"{name}{ending}").read_bytes())
    assert changed(blend(place=elsewhere, a=3, b=1), saved) is None
    longer = blend(seq_length=32, a=3, b=1)
    go_on(longer, saved, 41)
    assert longer.starts == [16, 5]         # as many tokens


def test_what_changes_the_meaning_is_refused_and_the_rest_is_noted(pool, tmp_path):
    write_corpus(tmp_path / "corpus")
    write_corpus(tmp_path / "more", seed=1)
    first = settings(tmp_path, {"dp": "auto"}, checkpoint={"every": 4}, train={"steps": 4})
    assert pool.run(training.train, 2, first) == [0, 0]
    data = {"train": [{"path": str(tmp_path / "corpus")}, {"path": str(tmp_path / "more")}]}
    other = settings(tmp_path, {"dp": "auto"}, checkpoint={"every": 2}, train={"steps": 6}, optimizer={"lr": 2e-2},
                     run={"seed": 5}, model={"rope_theta": 500.0, "hidden_dropout": 0.1}, data=data)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    assert pool.run(training.train, 1, other) == [2]
    error = json.loads((tmp_path / "run" / "status.json").read_text())["reason"]
    for text in ("run.seed: 1234 -> 5", "model.rope_theta: 10000.0 -> 500.0", "--allow-change data.train`",
                 f"{tmp_path / 'corpus'} (1) -> {tmp_path / 'corpus'} (1), {tmp_path / 'more'} (1)"):
        assert text in error, error
    assert "optimizer.lr" not in error and before == sorted(path.name for path in tmp_path.rglob("*"))
    assert pool.run(training.train, 1, other, None, ("run.seed", "model")) == [2]
    allowed = ("run.seed", "model", "data.train")
    assert pool.run(training.train, 4, other, None, allowed) == [0] * 4        # dp: auto follows the ranks found
    log = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    for text in ("optimizer.lr: 0.01 -> 0.02", "train.steps: 4 -> 6", "model.hidden_dropout: 0.0 -> 0.1", "mesh dp4",
                 "run.seed: 1234 -> 5", "corpus goes on at its sample 32", "more starts at its sample 0"):
        assert text in log, text
    assert "checkpoint.every" not in log.split("changed since", 1)[1].split("resumed")[0]
    assert [line["consumed_samples"] for line in metrics(tmp_path)] == [8 * step for step in range(1, 7)]
    saved = checkpoints.read_state(checkpoints.step_path(tmp_path / "run" / "checkpoints", 6))["data"]
    assert [one["consumed"] for one in saved["sources"]] == [40, 8] and saved["begin"] == 32
    assert pool.run(training.train, 1, {**other, "train": {**other["train"], "steps": 8}}) == [0]   # nothing to allow
    assert len(losses(tmp_path)) == 8


def rewrite(prefix, how):
    """Another dataset under the same name."""
    if how in ("grown", "shrunk"):
        write_corpus(prefix, documents={"grown": 60, "shrunk": 20}[how])
    elif how == "index":        # the same tokens, cut into documents elsewhere
        data = IndexedDataset(prefix)
        lengths = data.lengths[::-1].copy()
        write_index(f"{prefix}.idx", lengths, data.dtype)
    elif how == "tokens":
        path = prefix.with_suffix(".bin")
        path.write_bytes(np.fromfile(path, "<u2")[::-1].tobytes())
    else:
        prefix.with_suffix(".json").write_text(DESCRIPTION.replace("40", "41"))


DESCRIPTION = '{"tokenizer": {"kind": "bytes", "hash": "", "vocab_size": 64, "eod_id": null}, "documents": 40}'


@pytest.mark.parametrize(("how", "said"), [
    ("grown", " -> "), ("shrunk", " -> "), ("index", "as before, but index or tokens differ (checksum "),
    ("tokens", "as before, but index or tokens differ (checksum "), ("json", "as before, but its .json differs")])
def test_training_data_that_was_rewritten_under_its_name_is_refused(pool, tmp_path, how, said):
    """Until that is allowed; what a sample of it was is not known any more, unless only the description changed."""
    write_corpus(tmp_path / "corpus")
    (tmp_path / "corpus.json").write_text(DESCRIPTION)
    tokens = IndexedDataset(tmp_path / "corpus").tokens.size
    values = settings(tmp_path, {}, train={"steps": 4})
    assert pool.run(training.train, 1, values) == [0]
    rewrite(tmp_path / "corpus", how)
    values["train"]["steps"] = 6
    assert pool.run(training.train, 1, values) == [2]
    error = json.loads((tmp_path / "run" / "status.json").read_text())["reason"]
    now = IndexedDataset(tmp_path / "corpus").tokens.size
    numbers = f"{tokens:,} -> {now:,} tokens" if now != tokens else f"{tokens:,} tokens"
    assert f"data.train: {tmp_path / 'corpus'} was rewritten: {numbers}" in error and said in error
    assert "give `--allow-change data.train` to this launch" in error and error.count("corpus was rewritten") == 1
    assert pool.run(training.train, 1, values, None, ("data.train",)) == [0]
    log = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert f"corpus {'goes on at its sample 32' if how == 'json' else 'starts at its sample 0'}" in log
    assert pool.run(training.train, 1, {**values, "train": {**values["train"], "steps": 8}}) == [0]     # as it is now


def train_without_checksums(rank, world, values):
    """Train as an earlier version did, whose checkpoints know a source by its path and its number of tokens."""
    bare = property(lambda source: dict(path=source.data.prefix, tokens=source.num_tokens))
    with mock.patch.object(Source, "identity", bare):
        return training.train(rank, world, values)


def test_a_checkpoint_without_checksums_of_its_data_resumes_with_a_line(pool, tmp_path):
    write_corpus(tmp_path / "corpus")
    values = settings(tmp_path, {}, train={"steps": 2})
    assert pool.run(train_without_checksums, 1, values) == [0]
    rewrite(tmp_path / "corpus", "tokens")
    values["train"]["steps"] = 4
    assert pool.run(training.train, 1, values) == [0]
    log = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert f"note: the checkpoint carries no checksum of {tmp_path / 'corpus'}: " in log and len(losses(tmp_path)) == 4
    rewrite(tmp_path / "corpus", "grown")
    values["train"]["steps"] = 6
    assert pool.run(training.train, 1, values) == [2]


def test_validation_data_that_was_rewritten_is_a_line(pool, tmp_path):
    for name in ("corpus", "held"):
        write_corpus(tmp_path / name)
    values = settings(tmp_path, {}, train={"steps": 2},
                      data={"valid": {"held": [{"path": str(tmp_path / "held")}]}})
    assert pool.run(training.train, 1, values) == [0]
    rewrite(tmp_path / "held", "shrunk")
    values["train"]["steps"] = 4
    assert pool.run(training.train, 1, values) == [0]
    log = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert f"data.valid.held: {tmp_path / 'held'} was rewritten: " in log and "valid_loss/held before and after" in log


@pytest.mark.parametrize(("old", "new"), [("adamw", "sgd"), ("sgd", "adamw")])
def test_another_optimizer_is_refused_in_one_line_with_the_way_on(pool, tmp_path, old, new):
    write_corpus(tmp_path / "corpus")
    values = settings(tmp_path, {}, train={"steps": 2}, optimizer={"name": old})
    assert pool.run(training.train, 1, values) == [0]
    values = settings(tmp_path, {}, train={"steps": 4}, optimizer={"name": new})
    assert pool.run(training.train, 1, values, None, ("data",)) == [2]
    error = json.loads((tmp_path / "run" / "status.json").read_text())["reason"]
    step = tmp_path / "run" / "checkpoints" / "step-00000002"
    assert error == (f"optimizer.name={new}, but {step} holds the state of {old}; set optimizer.name={old}, or start "
                     f"another run from its weights: checkpoint.init_from={step} with another run.dir")


@pytest.mark.parametrize("size", [0, 1, 1 << 20, 1 << 22])
def test_a_checksum_of_data_reads_a_bounded_sample_and_sees_a_page_at_either_end(size):
    values = np.arange(size, dtype=np.uint16)
    whole = fingerprint._sampled(values, 0)
    for place in (0, -1) if size else ():
        other = values.copy()
        other[place] ^= 1
        assert fingerprint._sampled(other, 0) != whole
    assert fingerprint._sampled(np.append(values, 0).astype(np.uint16), 0) != whole


def test_a_key_whose_change_is_never_refused_needs_no_leave():
    check_allowed(["model.num_layers", "data.train", "run.seed", "data"])
    with pytest.raises(ConfigError, match="--allow-change optimizer.lr: no change of that key is refused"):
        check_allowed(["optimizer.lr"])
