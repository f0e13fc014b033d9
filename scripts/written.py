"""Shared by the scripts that write files of the repository: write what differs, or with --check only name it."""

import argparse
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(description: str | None, files: Callable[[], dict[Path, str]]) -> int:
    """The command line of a script that writes `files()`, each path with its text. Returns the exit code."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="exit 1 if a file is not up to date; write nothing")
    check = parser.parse_args().check
    stale = {path: text for path, text in files().items() if not path.exists() or path.read_text("utf-8") != text}
    for path, text in stale.items():
        print(f"{'not up to date' if check else 'wrote'}: {path.relative_to(ROOT)}")
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, "utf-8")
    return 1 if check and stale else 0
