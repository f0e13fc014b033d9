"""What a run tells while it goes on: metrics.jsonl, the console, trackers, the logs of ranks."""

import io
import json
import math
import threading
import time
import warnings

import pytest

from megafour.trainer.logs import RankLog
from megafour.trainer.metrics import KEYS, Metrics, clean, console_line
from megafour.trainer.trackers import Tracker, close_all
from tests.test_run_folder import config


def line(step: int, **values) -> dict:
    return {**dict.fromkeys(KEYS, 1.0), "step": step, "skipped_steps": 0, **values}


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_one_line_a_step_from_the_one_writer(tmp_path, stream):
    out = stream()
    made = config(tmp_path, train__steps=20, logging__every=7)
    for rank in (0, 1):
        log = RankLog(tmp_path / "logs", rank, stream=out)
        metrics = Metrics(tmp_path, made, log)
        for step in range(1, 21):
            metrics.write(line(step, loss=math.nan if step == 3 else 2.0))
        metrics.close()
        log.close()
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [tuple(found) for found in lines] == [KEYS] * 20 and [found["step"] for found in lines] == list(range(1, 21))
    assert lines[2]["loss"] is None and lines[3]["loss"] == 2.0
    if stream is io.StringIO:
        assert [text.split()[1] for text in out.getvalue().splitlines()] == ["1/20", "7/20", "14/20", "20/20"]
    else:
        assert "20/20" in out.getvalue() and "loss 2.0000" in out.getvalue()
    assert len((tmp_path / "logs" / "rank-0.log").read_text().splitlines()) == 20
    assert (tmp_path / "logs" / "rank-1.log").read_text() == ""


def test_the_console_line_says_it_all_and_unknown_numbers_are_dashes():
    values = clean(line(3, loss=5.01234, grad_norm=math.inf, lr=3e-4, tokens_per_second=12345.6, mfu=None,
                        peak_memory_bytes=3 << 29, skipped_steps=2, **{"valid_loss/wiki": 4.5}))
    assert console_line(values, 200, 3725) == (
        "step 3/200 | loss 5.0123 | norm – | lr 3.00e-04 | 12,346 tokens/s | MFU – | memory 1.50 GiB | ETA 1h 02m | "
        "skipped 2 | valid_loss/wiki 4.5000")
    with pytest.raises(KeyError, match="perplexity"):
        clean(line(1, perplexity=2.0))


def test_tensorboard_gets_every_finite_number(tmp_path):
    pytest.importorskip("tensorboard")
    log = RankLog(tmp_path / "logs", 0, stream=io.StringIO())
    metrics = Metrics(tmp_path, config(tmp_path, logging__tensorboard=True), log)
    for step in (1, 2):
        metrics.write(line(step, loss=math.nan if step == 1 else 2.5, **{"valid_loss/a": 3.0}))
    metrics.close()
    log.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(2, 2.5)]
    assert [e.step for e in events.Scalars("valid_loss/a")] == [1, 2]


class Sink:
    """A tracker whose call `at` raises, or hangs until it is abandoned."""

    def __init__(self, at=None, error=None):
        self.at, self.error, self.taken, self.abandoned = at, error, [], threading.Event()

    def call(self, name):
        if name == self.at:
            if self.error is not None:
                raise self.error
            assert self.abandoned.wait(60)
            raise OSError("killed")

    def begin(self):
        self.call("open")
        return "http://here"

    def log(self, step, values):
        self.call("log")
        self.taken.append(step)

    def close(self):
        self.call("close")

    def abandon(self):
        self.abandoned.set()


@pytest.mark.parametrize("at", ["open", "log", "close"])
@pytest.mark.parametrize("error", [ConnectionError("tracker is\ndown"), SystemExit("no key"), None])
def test_a_tracker_that_fails_or_hangs_is_named_once_and_ends_in_time(at, error):
    lines, sink = [], Sink(at, error)
    tracker = Tracker("wandb", sink, lines.append, capacity=5)
    for step in range(20):
        tracker.log(step, {"loss": 1.0})
    close_all([tracker], 60 if error else 0.2)
    assert sink.abandoned.wait(60)
    said = [line for line in lines if line.startswith("wandb is off: ")]
    assert said == ["wandb is off: " + (f"{type(error).__name__}: {' '.join(str(error).split())}" if error else
                                        "it did not finish within 5 s of the run's end; metrics.jsonl has every step")]


def test_a_tracker_that_hangs_while_training_goes_on_is_switched_off():
    lines, sink = [], Sink("log")
    tracker = Tracker("wandb", sink, lines.append, patience=0.05)
    end = time.monotonic() + 60
    while not sink.abandoned.is_set():
        tracker.log(1, {"loss": 1.0})
        assert time.monotonic() < end
    close_all([tracker], 60)
    assert lines == ["wandb: http://here", "wandb is off: it has not answered for 0.05 s"]


def test_trackers_that_lag_behind_lose_steps_and_never_the_end():
    lines, sink = [], Sink()
    tracker = Tracker("wandb", sink, lines.append)
    for step in range(3):
        tracker.log(step, {"loss": 1.0})
    close_all([tracker], 60)
    assert sink.taken == [0, 1, 2] and lines == ["wandb: http://here"] and not sink.abandoned.is_set()


def test_each_rank_has_a_log_and_only_the_writer_a_console(tmp_path, capsys):
    out = io.StringIO()
    logs = [RankLog(tmp_path, rank, f"rank {rank} (tp{rank})", stream=out) for rank in (0, 1)]
    for log in logs:
        log.say(f"hello from {log.path.stem}")
    logs[1].alarm("KeyError: 'a'")
    warnings.warn("old API", stacklevel=1)
    for log in logs:
        log.close()
    assert out.getvalue() == "hello from rank-0\n"
    assert "hello from rank-1" in (tmp_path / "rank-1.log").read_text()
    assert capsys.readouterr().err == "rank 1 (tp1): KeyError: 'a'\n"
