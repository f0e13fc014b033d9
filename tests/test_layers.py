"""Imports run downward only: the contracts of pyproject.toml hold."""

import shutil
import subprocess
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_import_layers():
    tool = shutil.which("lint-imports", path=sysconfig.get_path("scripts"))
    assert tool, "import-linter is not installed: pip install -e .[dev]"
    done = subprocess.run([tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
