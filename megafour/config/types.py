"""Questions to a type annotation of the schema: its alternatives, the section inside it, what it accepts in words."""

from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel


def alternatives(annotation: Any) -> list[Any]:
    """The members of a union, `Annotated` taken off; of anything else, itself."""
    if get_origin(annotation) is Annotated:
        return alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [member for part in get_args(annotation) for member in alternatives(part)]
    return [annotation]


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section class that a key holds, if it holds one (also if it may be null)."""
    for member in alternatives(annotation):
        if isinstance(member, type) and issubclass(member, BaseModel):
            return member
    return None


def item_section(annotation: Any) -> type[BaseModel] | None:
    """The section class of a list's or mapping's items."""
    for member in alternatives(annotation):
        if get_origin(member) in (list, dict):
            inner = get_args(member)[-1]
            return section_of(inner) or item_section(inner)
    return None


def nullable(annotation: Any) -> bool:
    """Whether a key may be null."""
    return NoneType in alternatives(annotation)


def in_words(annotation: Any) -> str:
    """What a key accepts: "a whole number or null"."""
    words = [_words(member) for member in alternatives(annotation)]
    return " or ".join(dict.fromkeys(words))


def _words(member: Any) -> str:
    if member is NoneType:
        return "null"
    if get_origin(member) is Literal:
        choices = [str(choice) for choice in get_args(member)]
        return choices[0] if len(choices) == 1 else "one of " + ", ".join(choices)
    if get_origin(member) is list:
        inner = section_of(get_args(member)[0])
        items = f"mappings with {', '.join(inner.model_fields)}" if inner else in_words(get_args(member)[0])
        return f"a list ({items})"
    if get_origin(member) is dict:
        return f"a mapping from names, each to {in_words(get_args(member)[1])}"
    if issubclass(member, BaseModel):
        return f"a mapping with keys of {', '.join(member.model_fields)}"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[member]
