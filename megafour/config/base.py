"""What every section of the configuration has in common: strictness, immutability, docstrings as descriptions."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

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

Text = Annotated[str, Field(min_length=1)]
"""Text that is not empty."""


class Section(BaseModel):
    """A mapping of the YAML file: unknown keys and wrong types are refused, values do not change after loading."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True, protected_namespaces=()
    )
