"""The error that every fault of a checkpoint or of a run's folder becomes."""


class CheckpointError(Exception):
    """A checkpoint or run folder that cannot be written, read or used; one message, the same on every rank."""


def listed(items: list[str]) -> str:
    """Items as one text, every one of them: a name that is left out cannot be looked for."""
    return ", ".join(items)
