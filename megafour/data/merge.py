"""The shards of one corpus joined in order: the same bytes as a single `megafour prepare` would have written."""

from __future__ import annotations

import json
import os
import re
import shutil
from glob import escape, glob
from pathlib import Path
from typing import Any

import numpy as np

from megafour.config.json_file import read_object
from megafour.data.errors import DataError
from megafour.data.indexed import IndexedDataset, append_file, publish, write_index
from megafour.data.mapped import map_file
from megafour.data.prepare import finished, shard_prefix

TALLIED = ("documents", "tokens", "empty_documents", "bad_records")


def merge(output: str, overwrite: bool = False) -> dict[str, Any]:
    """Joins OUTPUT.shard-*; returns the content of OUTPUT.json. The shards stay.

    Raises DataError for missing shards, shards of several divisions, or shards made from different inputs, options or
    tokenizers.
    """
    prefixes = find_shards(output)
    described = [_described(prefix) for prefix in prefixes]
    for prefix, description in zip(prefixes, described, strict=True):
        if (description["made_from"], description["tokenizer"]) != (
            described[0]["made_from"],
            described[0]["tokenizer"],
        ):
            raise DataError(f"{prefix} was made from other inputs, options or tokenizer than {prefixes[0]}")
    if done := finished(output, described[0]["made_from"], overwrite):
        return done
    total = {**described[0], **{key: sum(description[key] for description in described) for key in TALLIED}}
    if total["documents"] == 0:
        raise DataError(f"{output}: no document with any text in its {len(prefixes)} shards")
    shards = [IndexedDataset(prefix) for prefix in prefixes]
    folder = Path(output + ".merging")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with open(folder / "tokens.bin", "wb") as tokens, open(folder / "lengths.i32", "wb") as lengths:
        for shard in shards:
            append_file(shard.bin_path, tokens)
            lengths.write(np.ascontiguousarray(shard.lengths).tobytes())
    write_index(folder / "index", map_file(folder / "lengths.i32", np.dtype("<i4")), shards[0].dtype)
    (folder / "description").write_text(json.dumps(total, indent=2) + "\n", encoding="utf-8")
    Path(output + ".idx").unlink(missing_ok=True)
    publish(folder / "tokens.bin", output + ".bin")
    publish(folder / "description", output + ".json")
    publish(folder / "index", output + ".idx")
    shutil.rmtree(folder, ignore_errors=True)
    return total


def _described(prefix: str) -> dict[str, Any]:
    path = Path(prefix + ".json")
    description = read_object(path, DataError)
    if missing := sorted({"made_from", "tokenizer", *TALLIED} - description.keys()):
        raise DataError(f"{path} does not say {', '.join(missing)}; make the shard again")
    return description


def find_shards(output: str) -> list[str]:
    """Prefixes of all shards of `output`, in order."""
    found = [re.fullmatch(r".*\.shard-(\d+)-of-(\d+)\.idx", path) for path in glob(escape(output) + ".shard-*.idx")]
    divisions = {int(match[2]) for match in found if match}
    if len(divisions) != 1:
        many = f"shards of several divisions: {sorted(divisions)}; remove those of the wrong one"
        raise DataError(f"{output}: {many if divisions else 'no shards found; make them with --shard I/N'}")
    shards = divisions.pop()
    prefixes = [shard_prefix(output, shard, shards) for shard in range(shards)]
    missing = [shard for shard, prefix in enumerate(prefixes) if not os.path.exists(prefix + ".idx")]
    if missing:
        raise DataError(f"{output}: of {shards} shards these are not finished: {', '.join(map(str, missing))}")
    return prefixes
