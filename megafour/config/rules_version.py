"""Values that the schema knows and this version does not support yet: refused at start, with the reason."""

from collections.abc import Iterator

from megafour.config.schema import Config


def version_rules(config: Config) -> Iterator[str]:
    """One message for each value that this version does not support."""
    for key, value, wrong, reason in _table(config):
        if wrong:
            text = str(value).lower() if isinstance(value, bool) else value
            yield f"{key} = {text} is not supported by this version: {reason}"


def _table(config: Config) -> Iterator[tuple[str, object, bool, str]]:
    """(key, value, whether it is refused, what to set instead)."""
    parallel = config.parallel
    yield ("parallel.ep", parallel.ep, parallel.ep != 1, "there are no experts to split; set parallel.ep=1")
