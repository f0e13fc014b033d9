"""What every section of the configuration has in common: strictness, immutability, docstrings as descriptions."""

import os
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Count = Annotated[int, Field(gt=0)]
"""A whole number, at least 1."""

Index = Annotated[int, Field(ge=0)]
"""A whole number, at least 0."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""A finite number above 0."""

NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""A finite number, at least 0."""

Rate = Annotated[float, Field(ge=0, lt=1)]
"""A probability in [0, 1)."""



def expand_home(path: str) -> str:
    """A path with `~` or `~user` at its beginning replaced by that home folder, as a shell does; others as they are.

    Raises:
        ValueError: there is no such user.
    """
    expanded = os.path.expanduser(path)
    if path.startswith("~") and expanded == path:
        user = path.split("/")[0]
        whose = f"of {user[1:]}: there is no such user" if user != "~" else "of this user: set HOME"
        raise ValueError(f"names the home folder {whose}; write ./{user} for a folder of that name")
    return expanded


def _no_null(text: str) -> str:
    """Refuse a null character: no file name can contain one."""
    if "\0" in text:
        raise ValueError("must not hold a null character")
    return text


Text = Annotated[str, Field(min_length=1), AfterValidator(_no_null)]
"""Text that is not empty."""

Location = Annotated[str, Field(min_length=1), AfterValidator(_no_null), AfterValidator(expand_home)]
"""Where a file or folder lies; `~` at its beginning is the home folder."""


class Section(BaseModel):
    """A mapping of the YAML file: unknown keys and wrong types are refused, values do not change after loading."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True, protected_namespaces=()
    )
