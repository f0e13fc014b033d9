"""Indexed datasets: round trips, the published Megatron package in both directions, broken files, wide token ids."""

import shutil
import struct

import numpy as np
import pytest

from megafour.data.errors import DataError
from megafour.data.indexed import IndexedDataset, IndexedWriter, token_dtype, write_index

DOCUMENTS = [[5, 1, 2, 3, 4], [], [7], [], [9, 8, 63]]


def write(prefix, documents=DOCUMENTS, vocab_size=64):
    with IndexedWriter(prefix, vocab_size) as writer:
        for document in documents:
            writer.add(document)
    return IndexedDataset(prefix)


def test_round_trip_and_layout(tmp_path):
    data = write(tmp_path / "a")
    assert [list(data[i]) for i in range(len(data))] == DOCUMENTS
    assert data.num_documents == 5 and [data.token_offset(d) for d in range(6)] == [0, 5, 5, 6, 6, 9]
    lengths = [len(d) for d in DOCUMENTS]
    expected = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 5, 6) + struct.pack("<5i", *lengths)
    expected += struct.pack("<5q", 0, 10, 10, 12, 12) + struct.pack("<6q", *range(6))
    assert (tmp_path / "a.idx").read_bytes() == expected
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<9H", *sum(DOCUMENTS, []))


def test_ids_over_16_bits_are_stored_whole_or_refused(tmp_path):
    wide = [65535, 65536, 70000]
    with pytest.raises(DataError, match="65536.*vocabulary of 65536"):
        write(tmp_path / "a", [wide], 65_536)
    assert not list(tmp_path.iterdir())
    assert list(write(tmp_path / "b", [wide], 70_001)[0]) == wide
    assert token_dtype(65_536) == np.uint16 and token_dtype(65_537) == np.int32
    with pytest.raises(DataError, match="-1"):
        write(tmp_path / "c", [[-1]], 70_001)


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda b, i: i.write_bytes(i.read_bytes()[:-1]), "documents take"),
        (lambda b, i: i.write_bytes(b"PK" + i.read_bytes()[2:]), "no Megatron index"),
        (lambda b, i: i.write_bytes(b""), "no Megatron index"),
        (lambda b, i: b.write_bytes(b.read_bytes()[:-1]), "whole number"),
        (lambda b, i: b.write_bytes(b.read_bytes()[:-2]), "disagree"),
        (lambda b, i: b.unlink(), "does not exist"),
        (lambda b, i: i.unlink(), "does not exist"),
    ],
)
def test_broken_files_are_refused_by_name(tmp_path, damage, words):
    write(tmp_path / "a")
    damage(tmp_path / "a.bin", tmp_path / "a.idx")
    with pytest.raises(DataError, match=words) as error:
        IndexedDataset(tmp_path / "a")
    assert str(tmp_path / "a") in str(error.value) and "\n" not in str(error.value)


def test_a_failed_write_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), IndexedWriter(tmp_path / "a", 64) as writer:
        writer.add([1])
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


def test_index_larger_than_one_block(tmp_path, monkeypatch):
    monkeypatch.setattr("megafour.data.indexed.WRITE_BLOCK", 7)
    lengths = np.arange(50, dtype="<i4")
    write_index(tmp_path / "a.idx", lengths, np.dtype("<u2"))
    (tmp_path / "a.bin").write_bytes(bytes(2 * int(lengths.sum())))
    data = IndexedDataset(tmp_path / "a")
    assert (data.pointers == 2 * (np.cumsum(lengths) - lengths)).all() and (data.documents == np.arange(51)).all()


@pytest.fixture(scope="module")
def megatron():
    return pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64, np.uint8])
def test_reads_what_megatron_core_writes(tmp_path, megatron, dtype):
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "m.bin"), dtype=dtype)
    documents = [[[1, 2, 3], [4]], [[250]], [[5, 6], [7], [8, 9]]]  # documents of several sequences
    import torch

    for document in documents:
        for sequence in document:
            builder.add_item(torch.tensor(sequence))
        builder.end_document()
    builder.finalize(str(tmp_path / "m.idx"))
    data = IndexedDataset(tmp_path / "m")
    assert data.dtype == dtype
    assert [list(data[i]) for i in range(len(data))] == sum(documents, [])
    assert data.num_documents == 3 and [data.token_offset(d) for d in range(4)] == [0, 4, 5, 10]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("vocab_size", [64, 70_001])
def test_megatron_core_reads_what_is_written_here(tmp_path, megatron, vocab_size):
    data = write(tmp_path / "a", vocab_size=vocab_size)
    theirs = megatron.IndexedDataset(str(tmp_path / "a"))
    assert len(theirs) == len(DOCUMENTS)
    for i, document in enumerate(DOCUMENTS):
        assert list(theirs[i]) == document and theirs[i].dtype == data.dtype
    assert list(theirs.document_indices) == list(data.documents)
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "m.bin"), dtype=data.dtype.type)
    import torch

    for document in DOCUMENTS:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(str(tmp_path / "m.idx"))
    for kind in ("bin", "idx"):
        assert (tmp_path / f"m.{kind}").read_bytes() == (tmp_path / f"a.{kind}").read_bytes()


def test_a_name_with_its_suffix_is_its_prefix(tmp_path):
    write(tmp_path / "a")
    assert len(IndexedDataset(tmp_path / "a.bin")) == len(IndexedDataset(tmp_path / "a.idx")) == 5
    shutil.rmtree(tmp_path)
