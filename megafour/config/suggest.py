"""The nearest valid key to an unknown one: renamed keys, other frameworks' names, other sections, near spellings."""

import difflib
from collections.abc import Iterator
from functools import cache

from pydantic import BaseModel

from megafour.config.aliases import ALIASES, LATER, SECTIONS
from megafour.config.types import item_section, section_of

Key = tuple[str, ...]


def unknown_key(root: type[BaseModel], parents: tuple[str | int, ...], key: str) -> str:
    """What to write instead of an unknown key: half a sentence for the message.

    Args:
        root: the class of the whole configuration.
        parents: path of the section that held the key.
        key: the unknown key.
    """
    section = tuple(part for part in parents if isinstance(part, str))
    keys = all_keys(root)
    siblings = [k for k in keys if k[:-1] == section]
    normal = normalized(key)
    for known in (".".join((*section, normal)), normal):
        if known in LATER:
            return f"{LATER[known]} not in this version"
    if not section and normal in SECTIONS:
        return f"did you mean {SECTIONS[normal]}?"
    same = [k for k in keys if k[-1] == normal]
    if any(k in siblings for k in same):
        return f"did you mean {'.'.join((*section, normal))}?"
    renamed = _renamed(section, normal)
    if renamed and not same:
        return renamed
    if same:
        return f"it belongs to another section: {' or '.join('.'.join(k) for k in same[:3])}"
    return _near_spelling(keys, siblings, section, normal)


def _renamed(section: Key, normal: str) -> str | None:
    """Another framework's name: the target in the same section first, then any."""
    targets = _by_alias().get(normal, ())
    for target, project in targets:
        if section and tuple(target.split("."))[:-1] == section:
            return f"that is {project}'s name; here it is {target}"
    if targets and normal not in _GENERIC:
        return f"that is {targets[0][1]}'s name; here it is {targets[0][0]}"
    return None


_GENERIC = frozenset({"name", "dir", "path", "every", "steps", "seed", "interval", "folder", "freq", "mode", "std"})
"""Last words of dotted names that mean something else in another section."""


def _near_spelling(keys: tuple[Key, ...], siblings: list[Key], section: Key, normal: str) -> str:
    near = difflib.get_close_matches(normal, [k[-1] for k in siblings], n=1, cutoff=0.6)
    if near:
        return f"did you mean {'.'.join((*section, near[0]))}?"
    words = {k[-1]: ".".join(k) for k in reversed(keys)}
    words |= {alias: targets[0][0] for alias, targets in _by_alias().items() if alias not in words}
    near = difflib.get_close_matches(normal, words, n=1, cutoff=0.75)
    if near:
        return f"did you mean {words[near[0]]}?"
    where = ".".join(section)
    if siblings:
        return f"the keys of {where or 'the top level'} are {', '.join(k[-1] for k in siblings)}"
    return f"{where} has no keys of its own"


def normalized(key: str) -> str:
    """`--Micro-Batch-Size` as `micro_batch_size`."""
    return key.strip().lstrip("-").replace("-", "_").lower()


@cache
def all_keys(root: type[BaseModel]) -> tuple[Key, ...]:
    """Every key of the schema in its order; the keys of a list's items stand under the list's key."""
    return tuple(_walk(root, ()))


def _walk(model: type[BaseModel], path: Key) -> Iterator[Key]:
    for key, field in model.model_fields.items():
        yield (*path, key)
        inner = section_of(field.annotation) or item_section(field.annotation)
        if inner is not None:
            yield from _walk(inner, (*path, key))


@cache
def _by_alias() -> dict[str, tuple[tuple[str, str], ...]]:
    """Another framework's key, whole and its last word -> (our key, the framework) for each of its meanings."""
    table: dict[str, tuple[tuple[str, str], ...]] = {}
    for alias in ALIASES:
        for project, names in alias.names.items():
            for other in names:
                for word in dict.fromkeys((normalized(other), normalized(other.rsplit(".", 1)[-1]))):
                    table[word] = (*table.get(word, ()), (alias.key, project))
    return table
