"""The error that every fault of a checkpoint or of a run's folder becomes."""


class CheckpointError(Exception):
    """A checkpoint or run folder that cannot be written, read or used; one message, the same on every rank."""
