"""Reading a JSON object from a file that a user may have damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_object(path: Path, error: type[Exception]) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        error: naming the file, when it is missing or holds none.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as why:
        raise error(f"{path} cannot be read as JSON: {why}") from None
    if not isinstance(found, dict):
        raise error(f"{path} holds no JSON object")
    return found
