"""Samples: epochs, order after resume, blends, splits, small and empty corpora, label shifts, document positions."""

import itertools
import multiprocessing
import os
import stat
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megafour.data.batch import IGNORE, PAD, collate
from megafour.data.dataset import GlobalDataset, Source, build_datasets, parse_split, split_bounds
from megafour.data.errors import DataError
from megafour.data.indexed import IndexedDataset, IndexedWriter, write_index
from megafour.data.loader import BatchLoader
from megafour.data.permute import Blend, Permutation, address
from megafour.data.tokenizer import TokenizerInfo

INFO = TokenizerInfo("bytes", "", 100_000, 1)


def corpus(prefix, lengths, vocab_size=100_000):
    """Documents of the given lengths; the token stream is 0, 1, 2, ..."""
    counter = itertools.count()
    with IndexedWriter(prefix, vocab_size) as writer:
        for length in lengths:
            writer.add([next(counter) for _ in range(length)])
    return IndexedDataset(prefix)


def config(train, seq=4, **data):
    entry = lambda e: SimpleNamespace(path=str(e[0]), weight=e[1])  # noqa: E731
    valid = {name: [entry(e) for e in entries] for name, entries in data.pop("valid", {}).items()}
    section = SimpleNamespace(
        train=[entry(e) for e in train], valid=valid, split=data.pop("split", None), seq_length=seq
    )
    return SimpleNamespace(data=section, run=SimpleNamespace(seed=7))


def loader(dataset, *, batch=4, rank=0, dp=1, micro=1, **more):
    positions = more.pop("positions", torch.arange(dataset.seq_length))
    return BatchLoader(
        dataset, dp_rank=rank, dp_size=dp, global_batch_size=batch, micro_batch_size=micro, positions=positions, **more
    )


def first_tokens(steps):
    return [micro.tokens[:, 0].tolist() for step in steps for micro in step]


@pytest.mark.parametrize("size", [1, 2, 3, 63, 64, 65, 1000, 4097])
def test_a_permutation_is_one(size):
    order = Permutation(size, address(3, size))
    assert sorted(order[i] for i in range(size)) == list(range(size))


def test_small_permutations_are_all_likely():
    seen = [tuple(Permutation(3, address(seed))[i] for i in range(3)) for seed in range(3000)]
    counts = [seen.count(order) for order in itertools.permutations(range(3))]
    assert min(counts) > 400 and max(counts) < 600
    assert max(Permutation(2**40, 5)[i] for i in range(100)) > 2**38


@pytest.mark.parametrize(
    "weights",
    [
        [1.0],
        [0.7, 0.3],
        [1, 1, 1],
        [0.5, 0.3, 0.2],
        [0.001, 0.5, 0.499],
        [1234567, 7654321, 3],
        [0.31, 0.17, 0.13, 0.11, 0.09, 0.08, 0.05, 0.04, 0.02],
        [1e-12, 1.0],
    ],
)
def test_a_blend_is_exact_to_one_sample_at_every_prefix(weights):
    blend, given = Blend(weights), [0] * len(weights)
    for index in range(min(2 * blend.period + 5, 20_000)):
        source, position = blend.locate(index)
        assert position == given[source]
        given[source] += 1
        for count, weight in zip(given, weights, strict=True):
            assert abs(count - (index + 1) * weight / sum(weights)) < 1
    far = 10**15  # 64 bits, without a walk
    source, position = blend.locate(far)
    assert abs(position - far * blend.counts[source] / blend.period) < 1.01


def test_an_epoch_is_every_sample_once_and_epochs_differ(tmp_path):
    dataset = GlobalDataset(
        [Source(corpus(tmp_path / "a", [50, 51]), 4, seed=7)], seed=7
    )  # 25 samples, nothing left out
    orders = []
    for epoch in range(3):
        rows = [dataset.sample(epoch * 25 + i) for i in range(25)]
        starts = [int(row[0]) for row in rows]
        assert all(list(row) == [(row[0] + k) % 101 for k in range(5)] for row in rows)
        # every token is predicted once, but for the stream's one token that has nothing before it
        assert len({int(label) for row in rows for label in row[1:]}) == 100
        orders.append(starts)
    assert sorted(orders[0]) == list(range(0, 100, 4)) and orders[0] != sorted(orders[0])
    assert orders[0] != orders[1] != orders[2]
    again = GlobalDataset([Source(IndexedDataset(tmp_path / "a"), 4, seed=7)], seed=7)
    assert [int(again.sample(50 + i)[0]) for i in range(25)] == orders[2]
    other = GlobalDataset([Source(IndexedDataset(tmp_path / "a"), 4, seed=8)], seed=8)
    assert [int(other.sample(i)[0]) for i in range(25)] != orders[0]


def test_order_after_resume(tmp_path):
    dataset = GlobalDataset(
        [Source(corpus(tmp_path / "a", [81]), 4, seed=7)], seed=7
    )  # 20 samples, 3 epochs of 5 steps
    whole = first_tokens(itertools.islice(loader(dataset, micro=4), 15))
    assert sorted(sum(whole[:5], [])) == list(range(0, 80, 4))
    for step in range(1, 15):
        for dp, micro in ((1, 1), (2, 1), (1, 2), (4, 1)):
            fresh = GlobalDataset([Source(IndexedDataset(tmp_path / "a"), 4, seed=7)], seed=7)
            ranks = [loader(fresh, start_sample=4 * step, dp=dp, rank=r, micro=micro) for r in range(dp)]
            resumed = [first_tokens(itertools.islice(rank, 15 - step)) for rank in ranks]
            per_step = [
                sum((sum(r[s * (4 // dp // micro) : (s + 1) * (4 // dp // micro)], []) for r in resumed), [])
                for s in range(15 - step)
            ]
            assert per_step == whole[step:]


def test_resume_with_another_batch_size_sees_each_sample_once(tmp_path):
    dataset = GlobalDataset([Source(corpus(tmp_path / "a", [81]), 4, seed=7)], seed=7)
    steps = [
        *itertools.islice(loader(dataset, batch=4), 2),
        *itertools.islice(loader(dataset, batch=6, start_sample=8), 2),
    ]
    assert sorted(sum(first_tokens(steps), [])) == list(range(0, 80, 4))


def test_empty_documents(tmp_path):
    gaps = Source(corpus(tmp_path / "a", [5, 0, 0, 3, 0]), 4, seed=7)
    plain = Source(corpus(tmp_path / "b", [5, 3]), 4, seed=7)
    assert gaps.num_samples == plain.num_samples == 1
    for index in range(5):
        assert list(gaps.window(index)) == list(plain.window(index))
    assert list(gaps.window(0)) == [0, 1, 2, 3, 4]
    for lengths in ([0, 0], []):
        with pytest.raises(DataError, match="no tokens"):
            Source(corpus(tmp_path / "c", lengths), 4, seed=7)
    with pytest.raises(DataError, match="fewer than one sample.*seq_length"):
        Source(corpus(tmp_path / "d", [4]), 4, seed=7)


def test_fewer_samples_than_a_batch_wrap_into_the_next_epoch(tmp_path):
    corpus(tmp_path / "a", [13])  # 3 samples
    seen = []
    for rank in range(2):
        dataset = build_datasets(config([(tmp_path / "a", 1.0)]), INFO).train
        steps = list(itertools.islice(loader(dataset, rank=rank, dp=2), 3))  # 12 samples: 4 epochs
        seen.append([micro.samples.tolist() for step in steps for micro in step])
        starts = first_tokens(steps)
        assert len(starts) == 6
    assert sorted(sum(sum(seen, []), [])) == list(range(12))
    assert sorted(int(dataset.sample(i)[0]) for i in range(3)) == [0, 4, 8]


def test_a_validation_set_smaller_than_a_batch_counts_every_token_once(tmp_path):
    corpus(tmp_path / "a", [41])
    corpus(tmp_path / "v", [7, 4])  # 11 tokens, 10 predictions: 2 whole samples and one of 2
    for dp in (1, 2, 4):
        labels = []
        for rank in range(dp):
            dataset = build_datasets(config([(tmp_path / "a", 1.0)], valid={"v": [(tmp_path / "v", 1.0)]}), INFO).valid[
                "v"
            ]
            steps = list(loader(dataset, batch=4, dp=dp, rank=rank))
            assert len(steps) == 1 and len(steps[0]) == 4 // dp  # alike on all ranks
            labels += [x for micro in steps[0] for x in micro.labels.flatten().tolist() if x != IGNORE]
            assert all((micro.tokens >= 0).all() for micro in steps[0])
        assert sorted(labels) == list(range(1, 11))


def test_no_cache_so_nothing_to_race_for(tmp_path):
    folder = tmp_path / "data"
    corpus(folder / "a", [500] * 20)
    before = sorted(folder.iterdir())
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)  # read-only
    with multiprocessing.get_context("spawn").Pool(4) as workers:
        orders = workers.map(starts_of, [str(folder / "a")] * 8)
    folder.chmod(stat.S_IRWXU)
    assert all(order == orders[0] for order in orders) and sorted(folder.iterdir()) == before


def starts_of(prefix):
    dataset = build_datasets(config([(prefix, 1.0)]), INFO).train
    return [int(dataset.sample(i)[0]) for i in range(5000)]


def test_fifty_million_documents_open_at_once(tmp_path):
    count = 50_000_000
    with open(tmp_path / "lengths", "wb") as file:
        os.truncate(file.fileno(), 4 * count)  # zeros, without disk
    lengths = np.memmap(tmp_path / "lengths", "<i4", "r+")
    lengths[:1000] = 100
    write_index(tmp_path / "a.idx", lengths, np.dtype("<u2"))
    (tmp_path / "a.bin").write_bytes(bytes(200_000))
    started = time.monotonic()
    source = Source(IndexedDataset(tmp_path / "a"), 64, seed=7, documents=(1, count - 5))
    source.window(12345)
    assert time.monotonic() - started < 10    # a walk over them would take minutes
    assert source.num_tokens == 99_900
    for path in tmp_path.iterdir():
        path.unlink()


def test_blend_of_sources_and_ids_outside_the_vocabulary(tmp_path):
    corpus(tmp_path / "a", [41])
    corpus(tmp_path / "b", [401])
    dataset = build_datasets(config([(tmp_path / "a", 3), (tmp_path / "b", 1), (tmp_path / "none", 0)]), INFO).train
    found = [dataset.locate(i) for i in range(400)]
    assert sum(source == 0 for source, _ in found) == 300
    assert sorted(p for s, p in found if s == 1) == list(range(100))
    small = TokenizerInfo("bytes", "", 300, None)
    broken = build_datasets(config([(tmp_path / "b", 1)]), small).train
    with pytest.raises(DataError, match=r"b\.bin.*token \d+.* id 3\d\d, outside the vocabulary of 300"):
        for i in range(100):
            broken.sample(i)


def test_splits_by_document(tmp_path):
    corpus(tmp_path / "a", [10] * 100)
    sets = build_datasets(config([(tmp_path / "a", 1.0)], split=[90, 5, 5]), INFO)
    parts = [sets.train, sets.valid["valid"], sets.test]
    held = [{int(x) for i in range(part.num_samples) for x in part.sample(i) if x != PAD} for part in parts]
    assert held[1] == set(range(900, 950)) and held[2] == set(range(950, 1000)) and held[0] <= set(range(900))
    assert split_bounds(3, parse_split("98,1,1")) == [0, 3, 3, 3]
    corpus(tmp_path / "b", [10] * 3)
    with pytest.raises(DataError, match="no document for validation.*3 documents"):
        build_datasets(config([(tmp_path / "b", 1.0)], split=[98, 1, 1]), INFO)
    with pytest.raises(DataError, match="data.split"):
        parse_split("0,1,1")
    with pytest.raises(DataError, match='named "valid"'):
        build_datasets(config([(tmp_path / "a", 1)], split=[9, 1, 0], valid={"valid": [(tmp_path / "a", 1)]}), INFO)
    with pytest.raises(DataError, match="names no dataset"):
        build_datasets(config([]), INFO)


def zigzag(seq, cp, rank):
    chunk = seq // (2 * cp)
    return torch.cat([torch.arange(c * chunk, (c + 1) * chunk) for c in (rank, 2 * cp - 1 - rank)])


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_labels_are_shifted_before_the_sequence_is_split(cp):
    rows = np.arange(100, 117)[None]
    whole = {}
    for rank in range(cp):
        part = collate(rows, torch.arange(1), zigzag(16, cp, rank))
        assert int((part.labels != IGNORE).sum()) == 16 // cp
        whole |= {
            int(p): (int(t), int(label))
            for p, t, label in zip(part.positions, part.tokens[0], part.labels[0], strict=True)
        }
    assert whole == {p: (100 + p, 101 + p) for p in range(16)}


def test_positions_restart_in_each_document(tmp_path):
    rows, ids = np.arange(9)[None], np.array([[0, 0, 0, 0, 0, 1, 1, 1, 1]])
    parts = [collate(rows, torch.arange(1), zigzag(8, 2, rank), document_ids=ids) for rank in range(2)]
    assert [part.tokens[0].tolist() for part in parts] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [part.positions[0].tolist() for part in parts] == [[0, 1, 1, 2], [2, 3, 4, 0]]
    assert all(part.document_starts.tolist() == [[0, 0, 0, 0, 0, 5, 5, 5]] for part in parts)
    # the first document's last token has no label: it does not see what it would predict
    assert [part.labels[0].tolist() for part in parts] == [[1, 2, 7, 8], [3, 4, IGNORE, 6]]
    assert collate(rows, torch.arange(1), zigzag(8, 2, 0)).positions.tolist() == [0, 1, 6, 7]


def test_workers_give_the_same_batches_and_their_errors(tmp_path):
    dataset = GlobalDataset([Source(corpus(tmp_path / "a", [81]), 4, seed=7)], seed=7)
    plain, threads = (list(itertools.islice(loader(dataset, workers=w), 12)) for w in (0, 3))
    for a, b in zip(plain, threads, strict=True):
        assert all(
            torch.equal(x.tokens, y.tokens) and torch.equal(x.samples, y.samples) for x, y in zip(a, b, strict=True)
        )

    class Failing(GlobalDataset):
        def sample(self, index):
            if index == 9:
                raise ValueError("sample nine")
            return super().sample(index)

    steps = iter(loader(Failing(dataset.sources, seed=7), workers=2))
    next(steps), next(steps)
    with pytest.raises(ValueError, match="sample nine") as error:
        next(steps)
    assert any(entry.name == "sample" for entry in error.traceback)


def test_skipped_samples_have_no_labels_and_shift_nothing(tmp_path):
    dataset = GlobalDataset([Source(corpus(tmp_path / "a", [81]), 4, seed=7)], seed=7)
    plain, skipping = (
        next(iter(loader(dataset, micro=4, skip_samples=skip, start_sample=4)))[0] for skip in ((), (6,))
    )
    assert (skipping.labels[2] == IGNORE).all() and skipping.sample_ids.tolist() == [0, 1, 2, 3]
    assert skipping.samples.tolist() == [4, 5, 6, 7]
    for row in (0, 1, 3):
        assert torch.equal(plain.tokens[row], skipping.tokens[row]) and torch.equal(
            plain.labels[row], skipping.labels[row]
        )


def test_a_batch_that_does_not_divide_is_refused(tmp_path):
    dataset = GlobalDataset([Source(corpus(tmp_path / "a", [81]), 4, seed=7)], seed=7)
    with pytest.raises(DataError, match="global_batch_size=6.*4 x 1"):
        loader(dataset, batch=6, dp=4)
