"""`megafour prepare`: every format, the same bytes by any road, bad records, kills, shards, wrong arguments."""

import bz2
import gzip
import json
import lzma
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import zstandard

from megafour.cli import main as cli
from megafour.config.notes import say_note
from megafour.data import prepare as module
from megafour.data import sources
from megafour.data.encode import Recipe
from megafour.data.errors import DataError
from megafour.data.indexed import IndexedDataset
from megafour.data.prepare import Job, prepare

BOM = b"\xef\xbb\xbf"
TEXTS = [f"document {i}: " + "wörd " * (i % 37) for i in range(3000)]
BYTES = Recipe("bytes", None, "text", "file", True)


def lines(texts, key="text"):
    return b"".join(json.dumps({key: text, "n": i}).encode() + b"\n" for i, text in enumerate(texts))


def ids(text):
    return [*text.encode(), 256]


def documents(prefix):
    data = IndexedDataset(prefix)
    return [list(data[i]) for i in range(len(data))]


def run(tmp_path, *args):
    workers = [] if "--workers" in args else ["--workers", "1"]  # starting processes is slow beside such inputs
    return cli.main(["prepare", *map(str, args), "--output", str(tmp_path / "out"), "--tokenizer", "bytes", *workers])


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(sources, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(module, "SMALL_INPUT", 0)


def two_frames(raw):
    half = len(raw) // 2
    return b"".join(zstandard.ZstdCompressor().compress(part) for part in (raw[:half], raw[half:]))


@pytest.mark.parametrize(
    "name, pack",
    [
        ("a.jsonl", lambda raw: raw),
        ("a.jsonl.gz", gzip.compress),
        ("a.jsonl.zst", two_frames),
        ("a.JSONL.GZ", gzip.compress),
        ("a.json.gz", gzip.compress),
        ("a.json", lambda raw: raw),
        ("a.ndjson", lambda raw: raw),
        ("a.ndjson.bz2", lambda raw: bz2.compress(raw[:50_000]) + bz2.compress(raw[50_000:])),
        ("a.jsonl.xz", lzma.compress),
        ("a-00001-of-01024.gz", gzip.compress),
        ("a.0.Zst", lambda raw: two_frames(BOM + raw)),
        ("a.json", lambda raw: BOM + b"\n" + raw),
        ("a.jsonl", lambda raw: b"\xef\xbb\xbf" + raw.replace(b"\n", b"\r\n").removesuffix(b"\r\n")),
        ("a.jsonl", lambda raw: raw.replace(b"\n", b"\n\n  \n")),
    ],
)
def test_json_lines(tmp_path, small_chunks, name, pack):
    (tmp_path / name).write_bytes(pack(lines(TEXTS)))
    assert run(tmp_path, tmp_path / "a*") == 0
    assert documents(tmp_path / "out") == [ids(text) for text in TEXTS]
    info = json.loads((tmp_path / "out.json").read_text())
    assert info["documents"] == 3000 and info["tokens"] == sum(len(text.encode()) + 1 for text in TEXTS)
    assert (
        info["tokenizer"]["kind"] == "bytes"
        and info["tokenizer"]["vocab_size"] == 257
        and info["tokenizer"]["eod_id"] == 256
    )
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(
    "split, expected",
    [
        ("file", ["one\ntwo\n\nthree\n\n\n\nfour\n"]),
        ("blank-line", ["one\ntwo", "three", "four"]),
        ("line", ["one", "two", "three", "four"]),
    ],
)
@pytest.mark.parametrize("chunk", [3, 1000])
def test_text_files(tmp_path, monkeypatch, split, expected, chunk):
    monkeypatch.setattr(sources, "CHUNK_BYTES", chunk)
    (tmp_path / "b.txt").write_text("one\ntwo\n\nthree\n\n\n\nfour\n")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"zero"))
    (tmp_path / "c.txt").write_text("")
    assert run(tmp_path, tmp_path / "*.txt*", "--split-text", split) == 0
    assert documents(tmp_path / "out") == [ids(text) for text in ["zero", *expected]]


def test_parquet_and_no_eod(tmp_path, capsys):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"body": [*TEXTS[:1500], None, ""], "n": list(range(1502))})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=700)
    assert run(tmp_path, tmp_path / "a.parquet") == 1
    assert "no column 'text'; it has body, n" in capsys.readouterr().err
    assert run(tmp_path, tmp_path / "a.parquet", "--json-key", "body") == 1
    assert "a.parquet:1501: 'body' is null" in capsys.readouterr().err
    assert run(tmp_path, tmp_path / "a.parquet", "--json-key", "body", "--no-eod", "--skip-bad", 1) == 0
    assert "1 empty documents, 1 bad records" in capsys.readouterr().out
    assert documents(tmp_path / "out") == [list(text.encode()) for text in TEXTS[:1500]]


def files_of(prefix):
    return [open(f"{prefix}.{kind}", "rb").read() for kind in ("bin", "idx", "json")]


def test_same_bytes_for_any_workers_and_shards(tmp_path, small_chunks):
    (tmp_path / "b.jsonl").write_bytes(lines(TEXTS[:2000]))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS[2000:2200])))
    (tmp_path / "c.jsonl").write_bytes(lines(TEXTS[2200:]).removesuffix(b"\n"))
    files = [str(tmp_path / name) for name in ("b.jsonl", "a.jsonl.gz", "c.jsonl")]
    for workers in (1, 2, 3):
        prepare(Job(files, str(tmp_path / f"w{workers}"), BYTES, workers))
    assert documents(tmp_path / "w1") == [ids(text) for text in TEXTS]
    assert files_of(tmp_path / "w1") == files_of(tmp_path / "w2") == files_of(tmp_path / "w3")
    for shards in (1, 2, 7):
        output = tmp_path / f"s{shards}"
        for shard in reversed(range(shards)):
            prepare(Job(files, str(output), BYTES, shard=(shard, shards)))
        assert cli.main(["prepare", "--merge", "--output", str(output)]) == 0
        assert files_of(output) == files_of(tmp_path / "w1")


def test_merge_wants_every_shard_of_one_corpus(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS[:50]))
    (tmp_path / "b.jsonl").write_bytes(lines(TEXTS[50:90]))
    merge = ["prepare", "--merge", "--output", str(tmp_path / "out")]
    assert cli.main(merge) == 1 and "no shards found" in capsys.readouterr().err
    run(tmp_path, tmp_path / "a.jsonl", "--shard", "0/3")
    assert cli.main(merge) == 1 and "not finished: 1, 2" in capsys.readouterr().err
    run(tmp_path, tmp_path / "b.jsonl", "--shard", "1/3")
    run(tmp_path, tmp_path / "a.jsonl", "--shard", "2/3")
    assert cli.main(merge) == 1 and "made from other inputs" in capsys.readouterr().err
    run(tmp_path, tmp_path / "a.jsonl", "--shard", "0/2")
    assert cli.main(merge) == 1 and "several divisions: [2, 3]" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "words"), [("{", "cannot be read as JSON"), ("{}", "does not say bad_records, ")])
def test_merge_names_a_damaged_shard(tmp_path, capsys, text, words):
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS[:50]))
    for shard in ("0/2", "1/2"):
        run(tmp_path, tmp_path / "a.jsonl", "--shard", shard)
    capsys.readouterr()
    (tmp_path / "out.shard-00001-of-00002.json").write_text(text)
    assert cli.main(["prepare", "--merge", "--output", str(tmp_path / "out")]) == 1
    assert f"out.shard-00001-of-00002.json {words}" in capsys.readouterr().err


BAD = {
    3: (b"{broken", "not JSON"),
    5: (b'{"n": 1}', "no key 'text' \\(found: n\\)"),
    6: (b'{"text": 4}', "'text' is int"),
    8: (b"[1]", "found: list"),
    9: (b'{"text": "\\ud800"}', "surrogate"),
    11: (b'{"text": "\xff"}', "not UTF-8"),
}


def test_bad_lines_are_named_or_left_out(tmp_path, capsys, small_chunks):
    rows = lines(TEXTS[:500]).splitlines(keepends=True)
    for at, (bad, _) in BAD.items():
        rows[400 + at] = bad + b"\n"
    (tmp_path / "a.jsonl").write_bytes(b"".join(rows))
    assert run(tmp_path, tmp_path / "a.jsonl") == 1
    err = capsys.readouterr().err
    assert f"{tmp_path / 'a.jsonl'}:404: not JSON" in err and err.startswith("error: ") and err.count("\n") == 1
    assert run(tmp_path, tmp_path / "a.jsonl", "--skip-bad", 5) == 1
    assert "a.jsonl:412: not UTF-8" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out.idx").exists()
    assert run(tmp_path, tmp_path / "a.jsonl", "--skip-bad", 6, "--workers", 2) == 0
    said = capsys.readouterr()
    for at, (_, words) in BAD.items():
        assert [line for line in said.err.splitlines() if f"a.jsonl:{401 + at}: " in line], words
    assert "6 bad records" in said.out
    kept = [text for at, text in enumerate(TEXTS[:500]) if at - 400 not in BAD]
    assert documents(tmp_path / "out") == [ids(text) for text in kept]


def test_a_bad_line_in_a_shard_has_its_number_in_the_file(tmp_path, capsys, small_chunks):
    rows = lines(TEXTS[:500]).splitlines(keepends=True)
    rows[450] = b"{\n"
    (tmp_path / "a.jsonl").write_bytes(b"".join(rows))
    codes = [run(tmp_path, tmp_path / "a.jsonl", "--shard", f"{i}/4") for i in range(4)]
    assert sorted(codes) == [0, 0, 0, 1] and "a.jsonl:451: not JSON" in capsys.readouterr().err


def test_a_corpus_without_text(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(lines(["", ""]))
    assert run(tmp_path, tmp_path / "a.jsonl") == 1
    assert "no document with any text" in capsys.readouterr().err


def test_wrong_arguments_exit_with_2(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS[:3]))
    good, out = str(tmp_path / "a.jsonl"), ["--output", str(tmp_path / "out")]
    wrong = [
        [good],
        [*out, "--tokenizer", "bytes"],
        [good, *out],
        [good, *out, "--tokenizer", "gpt"],
        [good, *out, "--tokenizer", "sentencepiece"],
        [good, *out, "--tokenizer", "sentencepiece:none.model"],
        [good, *out, "--tokenizer", "bytes:x"],
        [good, *out, "--tokenizer", "bytes", "--train-tokenizer", "300"],
        [good, good, *out, "--tokenizer", "bytes"],
        [good, str(tmp_path / ".." / tmp_path.name / "a.jsonl"), *out, "--tokenizer", "bytes"],
        [good, "--output", str(tmp_path), "--tokenizer", "bytes"],
        [good, "--output", str(tmp_path / "new") + "/", "--tokenizer", "bytes"],
        [str(tmp_path / "none*"), *out, "--tokenizer", "bytes"],
        [str(tmp_path), *out, "--tokenizer", "bytes"],
        [good, *out, "--tokenizer", "bytes", "--shard", "2/2"],
        [good, *out, "--tokenizer", "bytes", "--workers", "0"],
        [good, *out, "--merge"],
    ]
    for args in wrong:
        with pytest.raises(SystemExit) as ended:
            cli.main(["prepare", *args])
        err = capsys.readouterr().err
        assert ended.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1, (args, err)


def test_what_cannot_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS[:3]))
    where = str(tmp_path / "a.jsonl" / "out")
    assert cli.main(["prepare", str(tmp_path / "a.jsonl"), "--output", where, "--tokenizer", "bytes"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: {where}: ") and err.count("\n") == 1


def test_finished_work_is_not_redone_nor_silently_replaced(tmp_path, capsys, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS[:50]))
    run(tmp_path, tmp_path / "a.jsonl")
    monkeypatch.setattr(module, "encode_all", None)
    assert run(tmp_path, tmp_path / "a.jsonl") == 0 and "complete already" in capsys.readouterr().err
    monkeypatch.undo()
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS[:51]))
    assert run(tmp_path, tmp_path / "a.jsonl") == 1 and "--overwrite" in capsys.readouterr().err
    assert run(tmp_path, tmp_path / "a.jsonl", "--overwrite") == 0 and len(IndexedDataset(tmp_path / "out")) == 51


def test_goes_on_after_a_failure_where_its_journal_ends(tmp_path, small_chunks, monkeypatch):
    monkeypatch.setattr(module, "JOURNAL_SECONDS", 0.0)
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS))
    job = Job([str(tmp_path / "a.jsonl")], str(tmp_path / "out"), BYTES)
    encode, seen = module.encode_chunk, []

    def encode_until(limit):
        def wrapped(recipe, chunk):
            if len(seen) == limit:
                raise KeyboardInterrupt
            seen.append(chunk.first_line)
            return encode(recipe, chunk)

        return wrapped

    for limit in (10, 11, 40, None):
        monkeypatch.setattr(module, "encode_chunk", encode_until(limit))
        if limit:
            with pytest.raises(KeyboardInterrupt):
                prepare(job)
            with open(tmp_path / "out.partial" / "tokens.bin", "ab") as file:
                file.write(b"written after the journal")
    prepare(job)
    assert len(seen) == len(set(seen)) and documents(tmp_path / "out") == [ids(text) for text in TEXTS]


def test_a_second_process_on_one_prefix_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS[:5]))
    job = Job([str(tmp_path / "a.jsonl")], str(tmp_path / "out"), BYTES)
    info = module.open_tokenizer("bytes", None).info
    with module.Partial(job.prefix, "mark", info), pytest.raises(DataError, match="another process"):
        prepare(job)


def test_killed_at_any_time_it_is_whole_or_absent(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS) * 40)
    command = [
        sys.executable,
        "-m",
        "megafour",
        "prepare",
        str(tmp_path / "a.jsonl"),
        "--output",
        str(tmp_path / "out"),
        "--tokenizer",
        "bytes",
        "--workers",
        "2",
    ]
    for seconds in (0.3, 0.6, 0.9):
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if (tmp_path / "out.idx").exists():
            break
    assert subprocess.run(command, capture_output=True).returncode == 0
    data = IndexedDataset(tmp_path / "out")
    assert len(data) == 120_000 and list(data[119_999]) == ids(TEXTS[-1])


@pytest.mark.parametrize(("text", "size", "reason"), [
    ("", 300, "--train-tokenizer 300: the inputs hold no text to train on"),
    ("hello", 9000, "--train-tokenizer 9000: Vocabulary size too high (9000)"),
])
def test_a_corpus_too_small_for_a_tokenizer(tmp_path, capsys, text, size, reason):
    (tmp_path / "a.jsonl").write_bytes(lines([text]))
    arguments = [str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "x"), "--train-tokenizer", str(size)]
    assert cli.main(["prepare", *arguments]) == 1
    assert f"error: {reason}" in capsys.readouterr().err


def test_train_tokenizer(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS))
    for name in ("x", "y"):
        assert (
            cli.main(
                ["prepare", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / name), "--train-tokenizer", "290"]
            )
            == 0
        )
    assert (tmp_path / "x.model").read_bytes() == (tmp_path / "y.model").read_bytes()
    assert (tmp_path / "x.bin").read_bytes() == (tmp_path / "y.bin").read_bytes()
    info = json.loads((tmp_path / "x.json").read_text())
    assert info["tokenizer"]["file"] == "x.model" and info["tokenizer"]["vocab_size"] == 290
    assert IndexedDataset(tmp_path / "x").dtype == np.uint16
    assert (
        cli.main(["prepare", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "x"), "--train-tokenizer", "290"])
        == 0
    )
    assert "complete already" in capsys.readouterr().err


def test_dropout_of_a_tokenizer_leaves_the_bytes_alike(tmp_path, capsys, small_chunks):
    """Encoded twice, by one process and by workers; one line says what is left out."""
    import tokenizers

    model = tokenizers.ByteLevelBPETokenizer()
    model.train_from_iterator(TEXTS[:50], vocab_size=300, special_tokens=["</s>"], show_progress=False)
    model._tokenizer.model.dropout = 0.5
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS[:200]))
    for name, workers in (("x", 1), ("y", 1), ("z", 2)):
        args = [str(tmp_path / "a.jsonl"), "--output", str(tmp_path / name), "--workers", str(workers)]
        say_note.cache_clear()      # each is a command of its own
        assert cli.main(["prepare", *args, "--tokenizer", f"huggingface:{tmp_path / 'tokenizer.json'}"]) == 0
        said = [line for line in capsys.readouterr().err.splitlines() if "dropout=0.5" in line]
        assert len(said) == 1 and said[0].startswith(f"note: {tmp_path / 'tokenizer.json'}: model.dropout=0.5 samples")
    assert files_of(tmp_path / "x") == files_of(tmp_path / "y") == files_of(tmp_path / "z")
