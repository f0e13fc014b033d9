"""Ranks that stand still, in a process of its own: how and when the others end, and what they say.

    python -m tests.hang_drill SCENARIOS

SCENARIOS: JSON, a list of `{folder, world, values, victim, how}`. `values` is the run's config; `how` says what
becomes of the rank `victim`: `stopped` (SIGSTOP once three steps are done), `saving` (SIGSTOP while it writes the only
checkpoint in the background), `busy` (it sleeps in step 4, where data are read). Prints a list with an answer for each.
Ranks are forked as those of the kill drill are.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from unittest import mock

from megafour.verify.pool import PRELOAD
from tests.kill_drill import fork_ranks

PATIENCE = 120.0


def _there(run: Path, victim: int, how: str) -> bool:
    """Whether the moment has come."""
    if how == "saving":
        return any((run / "checkpoints").glob(f"*.tmp/__{victim}_*.distcp"))
    path = run / "metrics.jsonl"
    return path.exists() and len(path.read_text().splitlines()) >= 3


def _start(folder: Path, world: int, values: dict, victim: int, how: str) -> list[int]:
    from megafour.checkpoint.checksum import SummedFiles
    from megafour.trainer.loop import Run

    create, on_device = SummedFiles.create_stream, Run._on_device

    def slow(self, path, mode):
        from contextlib import contextmanager

        @contextmanager
        def stream():
            with create(self, path, mode) as file:
                time.sleep(0.5 if how == "saving" and "w" in mode else 0.0)
                yield file
        return stream()

    def busy(self, batches):
        if how == "busy" and self.state.mesh.rank == victim and self.progress.step == 3:
            time.sleep(1000)
        return on_device(self, batches)

    with mock.patch.object(SummedFiles, "create_stream", slow), mock.patch.object(Run, "_on_device", busy):
        return fork_ranks(world, values, folder / "store")


def drill(folder: Path, world: int, values: dict, victim: int, how: str) -> dict:
    """Start the ranks, stop the victim, and wait for the others to end by themselves."""
    run, begun = Path(values["run"]["dir"]), time.monotonic()
    pids = _start(folder, world, values, victim, how)
    try:
        while not _there(run, victim, how):
            assert time.monotonic() < begun + 2 * PATIENCE, (folder / "output").read_text()[-3000:]
            time.sleep(0.005)
        if how != "busy":
            os.kill(pids[victim], signal.SIGSTOP)
        stopped, codes = time.monotonic(), {}
        while len(codes) < world - (how != "busy"):
            assert time.monotonic() < stopped + PATIENCE, "the ranks do not end"
            for rank, pid in enumerate(pids):
                if rank not in codes and (how == "busy" or rank != victim):
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        codes[rank] = os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        seconds = time.monotonic() - stopped
    finally:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                continue
    return {"codes": sorted(codes.values()), "seconds": seconds, "output": (folder / "output").read_text()}


if __name__ == "__main__":
    for module in (*PRELOAD, "tests.training"):
        importlib.import_module(module)
    print(json.dumps([drill(**{**one, "folder": Path(one["folder"])}) for one in json.loads(sys.argv[1])]))
