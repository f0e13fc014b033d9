"""The error that every fault of a checkpoint becomes."""


class CheckpointError(Exception):
    """A checkpoint that cannot be written, read or used; one message, the same on every rank."""
