"""Hostile files, values, launches, consoles and file systems, drawn by hypothesis over all verbs.

Whatever is drawn, a command ends with 0, 1 or 2, without a traceback, with one `error:` line where it did not do what
it was asked for, and everything that was saved before is still there.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from megafour.config.schema import Config
from megafour.config.types import section_of
from tests.hostile import ERRNOS, Command, Ended, Server

MODEL = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 24}
RUN = {"run": {"name": "tiny", "dir": "run", "device": "cpu"}, "model": MODEL,
       "data": {"train": [{"path": "data/corpus"}], "valid": {"held": [{"path": "data/corpus"}]}, "seq_length": 16,
                "tokenizer": {"kind": "huggingface", "path": "tokenizer.json"}},
       "train": {"steps": 2, "global_batch_size": 2, "precision": "fp32"},
       "eval": {"every": 1, "batches": 1}, "checkpoint": {"every": 1, "keep": 100}, "logging": {"tensorboard": False}}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


@pytest.fixture(scope="module")
def world(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the verbs read: texts, a tokenizer, a dataset, a run of two steps, exports of it."""
    folder = tmp_path_factory.mktemp("world")
    words = "one two three four five six seven eight nine ten"
    texts = [f"{words} {n} {words}" for n in range(40)]
    (folder / "text.txt").write_text("\n".join(texts), encoding="utf-8")
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    _write_tokenizer(folder / "tokenizer.json", texts)
    (folder / "config.yaml").write_text(json.dumps(RUN), encoding="utf-8")
    with gzip.open(folder / "more.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("".join(json.dumps({"text": text}) + "\n" for text in texts[:9]))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts[:9]}), folder / "more.parquet")
    for call in ("schedule --name zb_h1 --stages 2 --micro-batches 2 --save table.json",
                 "prepare text.txt --output new --train-tokenizer 320 --split-text line --workers 1",
                 "prepare text.jsonl --output data/corpus --tokenizer huggingface:tokenizer.json --workers 1",
                 "train --config config.yaml", "convert to-hf run hf", "convert from-hf hf checkpoint"):
        ended = server.run(Command(tuple(call.split())), folder)
        assert ended.codes == [0], (call, ended)
    (folder / "new.model").rename(folder / "tokenizer.model")
    for path in folder.glob("new.*"):
        path.unlink()
    return folder


def _write_tokenizer(path: Path, texts: list[str]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=60, special_tokens=["<unk>", "<|endoftext|>"],
                                                             show_progress=False))
    tokenizer.save(str(path))


CALLS = {
    "resume": "train --config config.yaml train.steps=3",
    "resume on tp2": "2 train --config config.yaml train.steps=3 parallel.tp=2",
    "new run on dp2": "2 train --config config.yaml run.dir=new train.steps=1 parallel.zero_stage=3",
    "new run": "train --config config.yaml run.dir=new train.steps=1",
    "start from a run": "train --config config.yaml run.dir=new train.steps=1 checkpoint.init_from=run",
    "start from Hugging Face": "train --config config.yaml run.dir=new train.steps=1 model={preset:\u00a0hf} "
                               "checkpoint.init_from=hf",
    "check": "train --check --world 8 --config config.yaml parallel.tp=2 parallel.pp=2",
    "prepare lines": "prepare text.jsonl text.txt --output new --tokenizer huggingface:tokenizer.json --workers 2",
    "train a tokenizer": "prepare text.txt --output new --train-tokenizer 320 --split-text line --workers 1",
    "prepare compressed": "prepare more.jsonl.gz more.parquet --output new --tokenizer sentencepiece:tokenizer.model "
                          "--workers 1",
    "prepare again": "prepare text.jsonl --output data/corpus --tokenizer huggingface:tokenizer.json --workers 1",
    "evaluate lines": "evaluate --checkpoint checkpoint --text more.jsonl.gz",
    "evaluate a text": "evaluate --checkpoint run --text text.txt",
    "evaluate a dataset": "evaluate --hf hf --data data/corpus --json",
    "evaluate on cp2": "2 evaluate --checkpoint run --text text.txt parallel.cp=2",
    "generate": "generate --checkpoint run --prompt one --max-tokens 3",
    "inspect a run": "inspect run",
    "inspect a dataset": "inspect data/corpus",
    "inspect a config": "inspect config.yaml",
    "inspect two checkpoints": "inspect run checkpoint",
    "inspect a Hugging Face folder": "inspect hf",
    "export": "convert to-hf run exported --dtype bf16",
    "import": "convert from-hf hf imported",
    "schedule": "schedule --name zb_v --stages 2 --micro-batches 4",
    "own schedule": "schedule --name table.json --stages 2 --micro-batches 2",
    "train on an own schedule": "2 train --config config.yaml run.dir=new train.steps=1 parallel.pp=2 "
                                "parallel.pipeline.schedule=table.json",
}
SLOW_CALLS = {"verify": "verify --config config.yaml --mesh tp2 --steps 1", "verify defaults": "verify --mesh pp2"}
"""Those that start processes of their own: with `--all` only."""
SAVED = ("run/checkpoints", "data", "hf", "checkpoint", "tokenizer.json", "tokenizer.model", "text.txt", "text.jsonl",
         "more.jsonl.gz", "more.parquet", "config.yaml", "table.json")

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 70) | st.sampled_from([10**30, -10**30, 2**63, 1e308, 5e-324])
    | st.floats() | st.text(max_size=8) | st.sampled_from(["16", "auto", "null", "é·", "\ud800", "x" * 300]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=4)
VALUES = st.sampled_from([
    "", "null", "~", "0", "-1", "1e400", "nan", ".inf", "1e-400", "-0.0", "9" * 30, "16.0", "0x10", "010", "1_0",
    "[]", "{}", "[[]]", "[1, 2]", "{a: b}", "[x", "{", "a b", "é·–", "a #b", "#x", "*x", "&x 1",
    "!!python/object:os.system x", "%", "'", '"', "\udc80", "\u0007", "../..", "~", "~nobody/x", "~/x", "/dev/null",
    "/proc/self/mem", "/", ".", "true", "off", "2**3", "${NOPE}", "${HOME}", "$", "<<", "x" * 5000, "hf", "run",
    "config.yaml", "data/corpus", "text.txt", "2", "3", "7"])
LONG = {"train.steps", "train.tokens", "train.global_batch_size", "train.micro_batch_size", "eval.batches"}
"""Keys whose large values are honest work for days."""

NUMBERS = ["", " ", "two", "0", "-1", "1.0", "99999", "tcp://10.0.0.1:80", "é", "1e3", "9" * 30]
LAUNCH = st.fixed_dictionaries({}, optional={
    **{name: st.sampled_from(NUMBERS) for name in (
        "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "GROUP_RANK", "OMP_NUM_THREADS",
        "SLURM_PROCID", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")},
    "LOCAL_RANK": st.sampled_from([value for value in NUMBERS if value != "99999"]),     # which would wait to say so
    "MASTER_ADDR": st.sampled_from(["", " ", "no.such.host.invalid", "é", "a b", "x" * 300]),
    "HOME": st.sampled_from(["", "nowhere", "/dev/null"]), "TMPDIR": st.sampled_from(["", "nowhere", "/dev/null"])})
FAULTS = st.one_of(
    st.tuples(st.just("flock"), st.sampled_from(["ENOSYS", "ENOLCK", "EOPNOTSUPP", "EIO"])),
    st.tuples(st.just("fsync_folder"), st.sampled_from(["EINVAL", "EOPNOTSUPP", "EACCES"])),
    st.tuples(st.just("fsync"), st.sampled_from(["EIO", "ENOSPC"])),
    st.tuples(st.just("mmap"), st.sampled_from(["ENODEV", "EACCES"])),
    st.tuples(st.just("rename"), st.sampled_from(["EXDEV", "EACCES", "EROFS", "ESTALE"])),
).map(lambda pair: {pair[0]: ERRNOS[pair[1]]}) | st.integers(0, 1 << 14).map(lambda size: {"file_size": size})


def leaves(model: Any = Config, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Every key of the schema, sections included."""
    for name, info in model.model_fields.items():
        yield ".".join((*path, name))
        section = section_of(info.annotation)
        if section is not None:
            yield from leaves(section, (*path, name))


KEYS = sorted(leaves())


def leave_behind(data: st.DataObject, folder: Path) -> str:
    """Put into the world what an earlier command, another program or a person has left there; returns what."""
    lock = json.dumps({"host": "elsewhere", "pid": 1, "token": "x", "time": 0.0})
    left = {"run/stop": "", "run/lock": lock, "run/checkpoints/step-x/a": "", "run/checkpoints/lock": "",
            "run/checkpoints/step-00000009/state.json": "{}", "run/checkpoints/.tmp-9/x": "", "new": "a file",
            "new.partial": "a file", "new/lock": lock, "new/config.yaml": "[", "new/status.json": "[]", "new.bin": "",
            "new.partial/journal.jsonl": "{", "exported/config.json": "{}", "imported": "", "runs": ""}
    name = data.draw(st.sampled_from(sorted(left)), "left behind")
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(left[name], encoding="utf-8")
    return f"left behind {name}"


def read_by(words: tuple[str, ...], folder: Path) -> list[str]:
    """The files of the world that a command may read, by the words that name their folders."""
    named = {word.rpartition("=")[2].rpartition(":")[2].strip("{}").split("/")[0] for word in words}
    if "config.yaml" in named or "run" in named:
        named |= {"run", "data", "tokenizer.json"}
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(str(path.relative_to(folder)) for path in files if path.relative_to(folder).parts[0] in named)


def spoil(data: st.DataObject, words: tuple[str, ...], folder: Path) -> str:
    """Damage a file that a command reads, as crashes, disks, downloads and people do; returns what was done."""
    files = read_by(words, folder)
    if not files:
        return "nothing to damage"
    text = [name for name in files if name.endswith((".json", ".yaml"))]
    name = data.draw(st.sampled_from(files) | st.sampled_from(text or files), "file")
    path, content = folder / name, (folder / name).read_bytes()
    ways = ["empty", "cut", "flip", "mark", "remove", "folder", "loop", "dangling", "other", "utf-16", "latin-1"]
    if path.suffix == ".json" or name == "config.yaml":
        ways += ["json"] * 8
    way = data.draw(st.sampled_from(ways), "way")
    at = data.draw(st.integers(0, max(len(content) - 1, 0)), "at") if way in ("cut", "flip") else 0
    if way == "json":
        _change_json(data, path, content)
    elif way in ("remove", "folder", "loop", "dangling"):
        path.unlink()
        if way == "folder":
            path.mkdir()
        elif way != "remove":
            path.symlink_to(path.name if way == "loop" else "nowhere")
    else:
        path.write_bytes({
            "empty": lambda: b"", "cut": lambda: content[:at], "mark": lambda: b"\xef\xbb\xbf" + content,
            "flip": lambda: content[:at] + bytes([content[at] ^ 16]) + content[at + 1:] if content else b"\0",
            "other": lambda: (folder / data.draw(st.sampled_from(files), "other")).read_bytes(),
            "utf-16": lambda: content.decode("utf-8", "replace").encode("utf-16", "surrogatepass"),
            "latin-1": lambda: content + "é".encode("latin-1")}[way]())
    return f"{way} {name}"


def _change_json(data: st.DataObject, path: Path, content: bytes) -> None:
    """Put any value into any place of a JSON file."""
    tree = json.loads(content)
    place, keys = tree, []
    while isinstance(place, dict | list) and place:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        keys.append((place, key))
        place = place[key]
        if data.draw(st.booleans(), "here"):
            break
    value = data.draw(JSON, "value")
    if keys:
        where, key = keys[-1]
        where[key] = value
        if isinstance(where, dict) and data.draw(st.integers(0, 5)) == 0:
            del where[key]
    else:
        tree = value
    path.write_text(json.dumps(tree), encoding="utf-8")


@st.composite
def commands(draw: st.DrawFn, calls: dict[str, str]) -> tuple[Command, set[str]]:
    """One of the calls, and one or two things that are wrong: with its words, its launch, its console, its disk; or
    with what it reads (`file`) or finds (`left`), which the caller does."""
    words = [word.replace("\u00a0", " ") for word in calls[draw(st.sampled_from(sorted(calls)))].split(" ")]
    ranks = int(words.pop(0)) if words[0].isdecimal() else 1
    ways = ["file", "file", "file", "left", "override", "override", "word", "launch", "console", "disk"]
    wrong = set(draw(st.lists(st.sampled_from(ways), min_size=1, max_size=2)))
    more: dict[str, Any] = {}
    if "override" in wrong:
        key, value = draw(st.sampled_from(KEYS)), draw(VALUES)
        if words[0] in ("train", "evaluate", "verify") and not (key in LONG and value.isdecimal()):
            words.append(f"{key}={value}")
    if "word" in wrong:
        at = draw(st.integers(1, len(words) - 1))
        words[at] = draw(VALUES | st.sampled_from(["--", "-", "--help", "--config", "--nope", "=", "a=b", "train.=1"]))
    if "launch" in wrong:
        more["env"] = draw(LAUNCH)
    if "console" in wrong:
        more["console"] = draw(st.sampled_from(["ascii", "latin-1", "closed", "full"]))
        more["locale"] = draw(st.sampled_from(["ascii", "latin-1", "utf-8"]))
    if "disk" in wrong:
        more["faults"] = draw(FAULTS)
    return Command(tuple(word.replace("\0", "") for word in words), ranks, **more), wrong


def contents(folder: Path) -> Counter[str]:
    """How often each content lies under what was saved, wherever and under whatever name it lies now."""
    found: Counter[str] = Counter()
    for base, _, names in os.walk(folder):
        for name in names:
            path = Path(base, name)
            if path.is_file() and name != "lock":
                found[hashlib.sha256(path.read_bytes()).hexdigest()] += 1
    return found


def saved(folder: Path) -> Counter[str]:
    """Contents that no command may lose."""
    found: Counter[str] = Counter()
    for name in SAVED:
        path = folder / name
        if path.is_file():
            found[hashlib.sha256(path.read_bytes()).hexdigest()] += 1
        elif path.is_dir():
            found += contents(path)
    return found


def judge(command: Command, ended: Ended, lost: Counter[str]) -> None:
    """Assert what holds for every command."""
    note(f"{command}\n{ended.codes}\n--- stdout\n{ended.out[-2000:]}\n--- stderr\n{ended.err[-4000:]}")
    text = ended.out + ended.err
    assert "Traceback" not in text, "a traceback"
    own = [code for code in ended.codes if code not in (-15, -9)] if any(c > 0 for c in ended.codes) else ended.codes
    assert set(own) <= {0, 1, 2}, f"exit codes {ended.codes}"
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    most = command.ranks if "LOCAL_RANK" in command.env else 1      # ranks that all take themselves for the first
    assert (1 if any(own) else 0) <= len(errors) <= (most if any(own) else 0), f"{len(errors)} error lines"
    assert not lost, f"{sum(lost.values())} saved files changed or gone"


def try_one(server: Server, world: Path, folder: Path, data: st.DataObject, calls: dict[str, str] = CALLS) -> None:
    """Run one command in a copy of the world, and judge it."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(world, folder, symlinks=True)
    command, wrong = data.draw(commands(calls), "command")
    if "left" in wrong:
        note(leave_behind(data, folder))
    if "file" in wrong:
        note(spoil(data, command.words, folder))
    before = saved(folder)
    ended = server.run(command, folder)
    judge(command, ended, before - contents(folder))


@pytest.mark.parametrize("count, calls", [
    (80, CALLS), pytest.param(3000, {**CALLS, **SLOW_CALLS}, marks=pytest.mark.full)], ids=["80", "3000"])
def test_whatever_is_wrong_one_line_says_it_and_nothing_saved_is_lost(server, world, tmp_path, count, calls) -> None:
    @settings(max_examples=count, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def body(data: st.DataObject) -> None:
        try_one(server, world, tmp_path / "world", data, calls)
    body()
