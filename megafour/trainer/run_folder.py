"""The folder of a run: config, status, lock, where to resume from, and what a resumed run sets aside."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from torch.distributed import ProcessGroup

from megafour.checkpoint import folder as checkpoints
from megafour.checkpoint.agreement import first_does, rank_in
from megafour.checkpoint.errors import CheckpointError
from megafour.config.errors import ConfigError
from megafour.config.load import to_yaml
from megafour.config.schema import Config
from megafour.data.dataset import Datasets
from megafour.trainer.changes import check_changes
from megafour.trainer.lock import RunLock
from megafour.trainer.peers import started

T = TypeVar("T")
STOP_FILE = "stop"
STATES = ("running", "finished", "preempted", "failed")


@dataclass
class RunFolder:
    """An open run's folder on one rank; the first rank of the group holds its lock and writes in it."""

    path: Path
    checkpoints: Path
    resume_from: Path | None
    """The checkpoint that the run goes on from; None: it starts at step 0."""
    locks: list[RunLock]
    """Held by the first rank: of the folder, and of that with the checkpoints. None on the others."""
    group: ProcessGroup | None
    stopped: str | None = None
    """Why this start must not train: torchrun has started it again after the run had been stopped; None otherwise."""
    notes: list[str] = field(default_factory=list)
    """Lines that the log should have: checkpoints that were skipped because they are damaged."""
    step: int = 0
    """The step in status.json when the folder was opened: that of the run before."""

    @property
    def logs(self) -> Path:
        """Folder of the ranks' logs."""
        return self.path / "logs"

    @property
    def stop_file(self) -> Path:
        """`touch` it to end the run after its step, saved."""
        return self.path / STOP_FILE

    def changes(self, config: Config, datasets: Datasets, allowed: Collection[str]) -> list[str]:
        """Lines on the settings that differ from those of the checkpoint that the run goes on from.

        Raises:
            ConfigError: on all ranks alike, for one that changes what the run means and is not among `allowed`.
        """
        if self.resume_from is None:
            return []
        path = self.resume_from

        def compare() -> tuple[list[str], str | None]:
            try:
                return check_changes(path, config, datasets, allowed), None
            except ConfigError as error:
                return [], str(error)

        lines, refusal = self._first(compare, f"comparing settings with {path}")
        if refusal is not None:
            raise ConfigError(refusal)
        return lines

    def begin(self, step: int, config: Config) -> None:
        """Training starts from `step`: set aside what later steps left, write config.yaml and status.json.

        Every rank calls it together, after the checkpoint was loaded: one that does not fit this model then costs no
        checkpoint, no metrics and no config their place.
        """
        def work() -> None:
            checkpoints.set_aside(self.checkpoints, step)
            set_metrics_aside(self.path / "metrics.jsonl", step)
            write_config(self.path, to_yaml(config))
            write_status(self.path, "running", step)

        self._first(work, f"preparing {self.path}")

    def status(self, state: str, step: int, reason: str | None = None) -> None:
        """Say in status.json where the run stands. Only the first rank writes."""
        if rank_in(self.group) == 0:
            write_status(self.path, state, step, reason)

    def fail(self, step: int, reason: str) -> bool:
        """Any rank that fails says why; the first reason stays, since later ones follow from it.

        A status that cannot be written (a full disk) must not take the place of the failure itself. A start that fails
        before its first step, `step` 0, leaves the step of the run before.

        Returns:
            whether this is the first failure.
        """
        first = read_status(self.path).get("state") == "running"
        if first:
            with contextlib.suppress(OSError):
                write_status(self.path, "failed", step or self.step, reason)
        return first

    def close(self) -> None:
        """Give the locks back. The stop file has been answered and goes too."""
        if self.locks and not self.locks[0].lost and read_status(self.path).get("state") != "running":
            with contextlib.suppress(OSError):
                self.stop_file.unlink(missing_ok=True)
        while self.locks:
            self.locks.pop().release()

    def _first(self, work: Callable[[], T], what: str) -> T:
        return first_does(work, self.group, what)


def open_run_folder(config: Config, group: ProcessGroup | None) -> RunFolder:
    """Lock the run's folder and find where to resume from. Every rank calls it together.

    Once it holds the folder's lock status.json speaks of this run: one that ends before its first step (a full disk, a
    folder that a node does not see) must not leave the `preempted` of the run before it, which would have it queued
    again for ever. A start that is refused before leaves it as it was.

    Args:
        config: resolved; run.dir, checkpoint.dir and checkpoint.resume count.
        group: all ranks; None: this process alone.
    Raises:
        CheckpointError: on all ranks alike: a live run holds the folder, a node does not see it, or there is no
        checkpoint as checkpoint.resume asks for.
    """
    path, saved = Path(config.run_dir), Path(config.checkpoint_dir)
    locks: list[RunLock] = []

    def take() -> str | None:
        (path / "logs").mkdir(parents=True, exist_ok=True)
        locks.append(RunLock(path / "lock").acquire())
        stopped = stopped_before(read_status(path))
        if stopped is None:
            write_status(path, "running", _step_of(path))
        return stopped

    def look() -> list[Path]:
        if saved.resolve() != path.resolve():   # a run with another run.dir may save there, and tidy what this writes
            locks.append(RunLock(saved / "lock", key="checkpoint.dir", beside=locks[0]).acquire())
        checkpoints.tidy(saved)
        return resume_points(saved, config.checkpoint.resume)

    try:
        stopped = first_does(take, group, f"opening {path}")
        if stopped is not None:
            return RunFolder(path, saved, None, locks, group, stopped)
        for shared in dict.fromkeys((path, saved)):
            checkpoints.check_shared(shared, group)
        resume_from, notes = newest_whole(first_does(look, group, f"opening {saved}"), group)
    except CheckpointError as error:
        if locks:
            with contextlib.suppress(OSError):      # a full disk must not take the place of the error itself
                write_status(path, "failed", _step_of(path), str(error))
        for lock in locks:
            lock.release()
        raise
    return RunFolder(path, saved, resume_from, locks, group, notes=notes, step=_step_of(path))


def leave_preempted(path: Path, reason: str) -> None:
    """Write `preempted` for a run that was asked to stop before it could open its folder, unless another holds it."""
    with contextlib.suppress(OSError, CheckpointError):
        path.mkdir(parents=True, exist_ok=True)
        lock = RunLock(path / "lock", stale=10.0).acquire()     # torchrun ends its ranks after 30 s
        try:
            write_status(path, "preempted", _step_of(path), reason)
        finally:
            lock.release()


def _step_of(path: Path) -> int:
    """The step that status.json speaks of; 0 where it says nothing."""
    return int(read_status(path).get("step") or 0)


def stopped_before(status: dict) -> str | None:
    """Why a rank that torchrun has started again must not train; None: it may.

    Once the run was asked to stop and has said so, whatever fails afterwards (an exit hook, say) makes torchrun start
    the ranks again. That start belongs to the launch that was to stop; another launch, requeued say, goes on.
    """
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if status.get("state") != "preempted" or not again or status.get("launch") != launch_name():
        return None
    return (f"the run was stopped in this launch, after step {status['step']} by {status.get('reason')}: started again "
            f"by torchrun, it exits without training")


def launch_name() -> str | None:
    """Tells this launch from others: the torchrun that starts the ranks again; None without one."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return f"{os.environ['TORCHELASTIC_RUN_ID']} {os.getppid()} {started(os.getppid())}"


def check_resume(config: Config) -> None:
    """Refuse a checkpoint.resume that leads to no checkpoint, or that forbids one, before any process group exists.

    Raises:
        ConfigError: naming the value, and what there is.
    """
    try:
        resume_points(Path(config.checkpoint_dir), config.checkpoint.resume)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None


def resume_points(folder: Path, resume: int | str) -> list[Path]:
    """The checkpoints that `checkpoint.resume` means, the first one that is whole being the one; []: start at step 0.

    Args:
        folder: of the run's own checkpoints.
        resume: `auto` (the newest whole one, if any), `never` (refuse a folder that holds any), a step, or a path.
    Raises:
        CheckpointError: when there is no such checkpoint, or `never` finds one.
    """
    steps = checkpoints.list_steps(folder)
    if resume == "never":
        if steps:
            raise CheckpointError(
                f"checkpoint.resume=never, but {folder} holds checkpoints (steps {_listed(steps)}); give another "
                f"run.dir or run.name, or checkpoint.resume=auto to go on")
        return []
    if resume == "auto":
        steps = checkpoints.list_steps(folder, complete=False)
        return [checkpoints.step_path(folder, step) for step in reversed(steps)]
    if isinstance(resume, int) or resume.isdecimal():
        if int(resume) not in steps:
            raise CheckpointError(f"checkpoint.resume={resume}: {folder} has no whole checkpoint of that step, but "
                                  f"{f'steps {_listed(steps)}' if steps else 'none at all'}")
        return [checkpoints.step_path(folder, int(resume))]
    try:
        return checkpoints.find_all(Path(resume))
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint.resume={resume}: {error}") from None


def newest_whole(points: list[Path], group: ProcessGroup | None) -> tuple[Path | None, list[str]]:
    """The first of the checkpoints that is whole, read and summed, and a line for each one that was skipped.

    Every rank calls it together, and all get the same.

    Raises:
        CheckpointError: where there are checkpoints and none is whole: a run with checkpoints never restarts from
        step 0 by itself.
    """
    if not points:
        return None, []
    from megafour.checkpoint import whole  # no run without a checkpoint should wait for torch's import of them

    try:
        point, damaged = whole.first_whole(points, group)
    except CheckpointError as error:
        fix = ("checkpoint.resume=STEP goes on from another" if len(points) == 1 else
               "move them away, or give another run.dir, to begin at step 0")
        raise CheckpointError(f"{error}; {fix}") from None
    return point, skipped_lines(damaged)


def skipped_lines(damaged: list[str]) -> list[str]:
    """A line for each checkpoint that was passed over, by what is wrong with it, the newest first."""
    return [f"skipped{'' if index else ' the newest checkpoint'}: {text}" for index, text in enumerate(damaged)]


def _listed(steps: list[int]) -> str:
    """The newest few steps."""
    return ("…, " if len(steps) > 8 else "") + ", ".join(map(str, steps[-8:]))


def set_metrics_aside(path: Path, step: int) -> Path | None:
    """Move the lines of later steps to `metrics.jsonl.abandoned`, so that the file has each step once.

    A last line that a crash has cut short is dropped.

    Returns:
        the file with the lines that were moved, if any.
    """
    if not path.exists():
        return None
    kept: list[str] = []
    later: list[str] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            (kept if int(json.loads(line)["step"]) <= step else later).append(line + "\n")
        except (ValueError, KeyError, TypeError, OverflowError):
            continue
    aside = None
    if later:
        aside = checkpoints.unused(path, "abandoned")
        checkpoints.write_file(aside, "".join(later))
    _replace(path, "".join(kept))
    return aside


def write_config(folder: Path, text: str) -> None:
    """Write config.yaml; one that differs from it stays as `config-N.yaml`."""
    path = folder / "config.yaml"
    if path.exists():
        if path.read_bytes() == text.encode():
            return
        numbers = [int(name.removeprefix("config-")) for name in (p.stem for p in folder.glob("config-*.yaml"))
                   if name.removeprefix("config-").isdecimal()]
        path.rename(folder / f"config-{max(numbers, default=0) + 1}.yaml")
    _replace(path, text)


def write_status(folder: Path, state: str, step: int, reason: str | None = None) -> None:
    """Write status.json: `state`, `step`, `reason`, when it was written (seconds since 1970), and by which launch."""
    if state not in STATES:
        raise ValueError(f"{state} is none of {STATES}")
    _replace(folder / "status.json", json.dumps({"state": state, "step": step, "reason": reason, "time": time.time(),
                                                 "launch": launch_name()}))


def read_status(folder: Path) -> dict:
    """status.json; empty when there is none, or what is there is none of ours."""
    try:
        found = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("step"), int) else {}


def _replace(path: Path, text: str) -> None:
    """Give a file new content in one move: a reader sees the old or the new one."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        checkpoints.write_file(aside, text)
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
