"""Saving and loading: written aside, verified and renamed when whole; read onto any mesh, or refused by name."""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException

from megafour.checkpoint import metadata, tensors
from megafour.checkpoint.agreement import collect, first_does, message, rank_in, share
from megafour.checkpoint.checksum import crc32
from megafour.checkpoint.errors import CheckpointError, listed
from megafour.checkpoint.folder import (
    FORMAT,
    MANIFEST,
    STATE,
    check_files,
    check_manifest,
    check_shared,
    find,
    find_all,
    list_steps,
    newest,
    prune,
    read_state,
    remove,
    step_path,
    tidy,
    write_file,
)
from megafour.checkpoint.scratch import ScratchPlanner
from megafour.checkpoint.tensors import LogicalTensor
from megafour.config.file_system import sync_folder
from megafour.sizes import PRODUCTION, Sizes

__all__ = ["CheckpointError", "LogicalTensor", "check_shared", "check_small", "find", "find_all", "list_steps", "load",
           "newest", "prune", "read_state", "save", "step_path", "stored_tensors", "tidy", "verify"]


def save(folder: Path, step: int, held: list[LogicalTensor], state: dict[str, Any],
         extra_files: dict[str, Path | str], process_group: ProcessGroup | None,
         sizes: Sizes = PRODUCTION) -> Path:
    """Save a checkpoint. Every rank of the group calls it together; afterwards it is complete or absent.

    Args:
        folder: the folder of the run's checkpoints, shared by all ranks.
        step: its number; an existing checkpoint of that step is replaced once the new one is whole.
        held: what this rank holds. Only `primary` entries are written.
        state: JSON values, equal on all ranks; the first rank's are written, with `step`.
        extra_files: files that make it stand alone, by name: a Path is copied, a str is the file's text.
        process_group: all ranks that hold parts; None: this process alone.
    Returns:
        the checkpoint's folder.
    Raises:
        CheckpointError: on all ranks, with the same message, when it failed on any.
    """
    final = step_path(folder, step)
    aside = final.with_name(final.name + ".tmp")
    what = f"saving {final}"

    def begin() -> None:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)

    first_does(begin, process_group, what)
    try:
        entries = _all_entries(held, process_group, what)
        writer = metadata.Writer(aside)
        with _plain_errors(what):
            dcp.save(tensors.state_dict(held, primary_only=True), storage_writer=writer,
                     planner=ScratchPlanner(sizes.save_copies), process_group=process_group,
                     no_dist=process_group is None)
        sums = {name: crc for one in collect(writer.files.sums, process_group) or () for name, crc in one.items()}
        first_does(lambda: _complete(aside, final, entries, {**state, "step": step}, extra_files, sums), process_group,
                   what)
    except CheckpointError:
        if rank_in(process_group) == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise
    return final


def _complete(aside: Path, final: Path, entries: dict[str, metadata.Entry], state: dict[str, Any],
              extra_files: dict[str, Path | str], sums: dict[str, int]) -> None:
    """Add the small files, check the whole against what was to be saved, and give it its name.

    `sums`: the CRC-32 of the shards, as the ranks that wrote them took it.
    """
    write_file(aside / STATE, json.dumps(state, indent=1))
    for name, source in extra_files.items():
        write_file(aside / name, source.read_bytes() if isinstance(source, Path) else source)
    index = metadata.read_index(aside)
    check_files(aside, metadata.file_sizes(index))
    metadata.check_whole(aside, index)
    metadata.compare(aside, index, entries, ("",), cast=False)
    sizes = {str(path.relative_to(aside)): path.stat().st_size for path in sorted(aside.rglob("*")) if path.is_file()}
    crcs = {name: f"{sums[name] if name in sums else crc32(aside / name):08x}" for name in sizes}
    write_file(aside / MANIFEST, json.dumps({"format": FORMAT, "files": sizes, "crc32": crcs}, indent=1))
    for path in [aside, *(p for p in aside.rglob("*") if p.is_dir())]:
        sync_folder(path)
    old = final.with_name(final.name + ".old")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(final, old)       # `tidy` brings it back if this process dies before the next line
    os.rename(aside, final)
    sync_folder(final.parent)
    remove(old)


def verify(path: Path, process_group: ProcessGroup | None, sizes: Sizes = PRODUCTION) -> None:
    """Check that a checkpoint is whole: every file there, with its size and its checksum.

    Every rank calls it together and reads a share of the files: where the mesh is the one that wrote, the very shard
    that it loads next, which then lies in its cache.

    Raises:
        CheckpointError: on all ranks, with the same message, naming every file that is damaged.
    """
    path = Path(path)
    sums = first_does(lambda: check_manifest(path), process_group, f"checking {path}")
    rank, world = rank_in(process_group), 1 if process_group is None else dist.get_world_size(process_group)
    wrong = []
    for number, (name, wanted) in enumerate(sorted(sums.items())):
        writer = _SHARD.match(name)
        if (int(writer[1]) if writer else number) % world != rank:
            continue
        try:
            found = crc32(path / name, sizes.checksum_block)
            if found != wanted:
                wrong.append(f"{name} has the checksum {found:08x} instead of {wanted:08x}")
        except OSError as error:
            wrong.append(f"{name} cannot be read: {error.strerror}")
    everyone = collect(wrong, process_group)
    problems = sorted(text for one in everyone or () for text in one)
    damage = share(f"{path} is damaged: {listed(problems)}" if problems else None, process_group)
    if damage is not None:
        raise CheckpointError(damage)


def check_small(path: Path) -> None:
    """Check the sizes of all files, and the checksums of those that are no shards: what one process can do at once.

    Raises:
        CheckpointError: naming the files that are damaged.
    """
    wrong = []
    for name, wanted in sorted(check_manifest(path).items()):
        try:
            if not _SHARD.match(name) and crc32(path / name) != wanted:
                wrong.append(f"{name} has another checksum")
        except OSError as error:
            wrong.append(f"{name} cannot be read: {error.strerror}")
    if wrong:
        raise CheckpointError(f"{path} is damaged: {listed(wrong)}")


_SHARD = re.compile(r"__(\d+)_\d+\.distcp")
"""How torch names the shard files of a rank."""


def load(path: Path, held: list[LogicalTensor], process_group: ProcessGroup | None, *,
         only: tuple[str, ...] = ("",), cast: bool = False, verified: bool = False,
         sizes: Sizes = PRODUCTION) -> dict[str, Any]:
    """Load a checkpoint into what each rank holds, whatever mesh wrote it. Every rank calls it together.

    Names, shapes and types of all ranks' tensors are compared, and checksums verified, before anything is read into
    them, so that a refused checkpoint changes no tensor.

    Args:
        path: the checkpoint's folder.
        held: what this rank holds, replicas included; its parts are filled in place.
        process_group: all ranks that hold parts; None: this process alone.
        only: prefixes of the keys that must match, such as `("weights/",)`; other keys are not asked for.
        cast: convert a tensor that is stored in another type instead of refusing it.
        verified: `verify` has passed already; the files are not summed again.
    Returns:
        the state that was saved, `step` included.
    Raises:
        CheckpointError: on all ranks, with the same message, naming the files that are damaged or every key that is
        missing, unknown, or of another shape or type.
    """
    path = Path(path)
    what = f"loading {path}"
    entries = _all_entries(held, process_group, what)

    def check() -> tuple[metadata.Metadata, dict[str, Any]]:
        check_manifest(path)
        index = metadata.read_index(path)
        check_files(path, metadata.file_sizes(index))
        metadata.check_whole(path, index)
        metadata.compare(path, index, entries, only, cast)
        return index, read_state(path)

    index, state = first_does(check, process_group, what)
    if not verified:
        verify(path, process_group, sizes)
    with _plain_errors(what), torch.no_grad():
        dcp.load(dict(tensors.state_dict(held, primary_only=False)), storage_reader=metadata.Reader(path, index),
                 planner=dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                 process_group=process_group, no_dist=process_group is None)
    return state


def stored_tensors(path: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of every tensor in a checkpoint, by key."""
    index = metadata.read_index(Path(path))
    return {name: (tuple(entry.size), entry.properties.dtype)
            for name, entry in sorted(index.state_dict_metadata.items())
            if isinstance(entry, metadata.TensorStorageMetadata)}


def _all_entries(held: list[LogicalTensor], group: ProcessGroup | None,
                 what: str) -> dict[str, metadata.Entry]:
    """Names, shapes and types that the ranks hold together, on the first rank; empty elsewhere."""
    mine: list[metadata.Entry] = []
    problem: str | None = None
    try:
        mine = [(name, tuple(t.shape), t.dtype) for name, t in tensors.state_dict(held, primary_only=False).items()]
    except CheckpointError as error:
        problem = str(error)
    collected = collect((mine, problem), group)
    joined: dict[str, metadata.Entry] = {}

    def join() -> None:
        for rank, (_, why) in enumerate(collected or ()):
            if why:
                raise CheckpointError(f"{what} failed on rank {rank}: {why}")
        joined.update(metadata.joined_entries(entries for entries, _ in collected or ()))

    first_does(join, group, what)
    return joined


@contextmanager
def _plain_errors(what: str) -> Iterator[None]:
    """Turn what torch raises, alike on all ranks, into one line that names the first rank that failed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")     # torch warns that a single process saves alone, which is meant
            yield
    except CheckpointException as error:        # a BaseException, with (exception, traceback) for each rank that failed
        rank, (cause, _) = min(error.failures.items())
        raise CheckpointError(message(cause, what, rank)) from cause
