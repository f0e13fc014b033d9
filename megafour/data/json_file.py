"""Reading a JSON object from a file that a user may have damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megafour.data.errors import DataError


def read_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        DataError: naming the file, when it is missing or holds none.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise DataError(f"{path} holds no JSON object")
    return found
