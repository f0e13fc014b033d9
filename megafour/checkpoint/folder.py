"""The folder of a run's checkpoints: names, the newest one, pruning, setting aside, and whether all nodes share it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import time
import uuid
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup

from megafour.checkpoint.agreement import collect, first_does, share
from megafour.checkpoint.errors import CheckpointError, listed
from megafour.config.file_system import naming, sync, sync_folder
from megafour.config.json_file import read_object

STATE, MANIFEST = "state.json", "manifest.json"
HUGGINGFACE_CONFIG = "config.json"
FORMAT = 1
"""Version of what a checkpoint's folder holds, in its manifest."""

_STEP = re.compile(r"step-(\d{8,})")


def step_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies, `step-00000100`."""
    return Path(folder) / f"step-{step:08d}"


def list_steps(folder: Path, complete: bool = True) -> list[int]:
    """Steps of the complete checkpoints, ascending by number. Interrupted and abandoned ones have other names.

    `complete=False`: with those that lack their manifest. A save gives no such folder its name, so it was damaged
    later: whoever looks for the newest whole one has to say that it was passed over.
    """
    found = []
    for path in Path(folder).iterdir() if Path(folder).is_dir() else ():
        match = _STEP.fullmatch(path.name)
        if match and ((path / MANIFEST).is_file() if complete else path.is_dir()):
            found.append(int(match[1]))
    return sorted(found)


def newest(folder: Path) -> Path | None:
    """The complete checkpoint with the highest step, or None."""
    steps = list_steps(folder)
    return step_path(folder, steps[-1]) if steps else None


def is_huggingface(path: Path) -> bool:
    """Whether a path is a Hugging Face folder: it has a config.json, and is no checkpoint of ours."""
    return (path / HUGGINGFACE_CONFIG).is_file() and not (path / MANIFEST).is_file()


def find(path: Path) -> Path:
    """The checkpoint that a user means: a checkpoint itself, or the newest complete one of a run's or of a checkpoints
    folder.

    Raises:
        CheckpointError: when there is none.
    """
    found = find_all(path)
    return next((one for one in found if (one / MANIFEST).is_file()), found[0])


def find_any(path: Path) -> list[Path]:
    """A Hugging Face folder itself, or what `find_all` finds."""
    return [Path(path)] if is_huggingface(Path(path)) else find_all(path)


def find_all(path: Path) -> list[Path]:
    """As `find`, with the older ones of a folder after it, the newest first; any of them may be damaged.

    Raises:
        CheckpointError: when there is none.
    """
    path = Path(path)
    if (path / MANIFEST).is_file():
        return [path]
    for folder in (path / "checkpoints", path):
        steps = list_steps(folder, complete=False)
        if steps:
            return [step_path(folder, step) for step in reversed(steps)]
    raise CheckpointError(f"{path} is neither a whole checkpoint nor a folder that holds one")


def read_json(path: Path) -> Any:
    """Read a JSON file of a checkpoint.

    Raises:
        CheckpointError: when it is missing or damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def read_state(path: Path) -> dict[str, Any]:
    """The JSON state that was saved with a checkpoint, `step` included.

    Raises:
        CheckpointError: when it is missing or damaged.
    """
    return read_object(Path(path) / STATE, CheckpointError)


def check_files(path: Path, sizes: dict[str, int]) -> None:
    """Check that each file is there with exactly its bytes.

    Raises:
        CheckpointError: naming each file that is missing, truncated or too long.
    """
    wrong = []
    for name, size in sorted(sizes.items()):
        try:
            found = (path / name).stat().st_size
        except FileNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        except OSError as error:
            wrong.append(f"{name} cannot be read: {error.strerror}")
            continue
        if found != size:
            wrong.append(f"{name} has {found} bytes instead of {size}")
    if wrong:
        raise CheckpointError(f"{path} is damaged: {listed(wrong)}")


def check_manifest(path: Path) -> dict[str, int]:
    """Check that every file that was saved is there with exactly its bytes.

    Returns:
        the CRC-32 that each file must have, by name; what they hold is not read here.
    Raises:
        CheckpointError: naming the files that are not.
    """
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint at {path}")
    if not (path / MANIFEST).is_file():
        raise CheckpointError(f"{path} is not a whole checkpoint: it has no {MANIFEST}")
    manifest = read_json(path / MANIFEST)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise CheckpointError(f"{path} has format {found}; this version reads format {FORMAT}")
    try:
        sizes = {str(name): int(size) for name, size in manifest["files"].items()}
        sums = {str(name): int(value, 16) for name, value in manifest["crc32"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path / MANIFEST} is damaged: {type(error).__name__}: {error}") from None
    if sizes.keys() != sums.keys():
        raise CheckpointError(f"{path / MANIFEST} is damaged: it has a size without a checksum, or the other way "
                              f"round, of {listed(sorted(sizes.keys() ^ sums.keys()))}")
    check_files(path, sizes)
    return sums


def size_of(path: Path) -> int:
    """Bytes of a checkpoint's files, by its manifest; 0 where that cannot be read."""
    try:
        return sum(read_json(Path(path) / MANIFEST)["files"].values())
    except (CheckpointError, KeyError, TypeError, AttributeError):
        return 0


def prune(folder: Path, keep: int, keep_every: int | None = None) -> list[Path]:
    """Remove checkpoints beyond the newest `keep`, except those of every `keep_every`-th step.

    The newest one whose files are all there is never removed. One process calls it.

    Returns:
        what was removed.
    """
    steps = list_steps(folder)
    kept = set(steps[-max(keep, 1):])
    kept.update(step for step in steps if keep_every and step % keep_every == 0)
    kept.update(_newest_sound(folder, steps))
    removed = []
    for step in steps:
        if step not in kept:
            remove(step_path(folder, step))
            removed.append(step_path(folder, step))
    return removed


def _newest_sound(folder: Path, steps: list[int]) -> list[int]:
    for step in reversed(steps):
        try:
            check_manifest(step_path(folder, step))
            return [step]
        except CheckpointError:
            continue
    return []


def remove(path: Path) -> None:
    """Remove a checkpoint; under another name first, so that a half-removed one is never taken for whole.

    What cannot be removed stays: that is no reason to end a run.
    """
    aside = unused(path, "removed")
    with contextlib.suppress(OSError):
        path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def tidy(folder: Path) -> None:
    """Clear what an interrupted save left, and bring back a checkpoint whose replacement was interrupted.

    Only the process that holds the run's lock may call it.
    """
    for path in sorted(Path(folder).iterdir()) if Path(folder).is_dir() else ():
        stem, ending = path.name.partition(".")[0], path.suffix.removeprefix(".")
        if not _STEP.fullmatch(stem) or ending not in ("tmp", "old", "removed"):
            continue
        if ending == "old" and not path.with_name(stem).exists():
            path.rename(path.with_name(stem))
        else:
            shutil.rmtree(path, ignore_errors=True)


def set_aside(folder: Path, after: int) -> list[Path]:
    """Rename the checkpoints of later steps to `*.abandoned`: training goes on from `after` on another path."""
    moved = []
    for step in list_steps(folder):
        if step > after:
            path = step_path(folder, step)
            moved.append(path.rename(unused(path, "abandoned")))
    if moved:
        sync_folder(folder)
    return moved


def unused(path: Path, ending: str) -> Path:
    """`path.ending`, or `path.2.ending` and so on where that exists."""
    candidate, number = path.with_name(f"{path.name}.{ending}"), 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}.{number}.{ending}")
    return candidate


def write_file(path: Path, data: str | bytes) -> None:
    """Write a whole file and sync it. An OSError names it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path), open(path, "wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)
        sync(file)


def check_shared(folder: Path, group: ProcessGroup | None, wait: float = 10.0) -> None:
    """Check that every rank sees what the first one writes in `folder`, and can write there itself.

    Args:
        wait: seconds that a file may take to appear on another node (network file systems cache listings).
    Raises:
        CheckpointError: on all ranks, naming those that do not.
    """
    folder = Path(folder)
    mark = f".shared-{uuid.uuid4().hex}"

    def begin() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            write_file(folder / mark, mark)
        except OSError:
            (folder / mark).unlink(missing_ok=True)
            raise
        return mark

    mark = first_does(begin, group, f"writing to {folder}")
    problem = _sees(folder / mark, wait)
    answers = collect((socket.gethostname(), problem), group)
    wrong = [f"rank {rank} on {host}: {why}" for rank, (host, why) in enumerate(answers or ()) if why]
    if answers is not None:
        (folder / mark).unlink(missing_ok=True)
    error = share(f"{folder} must be shared by all nodes and writable: {', '.join(wrong)}" if wrong else None, group)
    if error:
        raise CheckpointError(error)


def _sees(mark: Path, wait: float) -> str | None:
    """Why this rank cannot use the folder of the mark, or None."""
    end = time.monotonic() + wait
    while True:
        try:
            if mark.read_text(encoding="utf-8") == mark.name:
                break
        except OSError:
            pass
        if time.monotonic() > end:
            return "does not see what rank 0 wrote"
        time.sleep(0.05)
    try:
        own = mark.with_name(f"{mark.name}-{os.getpid()}")
        own.write_text("", encoding="utf-8")
        own.unlink()
    except OSError as error:
        return str(error)
    return None
