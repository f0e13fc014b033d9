"""Consoles and arguments as real machines have them: no encoding, no full disk and no lost reader ends a run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megafour.cli import main as cli
from tests.training import settings, write_corpus

ROOT = Path(__file__).resolve().parent.parent
LOCALES = {"ascii": {"PYTHONIOENCODING": "ascii"}, "latin-1": {"PYTHONIOENCODING": "latin-1"},
           "C": {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}}


def python(*words: str, env: dict[str, str] | None = None, **how) -> subprocess.CompletedProcess:
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how}
    return subprocess.run([sys.executable, *words], env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
                          cwd=ROOT, timeout=300, **how)


SHOWS = "from megafour.console import open_console; open_console(tolerant=False); print('zigzag · ü'); "


@pytest.mark.parametrize(("env", "shown"), [
    (LOCALES["ascii"], b"zigzag ? ?\n"), (LOCALES["latin-1"], b"zigzag \xb7 \xfc\n"),
    ({"PYTHONIOENCODING": "utf-8:strict"}, "zigzag · ü\n".encode())])
@pytest.mark.parametrize("unbuffered", [[], ["-u"]])
def test_what_a_console_cannot_show_is_replaced(env, shown, unbuffered):
    done = python(*unbuffered, "-c", SHOWS + r"import sys; print('\udcff →', file=sys.stderr)", env=env)
    assert (done.returncode, done.stdout) == (0, shown) and done.stderr.startswith(b"? ")


@pytest.mark.parametrize("locale", LOCALES)
def test_a_verb_draws_on_any_console(locale):
    done = python("-m", "megafour", "prepare", "--help", env=LOCALES[locale])
    assert done.returncode == 0 and b"PREFIX.bin" in done.stdout and done.stderr == b""


def test_names_are_utf_8_whatever_the_locale(tmp_path):
    """The file system's encoding would be ASCII there, and a name from a UTF-8 config could not be opened."""
    (tmp_path / "ü.yaml").write_text("run: {name: ö}\ntrain: {stepz: 1}\n", encoding="utf-8")
    done = python("-m", "megafour", "verify", "--config", str(tmp_path / "ü.yaml"), env=LOCALES["C"])
    assert done.returncode == 2 and done.stderr.decode().startswith(f"error: {tmp_path}/ü.yaml:2: train.stepz")


WRITES = "import sys; from megafour.console import open_console; open_console(tolerant=True); " \
         "[print('·' * 999, flush=True) for _ in range(999)]; print('·' * 99999); print('ö' * 9999, file=sys.stderr)"


@pytest.mark.parametrize("unbuffered", [[], ["-u"]])
def test_output_that_cannot_be_written_is_dropped(unbuffered):
    with open("/dev/full", "wb") as full:
        assert python(*unbuffered, "-c", WRITES, stdout=full, stderr=full).returncode == 0
    command = f"{sys.executable} {' '.join(unbuffered)} -c \"$0\""
    for end in (">&- 2>&-", ">&- 2>&- <&-", "| head -c 1"):
        how = {"env": {**os.environ, "PYTHONPATH": str(ROOT)}, "capture_output": True, "timeout": 300}
        done = subprocess.run(["bash", "-o", "pipefail", "-c", f"{command} {end}", WRITES], **how)
        assert done.returncode == 0, end


def test_a_file_does_not_take_the_number_of_a_closed_console(tmp_path):
    """What a library prints would go into it."""
    code = "from megafour.console import open_console; open_console(tolerant=True); import os, sys; " \
           "file = open(sys.argv[1], 'w'); os.write(1, b'printed'); sys.exit(file.fileno() < 3)"
    done = subprocess.run(["bash", "-c", f"{sys.executable} -c \"$0\" \"$1\" <&- >&- 2>&-", code, str(tmp_path / "x")],
                          env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300)
    assert done.returncode == 0 and (tmp_path / "x").read_bytes() == b""


def test_a_verb_whose_result_is_lost_says_so():
    """Its output is what it was called for; one whose reader has seen enough has done its work."""
    with open("/dev/full", "wb") as full:
        done = python("-m", "megafour", "schedule", "--name", "1f1b", stdout=full)
    assert (done.returncode, done.stderr) == (1, b"error: standard output cannot be written: No space left on device\n")
    read, write = os.pipe()
    os.close(read)
    done = python("-m", "megafour", "schedule", "--name", "1f1b", stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("verb", cli.verbs())
def test_an_argument_that_is_not_text_is_one_line_and_exit_2(verb, capfd):
    with pytest.raises(SystemExit) as ended:
        cli.main([verb, os.fsdecode(b"--\xff\xfe")])
    err = capfd.readouterr().err
    assert ended.value.code == 2 and err.startswith(r"error: argument 2, --\xff\xfe, is not UTF-8 text")
    assert err.count("\n") == 1


@pytest.mark.parametrize(("env", "end"), [(LOCALES["ascii"], ">/dev/full 2>/dev/full"), (LOCALES["C"], ">&- 2>&-"),
                                          ({}, "2>&1 | head -c 1")], ids=["full", "closed", "left"])
def test_training_goes_on_without_a_console(tmp_path, env, end):
    folder = tmp_path / "ü"
    folder.mkdir()
    write_corpus(folder / "corpus")
    values = settings(folder, {}, run={"name": "größe · 1"}, train={"steps": 2})
    (folder / "run.yaml").write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
    done = subprocess.run(["bash", "-o", "pipefail", "-c", f"{sys.executable} train.py --config \"$0\" {end}",
                           str(folder / "run.yaml")], cwd=ROOT, env={**os.environ, **env}, timeout=300)
    assert done.returncode == 0
    assert json.loads((folder / "run" / "status.json").read_text(encoding="utf-8"))["state"] == "finished"
    assert "größe · 1" in (folder / "run" / "logs" / "rank-0.log").read_text(encoding="utf-8")
    assert len((folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 2
