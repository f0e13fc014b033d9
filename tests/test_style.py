"""The house rules that a tool can check: ruff, mypy, one-sentence module docstrings, files of one room."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 400
SOURCES = sorted(p for folder in ("megafour", "tests", "scripts") for p in (ROOT / folder).rglob("*.py")
                 if p.name != "plain_llama.py")


def test_ruff():
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_mypy():
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_is_one_room(path):
    text = path.read_text()
    assert len(text.splitlines()) < LONGEST, f"{path.name} has {len(text.splitlines())} lines: split it by idea"
    assert ast.get_docstring(ast.parse(text)), f"{path.name} has no docstring that says what lives there"


def test_no_module_level_state():
    """Nothing is rebound by `global`: meshes and models are values, and two of them can live in one process."""
    for path in SOURCES:
        if "megafour" in path.relative_to(ROOT).parts[:1]:
            found = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Global)]
            assert not found, f"{path.relative_to(ROOT)}:{found[0].lineno} rebinds a global"


MODES = set("rwaxbt+")


def _text_without_encoding(tree: ast.AST) -> list[int]:
    """Lines that open, read or write a text file in the encoding of whoever runs them."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or any(word.arg == "encoding" for word in node.keywords):
            continue
        given = [argument.value for argument in (*node.args, *(word.value for word in node.keywords))
                 if isinstance(argument, ast.Constant) and isinstance(argument.value, str)]
        modes = [text for text in given if text and set(text) <= MODES]
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("read_text", "write_text"):
            wrong = len(node.args) < (1 if name == "read_text" else 2)
        elif isinstance(node.func, ast.Attribute):      # a path's `open`; other classes' take no mode
            wrong = name in ("open", "fdopen") and (bool(modes) or not node.args) and "b" not in "".join(modes)
        else:
            wrong = name == "open" and "b" not in "".join(modes)
        if wrong:
            found.append(node.lineno)
    return found


@pytest.mark.parametrize("code", ["open('a')", "open('a', 'w')", "p.open()", "p.open('w')", "p.read_text()",
                                  "p.write_text(x)", "os.fdopen(3, 'w')", "open('a', mode='x')"])
def test_text_files_without_an_encoding_are_found(code):
    assert _text_without_encoding(ast.parse(code)) == [1]


def test_every_text_file_names_its_encoding():
    """A locale's own would end a run at the first character that it lacks."""
    for path in [ROOT / "train.py", *SOURCES]:
        if path.relative_to(ROOT).parts[0] in ("megafour", "scripts", "train.py"):
            found = _text_without_encoding(ast.parse(path.read_text("utf-8")))
            assert not found, f"{path.relative_to(ROOT)}:{found[0]} names no encoding"
