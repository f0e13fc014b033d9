"""The Dockerfiles: clean under hadolint, and with what README's commands need."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "docker").glob("Dockerfile*"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_hadolint(path):
    done = subprocess.run([Path(sys.executable).parent / "hadolint", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_the_scripts_of_readme_find_their_environment(path):
    """What they would install on a fresh machine is in the image: none of them needs a network there."""
    text = path.read_text()
    for needed in ("COPY . .", ". scripts/lib.sh", "use_environment;", "use_environment dev", "/.venv/bin:$PATH"):
        assert needed in text, f"{path.name} has no {needed}"
    for script in re.findall(r"(?:bash |--config )((?:scripts|configs)/\S+?)[\"\s]", text):
        assert (ROOT / script).exists(), script


def test_there_is_one_for_each_kind_of_machine():
    assert [p.name for p in FILES] == ["Dockerfile", "Dockerfile.cpu"]
    gpu = FILES[0].read_text()
    assert "nvcr.io/nvidia/pytorch" in gpu and "flash-attn" in gpu and "transformer-engine" in gpu
