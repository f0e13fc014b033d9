"""The one exception that a wrong configuration raises, and how an error is said in one line by one of many ranks."""

import contextlib
import sys
import time

REFUSAL_WAIT = 20.0
"""Seconds for which ranks other than local rank 0 wait before they say an error themselves."""


class ConfigError(Exception):
    """A configuration that cannot be trained. The message is a single line that names the key and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def say_error(message: str, local_rank: int = 0) -> None:
    """Print one `error:` line to stderr, under torchrun once a node.

    torchrun ends all ranks as soon as one exits, so the others wait: local rank 0 must have said its line by then. One
    that is still here afterwards is alone with its error, and says it.
    """
    if local_rank != 0:
        time.sleep(REFUSAL_WAIT)
    say_line(f"error: {message}")


def say_line(line: str) -> None:
    """Print a line to stderr, if that can be written."""
    with contextlib.suppress(OSError, ValueError):      # nobody may hear it, and the exit code still tells
        print(line, file=sys.stderr, flush=True)
