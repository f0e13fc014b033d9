"""File systems that lack locks, folder syncs or memory maps, or that fail: what goes on, and what ends in one line."""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import json
import mmap
import os
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import train
from megafour.checkpoint import safetensors_file
from megafour.checkpoint.errors import CheckpointError
from megafour.checkpoint.safetensors_file import SafetensorsFolder
from megafour.cli import main as cli
from megafour.config.file_system import sync, sync_folder
from megafour.data import prepare as prepare_module
from megafour.data.indexed import IndexedDataset
from megafour.data.mapped import FileArray
from megafour.trainer import metrics as metrics_module
from megafour.trainer.lock import RunLock
from tests.huggingface import save_model
from tests.training import settings, write_corpus

LACKING = [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL]
BROKEN = [errno.EIO, errno.ENOSPC, errno.ESTALE, errno.EROFS]


def fail(number: int, when=lambda *args: True, original=None):
    """A system call that answers with an error, where `when` says so."""
    def call(*args, **named):
        if when(*args):
            raise OSError(number, os.strerror(number))
        return original(*args, **named)
    return call


def is_folder(handle, *_) -> bool:
    return stat.S_ISDIR(os.fstat(handle).st_mode)


def one_error(capsys) -> str:
    """The one `error:` line of what has just ended."""
    err = capsys.readouterr().err
    assert "Traceback" not in err
    found = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(found) == 1, err
    return found[0]


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(9)))
    return tmp_path


def prepare(folder: Path, *more: str) -> int:
    return cli.main(["prepare", str(folder / "a.jsonl"), "--output", str(folder / "out"), "--tokenizer", "bytes",
                     "--workers", "1", *more])


def run(folder: Path, *overrides: str) -> int:
    """Train four steps in this process, saved at 2 and at 4."""
    if not (folder / "corpus.idx").exists():
        write_corpus(folder / "corpus")
    values = settings(folder, {"dp": 1}, checkpoint={"every": 2}, train={"steps": 4})
    (folder / "c.yaml").write_text(yaml.safe_dump(values))
    return train.main(["--config", str(folder / "c.yaml"), *overrides])


# --- locks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", LACKING)
def test_prepare_goes_on_without_locks_and_says_so(texts, capsys, monkeypatch, number):
    monkeypatch.setattr(fcntl, "flock", fail(number))
    assert prepare(texts) == 0 and len(IndexedDataset(texts / "out")) == 9
    assert capsys.readouterr().err.count(f"{texts / 'out.partial' / 'lock'}: the file system has no locks") == 1


@pytest.mark.parametrize(("number", "words"), [
    (errno.EWOULDBLOCK, "another process is preparing this dataset"),
    (errno.EACCES, "another process is preparing this dataset"), (errno.EIO, "Input/output error: '{0}/lock'"),
    (errno.ESTALE, "Stale file handle: '{0}/lock'")])
def test_prepare_ends_where_the_lock_is_held_or_fails(texts, capsys, monkeypatch, number, words):
    monkeypatch.setattr(fcntl, "flock", fail(number))
    assert prepare(texts) == 1
    assert words.format(texts / "out.partial") in one_error(capsys) and not (texts / "out.idx").exists()


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK])
def test_a_run_is_locked_where_there_are_no_hard_links(tmp_path, monkeypatch, number):
    """Held against a second run; taken over from a dead one; a new one's that was moved by mistake comes back."""
    monkeypatch.setattr(os, "link", fail(number))
    first = RunLock(tmp_path / "lock").acquire()
    with pytest.raises(CheckpointError, match="in use by another run"):
        RunLock(tmp_path / "lock").acquire()
    second = RunLock(tmp_path / "lock")
    second._move_away({"token": "of a run that is dead"})
    assert json.loads((tmp_path / "lock").read_text())["token"] == first.token
    first.release()
    (tmp_path / "lock").write_text(json.dumps({"machine": second.machine, "pid": 2**22 + 1, "process": 1}))
    second.acquire().release()
    assert list(tmp_path.iterdir()) == []


# --- syncs ------------------------------------------------------------------------------------------------------


def test_a_run_saves_where_folders_cannot_be_synced_and_says_so_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(os, "fsync", fail(errno.EINVAL, is_folder, os.fsync))
    assert run(tmp_path) == 0
    err = capsys.readouterr().err
    saved = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in saved.glob("step-*")) == ["step-00000002", "step-00000004"]
    assert err.count(f"{saved}: the file system does not sync folders") == 1 and "error" not in err


@pytest.mark.parametrize("number", [*LACKING, errno.EBADF, errno.EACCES])
def test_only_what_a_file_system_lacks_is_skipped(tmp_path, monkeypatch, number):
    """Of a folder alone: a file's sync is never skipped, nor a folder's that a fault of the disk has ended."""
    monkeypatch.setattr(os, "fsync", fail(number))
    sync_folder(tmp_path)
    with open(tmp_path / "x", "wb") as file, pytest.raises(OSError, match=f"{tmp_path / 'x'}"):
        sync(file)
    for broken in BROKEN:
        monkeypatch.setattr(os, "fsync", fail(broken))
        with pytest.raises(OSError, match=f"{tmp_path}"):
            sync_folder(tmp_path)


@pytest.mark.parametrize(("number", "what"), [
    (errno.EIO, "folder"), (errno.EINVAL, "file"), pytest.param(errno.EIO, "file", marks=pytest.mark.full)])
def test_a_save_ends_where_a_sync_fails_and_names_what(tmp_path, capsys, monkeypatch, number, what):
    """What was saved before stays, and the run can go on from it."""
    assert run(tmp_path, "train.steps=2") == 0
    saved = tmp_path / "run" / "checkpoints"
    before = {path: path.read_bytes() for path in (saved / "step-00000002").rglob("*") if path.is_file()}
    capsys.readouterr()
    name = "step-00000004" if what == "folder" else "__0_0.distcp"

    def hit(handle):
        return name in os.readlink(f"/proc/self/fd/{handle}") and is_folder(handle) == (what == "folder")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail(number, hit, os.fsync))
        assert run(tmp_path) == 1
    assert f"{os.strerror(number)}: '" in (line := one_error(capsys)) and name in line.rpartition("'")[0]
    assert {path: path.read_bytes() for path in before} == before and not (saved / "step-00000004").exists()
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"
    assert run(tmp_path) == 0


@pytest.mark.parametrize("number", [errno.EIO, errno.EINVAL])
def test_prepare_ends_where_a_file_cannot_be_synced(texts, capsys, monkeypatch, number):
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail(number))
        assert prepare(texts) == 1
    assert one_error(capsys).endswith(f"{os.strerror(number)}: '{texts / 'out.partial' / 'tokens.bin'}'")
    assert not (texts / "out.idx").exists()
    assert prepare(texts) == 0


# --- memory maps ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENODEV, *(pytest.param(number, marks=pytest.mark.full)
                                                    for number in (errno.ENOSYS, errno.EOPNOTSUPP))])
def test_datasets_are_read_where_there_are_no_memory_maps(texts, capsys, monkeypatch, number):
    """prepare, its shards, inspect, evaluate and training give the same as with them, and name each file once."""
    write_corpus(texts / "corpus")
    found: list[list] = []
    for place in ("mapped", "read"):
        if place == "read":
            monkeypatch.setattr(mmap, "mmap", fail(number))
        folder = texts / place
        folder.mkdir()
        (folder / "a.jsonl").write_bytes((texts / "a.jsonl").read_bytes())
        for name in ("corpus.bin", "corpus.idx"):
            (folder / name).write_bytes((texts / name).read_bytes())
        assert [prepare(folder, *more) for more in ([], ["--shard", "0/2"], ["--shard", "1/2"])] == [0, 0, 0]
        assert prepare(folder, "--overwrite") == 0
        (folder / "out.idx").unlink()
        assert cli.main(["prepare", "--merge", "--output", str(folder / "out")]) == 0
        assert run(folder) == 0
        capsys.readouterr()
        monkeypatch.chdir(folder)
        assert cli.main(["inspect", "corpus", "--document", "7"]) == 0
        assert cli.main(["evaluate", "--checkpoint", "run", "--data", "corpus", "--json"]) == 0
        out, err = capsys.readouterr()
        losses = [json.loads(line)["loss"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        found.append([out, losses, *((folder / f"out.{end}").read_bytes() for end in ("bin", "idx", "json"))])
        assert (err.count("corpus.bin: the file system has no memory maps") == 1) == (place == "read"), err
    assert found[0] == found[1]


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ENOMEM])
def test_a_dataset_that_cannot_be_mapped_for_another_reason_is_named(texts, capsys, monkeypatch, number):
    write_corpus(texts / "corpus")
    monkeypatch.setattr(mmap, "mmap", fail(number))
    assert cli.main(["inspect", str(texts / "corpus")]) == 1
    assert one_error(capsys) == f"error: {texts / 'corpus.idx'} cannot be read: {os.strerror(number)}"


def test_an_array_that_is_read_is_sliced_as_one_that_is_mapped(tmp_path):
    values = np.arange(1000, dtype="<u2")
    values.tofile(tmp_path / "x")
    array = FileArray(tmp_path / "x", np.dtype("<u2"))
    assert len(array) == 1000
    for part in (slice(0, 0), slice(0, 7), slice(990, 2000), slice(None), slice(5, 3)):
        assert (array[part] == values[part]).all() and len(array[part]) == len(values[part])
    (tmp_path / "x").write_bytes(b"")
    with pytest.raises(Exception, match="x has become shorter"):
        array[0:5]


def test_safetensors_are_read_where_there_are_no_memory_maps(tmp_path, capsys, monkeypatch):
    """The same tensors and slices; the error is the one that the library gives for a file that cannot be mapped."""
    pytest.importorskip("transformers")
    save_model("llama", tmp_path, torch.bfloat16)
    with SafetensorsFolder(tmp_path) as mapped:
        known = mapped.tensors
        whole = {name: mapped.read(name).clone() for name in known}

    def no_maps(path, framework):
        raise OSError("No such device (os error 19)")

    monkeypatch.setattr(safetensors_file, "safe_open", no_maps)
    capsys.readouterr()
    with SafetensorsFolder(tmp_path) as read:
        assert read.tensors == known
        for name, tensor in whole.items():
            assert torch.equal(read.read(name), tensor)
            part = tuple(slice(1, None) for _ in tensor.shape)
            assert torch.equal(read.read(name, part), tensor[part])
    assert capsys.readouterr().err.count(f"{tmp_path / 'model.safetensors'}: the file system has no memory maps") == 1
    file = tmp_path / "model.safetensors"
    for damaged in (file.read_bytes()[:-2], b"\x09", b"\xff" * 64, file.read_bytes()[:40]):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="model.safetensors cannot be read as safetensors"), \
                SafetensorsFolder(tmp_path):
            pass


def test_the_library_says_in_words_that_a_file_cannot_be_mapped():
    """What `_opened` reads out of its error: files of /sys cannot be mapped on any machine."""
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not path.is_file():
        pytest.skip("this kernel has no such file")
    with pytest.raises(OSError, match=r"os error \d+"):
        safetensors_file.safe_open(path, framework="pt")


# --- what fails otherwise ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EXDEV, *(pytest.param(number, marks=pytest.mark.full)
                                                   for number in (*BROKEN, errno.EACCES))])
def test_a_save_that_cannot_be_renamed_is_one_line(tmp_path, capsys, monkeypatch, number):
    assert run(tmp_path, "train.steps=2") == 0
    capsys.readouterr()
    monkeypatch.setattr(os, "rename", fail(number, lambda _, target: str(target).endswith("step-00000004"), os.rename))
    assert run(tmp_path) == 1
    line = one_error(capsys)
    assert "step-00000004" in line and os.strerror(number) in line
    assert (tmp_path / "run" / "checkpoints" / "step-00000002" / "manifest.json").is_file()


@pytest.mark.parametrize("number", [*BROKEN, errno.EXDEV, errno.EACCES])
def test_a_dataset_that_cannot_be_renamed_is_one_line_and_goes_on_later(texts, capsys, monkeypatch, number):
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fail(number, lambda _, target: str(target).endswith("out.bin"), os.replace))
        assert prepare(texts) == 1
    line = one_error(capsys)
    assert line.startswith(f"error: {texts / 'out'}") and os.strerror(number) in line
    assert not (texts / "out.idx").exists()
    assert prepare(texts) == 0 and len(IndexedDataset(texts / "out")) == 9


class Full:
    """A file on a disk that takes no more."""

    closed = False

    def __init__(self, path, *args, **named) -> None:
        self.name = str(path)

    def write(self, data) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Nothing was kept back."""


def test_a_full_disk_ends_prepare_with_the_file_s_name(texts, capsys, monkeypatch):
    monkeypatch.setattr(prepare_module, "open", raising=False,
                        value=lambda path, mode, **how: Full(path) if mode == "ab" else open(path, mode, **how))
    assert prepare(texts) == 1
    assert one_error(capsys).endswith(f"No space left on device: '{texts / 'out.partial' / 'tokens.bin'}'")


def test_a_full_disk_ends_a_run_with_the_file_s_name(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(metrics_module, "open", Full, raising=False)
    assert run(tmp_path) == 1
    assert one_error(capsys).endswith(f"No space left on device: '{tmp_path / 'run' / 'metrics.jsonl'}'")
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"


@pytest.mark.parametrize("verb", ["evaluate", "generate", "inspect", "convert"])
def test_a_file_that_cannot_be_opened_is_one_line_in_every_verb(tmp_path, capsys, monkeypatch, verb):
    """Each small file of a checkpoint in turn."""
    assert run(tmp_path, "train.steps=2", "data.tokenizer={kind: bytes}", "model.vocab_size=257") == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000002"
    argv = {"evaluate": ["--checkpoint", str(checkpoint), "--data", str(tmp_path / "corpus")],
            "generate": ["--checkpoint", str(checkpoint), "--prompt", "a", "--max-tokens", "1"],
            "inspect": [str(checkpoint)], "convert": ["to-hf", str(checkpoint), str(tmp_path / "hf")]}[verb]
    for name in sorted(path.name for path in checkpoint.iterdir()):
        with monkeypatch.context() as patched:
            unreadable(patched, lambda path, name=name: str(path).endswith(f"step-00000002/{name}"))
            capsys.readouterr()
            code = cli.main([verb, *argv])
        assert code in (1, 2) and name in one_error(capsys), name


@pytest.mark.parametrize("name", ["corpus.idx", "corpus.bin", "corpus.json", "rank-0.log", "lock", "metrics.jsonl"])
def test_a_file_that_cannot_be_opened_ends_a_run_with_one_line(tmp_path, capsys, monkeypatch, name):
    assert run(tmp_path, "train.steps=2") == 0
    before = sorted(path for path in (tmp_path / "run" / "checkpoints").rglob("*"))
    if name == "corpus.json":
        (tmp_path / name).write_text("{}")
    capsys.readouterr()
    unreadable(monkeypatch, lambda path: Path(path).name.startswith(name))
    assert run(tmp_path) == 1
    assert name in one_error(capsys)
    assert before == sorted(path for path in (tmp_path / "run" / "checkpoints").rglob("*"))


def unreadable(patched: pytest.MonkeyPatch, hit) -> None:
    """Let whoever opens such a file meet a refusal."""
    def refuse(path, *args, **named):
        if isinstance(path, (str, os.PathLike)) and hit(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *args, **named)

    opened = builtins.open
    for owner in (builtins, io):
        patched.setattr(owner, "open", refuse)
