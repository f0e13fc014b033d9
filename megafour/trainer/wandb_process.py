"""The process that holds a run of Weights & Biases: requests come in as JSON lines, and each one is answered by one."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from typing import Any

LAST = 5.0
"""Seconds that this process may outlive the end of its input: the run is over, or has been killed."""


def main() -> None:
    """Answer requests until the input ends; then end the run there, as failed unless it was asked to finish."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):      # whoever stops the run stops this process too
        signal.signal(number, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)       # what wandb prints goes to the log
    requests: queue.Queue[list[Any] | None] = queue.Queue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    run: Any = None
    while (request := requests.get()) is not None:
        what, value = request
        note = None
        try:
            if what == "init":
                import wandb

                run = wandb.init(**value)
                note = getattr(run, "url", None)
            elif what == "log":
                run.log(value[1], step=value[0])
            else:
                run.finish()
                run = None
        except BaseException as error:      # wandb ends some failures with SystemExit
            print(json.dumps([f"{type(error).__name__}: {error}", None]), file=answers)
            return
        print(json.dumps([None, note]), file=answers)
    if run is not None:
        run.finish(exit_code=1)


def _read(requests: queue.Queue[list[Any] | None]) -> None:
    """Pass requests on, and end the process soon after the last one, whatever its other threads do."""
    try:
        for line in sys.stdin:
            requests.put(json.loads(line))
    finally:        # the run may have been killed in the middle of a line
        requests.put(None)
        time.sleep(LAST)
        os._exit(1)


if __name__ == "__main__":
    main()
