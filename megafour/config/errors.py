"""The one exception that a wrong configuration raises."""


class ConfigError(Exception):
    """A configuration that cannot be trained. The message is a single line that names the key and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
