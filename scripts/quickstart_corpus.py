"""Writes the quick start's corpus: Python's own documentation as JSON lines, about 2.2 MB, with nothing to download."""

from __future__ import annotations

import argparse
import ast
import json
import os
import pydoc_data.topics
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

FOLDERS_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}
SHORTEST = 40  # characters; below that a docstring is hardly a sentence


def topics() -> Iterator[str]:
    """The language reference as `help()` shows it, a topic a document."""
    for name in sorted(pydoc_data.topics.topics):
        yield pydoc_data.topics.topics[name].strip()


def docstrings(path: Path) -> str:
    """All docstrings of one source file, as one document; its code is parsed, never run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in string literals
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return ""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return "\n\n".join(text.strip() for text in found if text and len(text) >= SHORTEST)


def documents() -> Iterator[str]:
    """Every document of the corpus, in an order that is the same on each machine with this Python."""
    yield from topics()
    library = Path(sysconfig.get_path("stdlib"))
    for folder, folders, names in os.walk(library):
        folders[:] = sorted(set(folders) - FOLDERS_LEFT_OUT)
        for name in sorted(names):
            if name.endswith(".py") and (text := docstrings(Path(folder, name))):
                yield text


def main() -> None:
    """Writes OUTPUT aside and renames it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="the .jsonl to write")
    output = parser.parse_args().output
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = output.with_name(output.name + ".tmp")
    count = size = 0
    with open(aside, "w", encoding="utf-8") as file:
        for text in documents():
            # Lone surrogates appear in some docstrings; no text file can hold them.
            text = text.encode("utf-8", errors="replace").decode("utf-8")
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            count, size = count + 1, size + len(text)
    os.replace(aside, output)
    print(f"{output}: {count} documents, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
