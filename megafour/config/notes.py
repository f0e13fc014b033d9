"""Lines about what ends nothing: said once, by one rank of a node."""

from functools import cache

from megafour.config.errors import say_line
from megafour.config.launch import local_rank


@cache
def say_note(message: str) -> None:
    """Print one `note:` line to standard error: once a process, and by the first of a node's ranks alone."""
    if local_rank() == 0:
        say_line(f"note: {message}")
