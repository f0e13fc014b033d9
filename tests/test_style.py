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
