"""The exceptions of the data package."""


class DataError(Exception):
    """Data that cannot be used as asked; the message is one line that names the file and what to change."""


class NoSuchFile(DataError):
    """A path that was given leads to no file."""
