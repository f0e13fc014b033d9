"""Text files by name and content: what is cut short, empty, or not what its name says is refused by name."""

import bz2
import gzip
import json
import lzma

import pytest
import zstandard

from megafour.data.indexed import IndexedDataset
from megafour.data.prepare import Job, prepare
from tests.test_data_prepare import BYTES, TEXTS, lines, run, two_frames


@pytest.mark.parametrize("name, pack", [
    ("a.jsonl.gz", gzip.compress), ("a.jsonl.zst", two_frames), ("a.jsonl.bz2", bz2.compress),
    ("a.jsonl.xz", lzma.compress), ("a.jsonl.xz", lambda raw: lzma.compress(raw, check=lzma.CHECK_NONE))])
def test_a_damaged_file_is_named(tmp_path, capsys, name, pack):
    """Cut short, or with bytes changed; the exit code is 2 where the first look at its content shows it."""
    packed = pack(lines(TEXTS))
    (tmp_path / name).write_bytes(packed[:-20])
    assert ended(run, tmp_path, tmp_path / name) in (1, 2)
    assert f"error: {tmp_path / name} is cut short" in capsys.readouterr().err
    (tmp_path / name).write_bytes(packed[:8000] + bytes(200) + packed[8200:])
    assert ended(run, tmp_path, tmp_path / name) in (1, 2)
    assert f"error: {tmp_path / name}" in capsys.readouterr().err


@pytest.mark.parametrize("name, pack", [
    ("a.jsonl.gz", gzip.compress), ("a.jsonl.zst", zstandard.ZstdCompressor().compress), ("a.jsonl.bz2", bz2.compress),
    ("a.jsonl.xz", lzma.compress)])
def test_every_stream_of_a_file_is_read_or_named(tmp_path, capsys, name, pack):
    """Streams one after the other, padded with zeros; what is damaged or follows the last one is never left out."""
    streams = [pack(lines(TEXTS[at : at + 3])) for at in (0, 3, 6)]
    (tmp_path / name).write_bytes(streams[0] + bytes(8) + streams[1] + bytes(1 << 18) + streams[2] + bytes(1 << 18))
    assert run(tmp_path, tmp_path / name) == 0 and len(IndexedDataset(tmp_path / "out")) == 9
    for number, content in enumerate((streams[0] + b"?" + streams[1][1:], streams[0] + b"rubbish at the end",
                                      streams[0] + streams[1][:9])):
        place = tmp_path / str(number)
        place.mkdir()
        (place / name).write_bytes(content)
        assert ended(run, place, place / name) in (1, 2)
        assert f"error: {place / name} is " in capsys.readouterr().err and not (place / "out.idx").exists()


def ended(verb, *args):
    """The exit code, whether it is returned or raised."""
    try:
        return verb(*args)
    except SystemExit as end:
        return end.code


def parquet(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": TEXTS[:3]}), tmp_path / "made.parquet")
    return (tmp_path / "made.parquet").read_bytes()


WRONG = {
    "empty.parquet": (b"", "is empty (0 bytes)"),
    "empty.jsonl.gz": (b"", "is empty (0 bytes)"),
    "empty.TXT.zst": (b"", "is empty (0 bytes)"),
    "empty.json.bz2": (b"", "is empty (0 bytes)"),
    "empty.xz": (b"", "is empty (0 bytes)"),
    "plain.jsonl.gz": (lines(TEXTS[:3]), "is not gz data; fetch it again, or rename it"),
    "short.json.gz": (b"\x1f", "is not gz data"),
    "zstd.jsonl.gz": (two_frames(lines(TEXTS[:3])), "holds zst data, not gz; rename it to end in .zst"),
    "packed.jsonl": (gzip.compress(b"{}"), "holds gz data, which its name does not say; rename it to end in .gz"),
    "packed.txt": (bz2.compress(b"text"), "holds bz2 data, which its name does not say"),
    "no.parquet": (b"PAR1 and no footer", "is not a whole parquet file"),
    "a.parquet.gz": (gzip.compress(b"PAR1"), "parquet is compressed in itself"),
    "a.tar.gz": (gzip.compress(b"x"), "unknown kind of file"),
    "a.csv": (b"x", "unknown kind of file"),
    "a.json": (b' [{"text": "x"},\n{"text": "y"}]',
               "is one JSON array, and a record per line is read; convert it with `jq -c '.[]' "),
    "b.json": (json.dumps({"text": "x", "n": 1}, indent=1).encode(), "is one JSON document"),
    "c.json": (b'{"text": "x",\n "n": 1}', "is one JSON document"),
    "a.txt": ("wörd".encode("utf-16"), "is UTF-16 text, and UTF-8 is read; convert it with `iconv -f UTF-16"),
    "b.jsonl": (lines(TEXTS[:3]).decode().encode("utf-16-le"), "is UTF-16-LE text"),
    "c.jsonl.gz": (gzip.compress(lines(TEXTS[:3]).decode().encode("utf-32")), "is UTF-32 text"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_is_not_what_its_name_says_is_refused_at_every_place_before_any_work(tmp_path, capsys, name):
    content, words = WRONG[name]
    (tmp_path / name).write_bytes(content)
    (tmp_path / "good1.jsonl").write_bytes(lines(TEXTS[:3]))
    (tmp_path / "good2.jsonl").write_bytes(lines(TEXTS[3:5]))
    for order in ([name, "good1.jsonl", "good2.jsonl"], ["good1.jsonl", name, "good2.jsonl"],
                  ["good1.jsonl", "good2.jsonl", name]):
        for extra in ([], ["--shard", "0/3"]):
            assert ended(run, tmp_path, *(tmp_path / one for one in order), *extra) == 2
            err = capsys.readouterr().err
            assert err.startswith(f"error: {tmp_path / name}") and words in err and err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "good1.jsonl", "good2.jsonl"])


def test_a_parquet_file_that_is_cut_short_is_refused(tmp_path, capsys):
    (tmp_path / "a.parquet").write_bytes(parquet(tmp_path)[:-9])
    assert ended(run, tmp_path, tmp_path / "a.parquet") == 2
    assert "a.parquet is not a whole parquet file" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["empty.txt", "empty.jsonl"])
def test_an_empty_text_is_no_document_at_any_place(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS[:3]))
    (tmp_path / "b.jsonl").write_bytes(lines(TEXTS[3:5]))
    made = []
    for number, order in enumerate(([name, "a.jsonl", "b.jsonl"], ["a.jsonl", name, "b.jsonl"],
                                    ["a.jsonl", "b.jsonl", name])):
        info = prepare(Job([str(tmp_path / one) for one in order], str(tmp_path / str(number)), BYTES))
        made.append({key: value for key, value in info.items() if key != "made_from"})
    assert made[0] == made[1] == made[2] and made[0]["documents"] == 5 and made[0]["empty_documents"] == 0
