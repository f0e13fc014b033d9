"""Values of a YAML tree turned into the types that the schema asks for, key by key, or refused by name."""

import difflib
import os
import re
from collections.abc import Callable
from decimal import Decimal
from types import NoneType
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic import BaseModel

from megafour.config.schema import Config
from megafour.config.suggest import unknown_key
from megafour.config.types import alternatives, in_words
from megafour.config.yaml_text import Path, Plain, shown

Refuse = Callable[[Path, str], NoReturn]
"""Raises ConfigError for the key at a path; the text starts after the key's name."""

TRUE = ("true", "yes", "on")
FALSE = ("false", "no", "off")
NULL = ("", "~", "null")
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)")
_NUMBER = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)?(\.[0-9]*)?([eE][-+]?[0-9]+)?")
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def coerce(annotation: Any, value: Any, path: Path, refuse: Refuse) -> Any:
    """Turn `value` into what `annotation` asks for.

    Unquoted text is read by the key's type: `1e-4` is a number where a number is asked for, `off` is false only where
    a boolean is. Quoted text stays text. Values that are already typed (from Python) must have the right type.
    """
    value = _expand(value, path, refuse)
    members = alternatives(annotation)
    if value is None or (isinstance(value, Plain) and value.lower() in NULL):
        if NoneType in members:
            return None
        if len(members) == 1 and isinstance(members[0], type) and issubclass(members[0], BaseModel):
            return {}  # a section whose keys are all commented out
        refuse(path, f"= null is not allowed here: it must be {in_words(annotation)}")
    for member in members:
        found, result = _try(member, value, path, refuse)
        if found:
            return result
    _refuse_value(annotation, value, path, refuse)


def _try(member: Any, value: Any, path: Path, refuse: Refuse) -> tuple[bool, Any]:
    """(whether the value is of this member's type, the typed value)."""
    if member is NoneType:
        return False, None
    if get_origin(member) is Literal:
        text = str(value) if isinstance(value, str) else value
        return (text in get_args(member) and type(text) in {type(a) for a in get_args(member)}), text
    if get_origin(member) is list:
        if not isinstance(value, list):
            return False, None
        inner = get_args(member)[0]
        return True, [coerce(inner, item, (*path, i), refuse) for i, item in enumerate(value)]
    if get_origin(member) is dict:
        if not isinstance(value, dict):
            return False, None
        inner = get_args(member)[1]
        return True, {str(key): coerce(inner, item, (*path, key), refuse) for key, item in value.items()}
    if issubclass(member, BaseModel):
        return isinstance(value, dict), section(member, value, path, refuse) if isinstance(value, dict) else None
    return _scalar(member, value)


def _scalar(kind: type, value: Any) -> tuple[bool, Any]:
    if kind is str:
        return isinstance(value, str), str(value) if isinstance(value, str) else None
    if not isinstance(value, Plain):
        if kind is float and type(value) is int:
            return True, float(value)
        return type(value) is kind, value
    text = str(value)
    if kind is bool:
        return text.lower() in TRUE + FALSE, text.lower() in TRUE
    if kind is int:
        return _integer(text)
    if _NUMBER.fullmatch(text) and any(character.isdigit() for character in text):
        return True, float(text)
    return False, None


def _integer(text: str) -> tuple[bool, int]:
    """`8`, `1_000` and `15e12` are whole numbers. `010` is refused: YAML 1.1 reads 8, YAML 1.2 reads 10."""
    if _INTEGER.fullmatch(text):
        return True, int(text)
    if "e" in text.lower() and _NUMBER.fullmatch(text) and text[0] not in "eE.":
        number = Decimal(text)
        if abs(number.adjusted()) < 25 and number == number.to_integral_value():
            return True, int(number)
    return False, 0


def section(model: type[BaseModel], values: dict[str, Any], path: Path, refuse: Refuse) -> dict[str, Any]:
    """Coerce every key of a mapping by the section's class; unknown keys are refused with the nearest valid one."""
    result = {}
    for key, value in values.items():
        field = model.model_fields.get(key)
        if field is None:
            hint = unknown_key(Config, path, key)
            refuse((*path, key), f"= {shown(value)} is not a key of the configuration; {hint}")
        result[key] = coerce(field.annotation, value, (*path, key), refuse)
    return result


def _expand(value: Any, path: Path, refuse: Refuse) -> Any:
    """Replace every `${VAR}` of a text by the environment variable. The result counts as unquoted: quotes around a
    variable are there for YAML (a flow mapping needs them), not to make `${BATCH}` a text."""
    if not isinstance(value, str) or "${" not in value:
        return value

    def variable(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            refuse(path, f"= {shown(value)}: the environment variable {match[1]} is not set")
        return os.environ[match[1]]

    expanded = _VARIABLE.sub(variable, value)
    return value if expanded == value else Plain(expanded)


def _refuse_value(annotation: Any, value: Any, path: Path, refuse: Refuse) -> NoReturn:
    hint = ""
    text = str(value)
    members = alternatives(annotation)
    choices = [str(c) for m in members if get_origin(m) is Literal for c in get_args(m)]
    near = difflib.get_close_matches(text.lower().replace("-", "_"), choices, n=1, cutoff=0.6)
    if isinstance(value, Plain) and int in members and re.fullmatch(r"[-+]?0[0-9_]+", text):
        hint = f"; a leading zero is octal to some readers of YAML: write {text.replace('_', '').lstrip('+-0') or 0}"
    elif isinstance(value, str) and not isinstance(value, Plain) and _scalar(float, Plain(text))[0]:
        hint = "; take the quotes off"
    elif near:
        hint = f"; did you mean {near[0]}?"
    refuse(path, f"= {shown(value)} is not valid: it must be {in_words(annotation)}{hint}")
