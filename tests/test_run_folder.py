"""A run's folder: lock, resume rules, what is set aside, status, signals, metrics and logs."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest
import torch.distributed as dist

from megafour.checkpoint import folder as checkpoints
from megafour.checkpoint.errors import CheckpointError
from megafour.config.schema import Config
from megafour.trainer.lock import RunLock
from megafour.trainer.logs import RankLog
from megafour.trainer.run_folder import newest_whole, open_run_folder, read_status, resume_points, write_status
from megafour.trainer.signals import StopRequest
from tests import training


def config(path: Path, resume: int | str = "auto", **values) -> Config:
    return Config().replace({"run.dir": str(path), "checkpoint.resume": resume, "logging.tensorboard": False,
                             **{k.replace("__", "."): v for k, v in values.items()}})


def fake(path: Path, *steps: int) -> None:
    for step in steps:
        where = checkpoints.step_path(path, step)
        where.mkdir(parents=True)
        (where / "data").write_text("1234")
        (where / "manifest.json").write_text(json.dumps(
            {"format": 1, "files": {"data": 4}, "crc32": {"data": f"{zlib.crc32(b'1234'):08x}"}}))


def write_metrics(path: Path, *steps: int) -> None:
    with open(path / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps({"step": step}) + "\n" for step in steps)


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


# --- lock ---------------------------------------------------------------------------------------------------------


def test_a_live_lock_refuses_a_second_run_and_names_the_first(tmp_path):
    held = RunLock(tmp_path / "lock").acquire()
    with pytest.raises(CheckpointError, match=f"in use by another run: host .*, pid {os.getpid()}"):
        RunLock(tmp_path / "lock").acquire()
    held.release()
    RunLock(tmp_path / "lock").acquire().release()
    assert not list(tmp_path.iterdir())


def test_the_lock_of_a_killed_process_is_taken_over_at_once(tmp_path):
    code = "import sys; from megafour.trainer.lock import RunLock; from pathlib import Path; " \
           "RunLock(Path(sys.argv[1])).acquire(); print('held', flush=True); import time; time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "lock")], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"held\n"
    with pytest.raises(CheckpointError, match=f"pid {child.pid}"):
        RunLock(tmp_path / "lock").acquire()
    child.kill()
    child.wait()
    started = time.monotonic()
    RunLock(tmp_path / "lock").acquire().release()
    assert time.monotonic() - started < 30    # a heartbeat would be waited for much longer


def test_a_lock_of_another_machine_is_judged_by_its_heartbeat(tmp_path):
    first = RunLock(tmp_path / "lock", beat=0.05).acquire()
    second = RunLock(tmp_path / "lock", stale=60, beat=0.05)
    second.machine = "elsewhere"
    with pytest.raises(CheckpointError, match="in use"):
        second.acquire()
    first._end.set()        # its machine has died
    first._thread.join()
    second.stale = 0.5
    second.acquire()
    first._end.clear()
    first._keep_beating()   # it wakes up, and sees that the folder is no longer its own
    assert first.lost
    first.release()
    assert (tmp_path / "lock").exists()
    second.release()


def test_who_held_two_locks_and_is_dead_is_watched_once(tmp_path):
    folders = [tmp_path / "run", tmp_path / "saved"]
    for folder in folders:
        folder.mkdir()
    first = RunLock(folders[0] / "lock").acquire()
    beside = RunLock(folders[1] / "lock", beside=first).acquire()
    for lock in (first, beside):
        lock._end.set()
        lock._thread.join()
    second = RunLock(folders[0] / "lock", stale=0.2)
    second.machine = "elsewhere"
    second.acquire()
    other = RunLock(folders[1] / "lock", stale=1e6, beside=second)
    other.machine = "elsewhere"
    other.acquire().release()
    second.release()


def test_a_run_that_saves_where_another_one_does_is_refused(tmp_path):
    """With a folder of its own: it would set the other's checkpoints aside and clear what it is writing."""
    first = open_run_folder(config(tmp_path / "a"), None)
    fake(first.checkpoints, 2)
    (first.checkpoints / "step-00000004.tmp").mkdir()
    shared = config(tmp_path / "b", checkpoint__dir=str(first.checkpoints))
    with pytest.raises(CheckpointError, match="a/checkpoints is in use by another run: .* another checkpoint.dir"):
        open_run_folder(shared, None)
    assert (first.checkpoints / "step-00000004.tmp").is_dir() and not (tmp_path / "b" / "lock").exists()
    first.close()
    second = open_run_folder(shared, None)
    assert second.resume_from == first.checkpoints / "step-00000002"
    second.close()
    assert not list(tmp_path.rglob("lock*"))


@pytest.mark.parametrize("text", ["[]", "null", '{"step": "x"}', '{"step": 1e999}', '{"state": "running"}', "\0\0"])
def test_what_a_crash_left_of_the_small_files_ends_no_start(tmp_path, text):
    run = open_run_folder(config(tmp_path), None)
    run.close()
    (tmp_path / "status.json").write_text(text)
    (tmp_path / "config.yaml").write_bytes(b"\xff" + text.encode())
    write_metrics(tmp_path, 1, 2)
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b"\xff\n" + text.encode() + b"\n")
    assert read_status(tmp_path) == {}
    run = open_run_folder(config(tmp_path), None)
    run.begin(1, config(tmp_path))
    assert steps_in(tmp_path / "metrics.jsonl") == [1] and read_status(tmp_path)["state"] == "running"
    run.close()


def test_a_damaged_lock_is_taken_over(tmp_path):
    (tmp_path / "lock").write_text("{")
    RunLock(tmp_path / "lock", stale=0.2).acquire().release()


# --- resume -------------------------------------------------------------------------------------------------------


def resume_point(folder: Path, resume: int | str) -> Path | None:
    return newest_whole(resume_points(folder, resume), None)[0]


def test_resume_rules(tmp_path):
    assert resume_point(tmp_path, "auto") is None and resume_point(tmp_path, "never") is None
    fake(tmp_path, 5, 10)
    (tmp_path / "step-00000020.tmp").mkdir()
    assert resume_point(tmp_path, "auto").name == "step-00000010"
    assert resume_point(tmp_path, 5).name == resume_point(tmp_path, "5").name == "step-00000005"
    assert resume_point(tmp_path, str(tmp_path / "step-00000005")).name == "step-00000005"
    assert resume_point(tmp_path, str(tmp_path)).name == "step-00000010"
    with pytest.raises(CheckpointError, match=r"resume=never, but .* \(steps 5, 10\)"):
        resume_point(tmp_path, "never")
    with pytest.raises(CheckpointError, match="resume=7: .* no whole checkpoint of that step, but steps 5, 10"):
        resume_point(tmp_path, 7)
    with pytest.raises(CheckpointError, match="resume=.*nowhere: "):
        resume_point(tmp_path, str(tmp_path / "nowhere"))


def test_resuming_an_older_step_sets_later_things_aside_once_it_has_begun(tmp_path):
    fake(tmp_path / "checkpoints", 2, 4, 6)
    write_metrics(tmp_path, *range(1, 8))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 8, "lo')       # a crash in the middle of a line
    run = open_run_folder(config(tmp_path, 4), None)
    assert run.resume_from.name == "step-00000004"
    assert checkpoints.list_steps(run.checkpoints) == [2, 4, 6]      # nothing is moved before the load has succeeded
    run.begin(4, config(tmp_path, 4))
    assert sorted(p.name for p in run.checkpoints.glob("step-*")) == [
        "step-00000002", "step-00000004", "step-00000006.abandoned"]
    assert steps_in(tmp_path / "metrics.jsonl") == [1, 2, 3, 4]
    assert steps_in(tmp_path / "metrics.jsonl.abandoned") == [5, 6, 7]
    assert read_status(tmp_path)["state"] == "running"
    run.close()


def test_a_run_that_died_before_its_first_checkpoint_starts_again_with_clean_metrics(tmp_path):
    write_metrics(tmp_path, 1, 2)
    for _ in range(2):
        run = open_run_folder(config(tmp_path), None)
        assert run.resume_from is None
        run.begin(0, config(tmp_path))
        run.close()
        assert steps_in(tmp_path / "metrics.jsonl") == []
        write_metrics(tmp_path, 1)
    assert steps_in(tmp_path / "metrics.jsonl.abandoned") == [1, 2]
    assert steps_in(tmp_path / "metrics.jsonl.2.abandoned") == [1]


def test_config_is_written_and_earlier_ones_stay(tmp_path):
    for lr in (1e-3, 1e-3, 2e-3, 3e-3):
        made = config(tmp_path, optimizer__lr=lr)
        run = open_run_folder(made, None)
        run.begin(0, made)
        run.close()
    assert sorted(p.name for p in tmp_path.glob("config*")) == ["config-1.yaml", "config-2.yaml", "config.yaml"]
    assert "0.001" in (tmp_path / "config-1.yaml").read_text() and "0.003" in (tmp_path / "config.yaml").read_text()


def test_status_speaks_of_this_run_from_the_moment_it_holds_the_folder(tmp_path):
    """A run that ends before its first step must not leave the `preempted` of the one before."""
    fake(tmp_path / "checkpoints", 5)
    for resume, end in (("auto", lambda run: run.fail(0, "the checkpoint does not fit")), ("never", None)):
        write_status(tmp_path, "preempted", 5, "SIGTERM")
        try:
            run = open_run_folder(config(tmp_path, resume), None)
            assert read_status(tmp_path)["state"] == "running"
            end(run)
            run.close()
        except CheckpointError:
            pass
        status = read_status(tmp_path)
        assert status["state"] == "failed" and ("does not fit" in status["reason"] or "never" in status["reason"])
    write_status(tmp_path, "preempted", 5, "SIGTERM")
    held = RunLock(tmp_path / "lock").acquire()
    with pytest.raises(CheckpointError, match="in use"):
        open_run_folder(config(tmp_path, "auto"), None)
    assert read_status(tmp_path)["state"] == "preempted"      # the folder is another run's
    held.release()


@pytest.mark.parametrize("full", ["checkpoints", ".shared-", "elsewhere"])
def test_a_start_that_meets_a_full_disk_is_not_what_the_run_before_it_was(tmp_path, monkeypatch, full):
    """Once it holds the folder: whichever of the two folders takes nothing more."""
    write_status(tmp_path, "finished", 5)
    real = checkpoints.write_file

    def write_file(path, data):
        if full in str(path.relative_to(tmp_path)):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, data)

    monkeypatch.setattr(checkpoints, "write_file", write_file)
    values = {"checkpoint__dir": str(tmp_path / "elsewhere")} if full == "elsewhere" else {}
    with pytest.raises(CheckpointError, match="No space left on device"):
        open_run_folder(config(tmp_path, **values), None)
    status = read_status(tmp_path)
    assert status["state"] == "failed" and status["step"] == 5 and "No space left" in status["reason"]
    assert not list(tmp_path.rglob("lock*"))


def test_a_log_that_cannot_be_opened_is_a_failure_in_one_line(pool, tmp_path):
    training.write_corpus(tmp_path / "corpus")
    (tmp_path / "run" / "logs" / "rank-0.log").mkdir(parents=True)
    assert pool.run(training.train, 1, training.settings(tmp_path, {})) == [1]
    status = read_status(tmp_path / "run")
    assert status["state"] == "failed" and "rank 0: its log cannot be opened: " in status["reason"]
    assert not (tmp_path / "run" / "lock").exists()


def test_status_says_how_a_run_ended_and_the_first_failure_stays(tmp_path):
    run = open_run_folder(config(tmp_path), None)
    run.begin(0, config(tmp_path))
    run.fail(3, "rank 1 (tp1): KeyError: 'a'")
    run.fail(3, "rank 0 (tp0): connection reset")
    status = read_status(tmp_path)
    assert (status["state"], status["step"], status["reason"]) == ("failed", 3, "rank 1 (tp1): KeyError: 'a'")
    run.close()
    with pytest.raises(ValueError):
        write_status(tmp_path, "done", 1)


def open_as_rank(rank, world, path, resume):
    """Open a folder on every rank; its resume point and whether this rank holds the lock, or the error."""
    try:
        run = open_run_folder(config(Path(path), resume), dist.group.WORLD)
    except CheckpointError as error:
        return str(error)
    run.begin(5, config(Path(path), resume))
    run.status("preempted", 5, "SIGTERM")
    result = str(run.resume_from), bool(run.locks)
    dist.barrier()
    run.close()
    return result


def test_all_ranks_open_a_folder_alike(pool, tmp_path):
    fake(tmp_path / "checkpoints", 5, 10)
    (tmp_path / "stop").touch()
    point = str(tmp_path / "checkpoints" / "step-00000005")
    assert pool.run(open_as_rank, 2, str(tmp_path), 5) == [(point, True), (point, False)]
    assert read_status(tmp_path)["state"] == "preempted" and not (tmp_path / "stop").exists()
    refused = pool.run(open_as_rank, 2, str(tmp_path), "never")
    assert "resume=never" in refused[0] and refused[0] == refused[1]
    held = RunLock(tmp_path / "lock").acquire()
    refused = pool.run(open_as_rank, 2, str(tmp_path), "auto")
    assert f"pid {os.getpid()}" in refused[0] and refused[0] == refused[1]
    held.release()


# --- signals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_sets_a_flag_and_the_former_handler_comes_back(number):
    former = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.asked()
        os.kill(os.getpid(), number)
        assert stop.asked() and stop.reason == number.name
    assert signal.getsignal(number) is former


def test_a_run_that_has_said_how_it_ended_ignores_signals_while_its_process_lives():
    """A process that goes on to other things restores them: its children would ignore them, too."""
    former = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    with StopRequest() as stop:
        stop.ignore()
        assert all(signal.getsignal(number) == signal.SIG_IGN for number in former)
    assert all(signal.getsignal(number) == handler for number, handler in former.items())
    with StopRequest() as stop:
        stop.restore()
        stop.ignore()       # a rank that waits for another's line is to be ended
        assert all(signal.getsignal(number) == handler for number, handler in former.items())


def test_a_stop_file_asks_too(tmp_path):
    stop = StopRequest(tmp_path / "stop", look_every=0)
    assert not stop.asked()
    (tmp_path / "stop").touch()
    assert stop.asked() and "stop" in stop.reason


def test_torchruns_death_asks_too(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert StopRequest.torchrun() is None           # a shell that started a run in the background may exit
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    stop = StopRequest(launcher=StopRequest.torchrun())
    assert not stop.asked()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert stop.asked() and stop.reason.startswith("the death of torchrun")


class Full:
    """A disk or a pipe that takes nothing more."""

    closed = False

    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    flush = close = lambda self: self.write("")

    def isatty(self):
        return False


def test_a_line_that_cannot_be_written_ends_no_run(tmp_path):
    log = RankLog(tmp_path, 0, stream=Full())
    log._file = Full()
    log.say("step 1")
    log.close()


def test_a_console_whose_reader_has_gone_ends_no_run(tmp_path):
    code = ("from pathlib import Path\nfrom megafour.trainer.logs import RankLog\n"
            f"log = RankLog(Path({str(tmp_path)!r}), 0)\n"
            "for i in range(9999): log.say('a line of a run that goes on')\n")
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    run.stdout.close()
    assert run.stderr.read() == b"" and run.wait() == 0
    assert len((tmp_path / "rank-0.log").read_text().splitlines()) == 9999


def test_a_status_that_cannot_be_written_does_not_hide_the_failure(tmp_path, monkeypatch):
    run = open_run_folder(config(tmp_path), None)

    def full(path, data):
        path.write_text("cut")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints, "write_file", full)
    before = sorted(p.name for p in tmp_path.iterdir())
    run.fail(3, "saving failed")
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    with pytest.raises(CheckpointError, match="No space left"):
        checkpoints.check_shared(tmp_path, None)
    run.close()
