"""The numbers of each step, from one writer: metrics.jsonl, the console line, TensorBoard and wandb."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megafour.config.file_system import naming
from megafour.config.schema import Config
from megafour.trainer.logs import RankLog
from megafour.trainer.trackers import TensorBoard, Tracker, Wandb, close_all

KEYS = ("step", "time", "loss", "grad_norm", "lr", "consumed_tokens", "consumed_samples", "tokens_per_second",
        "tokens_per_second_per_gpu", "step_seconds", "mfu", "peak_memory_bytes", "skipped_steps")
"""Keys of every line of metrics.jsonl, in order; `valid_loss/NAME` follows where a step was evaluated."""


class Metrics:
    """Takes each step's numbers on the one writer, and ignores them on every other rank."""

    def __init__(self, folder: Path, config: Config, log: RankLog, *, start_step: int = 0) -> None:
        """Open the files, for appending: what a resume makes void was set aside before.

        Args:
            folder: the run's folder.
            config: resolved; train.steps and the section logging count.
            log: the rank's log; its `console` says whether this rank is the writer.
            start_step: the step that training goes on from.
        """
        self._log = log
        self._total, self._every = int(config.train.steps or 0), config.logging.every
        self._seconds: float | None = None
        self._trackers: list[Tracker] = []
        self._file = self._bar = None
        if not log.console:
            return
        self._file = open(folder / "metrics.jsonl", "a", buffering=1, encoding="utf-8")
        self._bar = log.progress_bar(self._total, start_step)
        if config.logging.tensorboard:
            self._trackers.append(Tracker("TensorBoard", TensorBoard(folder / "tensorboard", start_step), log.say))
        project = config.logging.wandb
        if project is not None:
            sink = Wandb(project, config.run.name, folder, config.model_dump(mode="json"))
            self._trackers.append(Tracker("wandb", sink, log.say))

    def write(self, values: Mapping[str, Any]) -> None:
        """Take one step's numbers: the keys of KEYS, and `valid_loss/NAME`. What is not finite becomes null."""
        if self._file is None:
            return
        line = clean(values)
        with naming(self._file.name):
            self._file.write(json.dumps(line) + "\n")
        for tracker in self._trackers:
            tracker.log(line["step"], {k: v for k, v in line.items() if k not in ("step", "time") and v is not None})
        self._console(line)

    def _console(self, line: dict[str, Any]) -> None:
        step, seconds = line["step"], line["step_seconds"]
        if seconds is not None:     # a running mean that follows a change of speed within some ten steps
            self._seconds = seconds if self._seconds is None else 0.9 * self._seconds + 0.1 * seconds
        left = (self._total - step) * self._seconds if self._seconds is not None else None
        text = console_line(line, self._total, left)
        self._log.note(text)
        evaluated = any(key.startswith("valid_loss/") for key in line)
        if self._bar is not None:
            self._bar.set_postfix_str(text.split(" | ", 1)[1], refresh=False)
            self._bar.update(step - self._bar.n)
            if evaluated:
                self._log.show(text)
        elif evaluated or step % self._every == 0 or step in (1, self._total):
            self._log.show(text)

    def close(self) -> None:
        """Close metrics.jsonl, and let the trackers finish for a few seconds: say how the run ended before that."""
        if self._file is not None:
            self._file.close()
            self._file = None
        close_all(self._trackers)
        self._trackers.clear()


def clean(values: Mapping[str, Any]) -> dict[str, Any]:
    """One line of metrics.jsonl: every key of KEYS in order, then the validation losses; not finite or not known: None.

    Raises:
        KeyError: for a key that the file does not have.
    """
    extra = [key for key in values if key not in KEYS]
    wrong = [key for key in extra if not key.startswith("valid_loss/")]
    if wrong:
        raise KeyError(f"metrics.jsonl has no {', '.join(wrong)}")
    line = {key: values.get(key) for key in (*KEYS, *extra)}
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in line.items()}


def console_line(line: Mapping[str, Any], total: int, seconds_left: float | None) -> str:
    """A step in words: `step 3/200 | loss 5.0123 | norm 1.234 | lr 3.00e-04 | 12,345 tokens/s | …`.

    Args:
        line: as `clean` gives it.
        total: steps of the run.
        seconds_left: until its end.
    """
    memory = None if line["peak_memory_bytes"] is None else line["peak_memory_bytes"] / 2**30
    parts = [f"step {line['step']}/{total}", f"loss {_number(line['loss'], '.4f')}",
             f"norm {_number(line['grad_norm'], '.3f')}", f"lr {_number(line['lr'], '.2e')}",
             f"{_number(line['tokens_per_second'], ',.0f')} tokens/s", f"MFU {_number(line['mfu'], '.1%')}",
             f"memory {_number(memory, '.2f')} GiB", f"ETA {_time(seconds_left)}"]
    if line["skipped_steps"]:
        parts.append(f"skipped {line['skipped_steps']}")
    parts += [f"{key} {_number(value, '.4f')}" for key, value in line.items() if key.startswith("valid_loss/")]
    return " | ".join(parts)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _time(seconds: float | None) -> str:
    """Seconds as `2d 03h`, `3h 05m`, `4m 10s` or `12s`."""
    if seconds is None:
        return "–"
    minutes, s = divmod(round(max(seconds, 0)), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d {h:02d}h"
    if hours:
        return f"{hours}h {m:02d}m"
    return f"{minutes}m {s:02d}s" if minutes else f"{s}s"
