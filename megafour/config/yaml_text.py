"""YAML text to plain values: repeated keys refused, scalars kept as written so that the schema decides their type."""

import re
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from megafour.config.errors import ConfigError

Path = tuple[str | int, ...]


MOST_VALUES = 100_000
"""Values in one document: a few lines of aliases that repeat aliases stand for billions."""


class Plain(str):
    """A scalar that was written without quotes: `8`, `1e-4`, `off`, `gelu`. A quoted one is an ordinary `str`."""


def parse_yaml(text: str, source: str) -> tuple[Any, dict[Path, int]]:
    """Parse one YAML document.

    Args:
        text: the document; empty text is an empty mapping.
        source: what messages call it (a file's path).
    Returns:
        the tree of dict, list, `Plain` and `str`, and the line (from 1) of each path in it.
    Raises:
        ConfigError: for a syntax error, a repeated key, a key that is not text, a tag, or several documents.
    """
    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except RecursionError:
        raise ConfigError(f"{source}: not valid YAML: nested too deeply") from None
    except (ValueError, OverflowError) as error:        # an escape such as "\UFFFFFFFF" that is no character
        raise ConfigError(f"{source}: not valid YAML: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}" if mark else source
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        raise ConfigError(f"{where}: not valid YAML: {problem}") from None
    lines: dict[Path, int] = {}
    if root is None:
        return {}, lines
    return _value(root, (), lines, source, ()), lines


def _value(node: Node, path: Path, lines: dict[Path, int], source: str, open_nodes: tuple[int, ...]) -> Any:
    line = node.start_mark.line + 1
    lines.setdefault(path, line)
    if len(lines) > MOST_VALUES:
        raise ConfigError(f"{source}:{line}: more than {MOST_VALUES} values: aliases repeat each other too often")
    where = f"{source}:{line}: {dotted(path)}".removesuffix(": ")
    if id(node) in open_nodes:
        raise ConfigError(f"{where}: an alias that contains itself")
    if not node.tag.startswith("tag:yaml.org,2002:") or node.tag.rsplit(":", 1)[1] not in ("str", "seq", "map"):
        raise ConfigError(f"{where}: the tag {node.tag!r} is not allowed; the key's type is known")
    inner = (*open_nodes, id(node))
    if isinstance(node, SequenceNode):
        return [_value(item, (*path, i), lines, source, inner) for i, item in enumerate(node.value)]
    if isinstance(node, MappingNode):
        return _mapping(node, path, lines, source, inner)
    assert isinstance(node, ScalarNode)
    return Plain(node.value) if node.style is None else str(node.value)


def _mapping(
    node: MappingNode, path: Path, lines: dict[Path, int], source: str, open_nodes: tuple[int, ...]
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    merges: list[Node] = []
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, ScalarNode):
            raise ConfigError(f"{source}:{line}: {dotted(path) or 'top level'}: a key must be text")
        key = str(key_node.value)
        inner = (*path, key)
        if key == "<<" and key_node.style is None:
            if merges:
                raise ConfigError(f"{source}:{line}: {dotted(inner)} is a repeated key; merge several mappings in one: "
                                  f"`<<: [*first, *second]`")
            merges.append(value_node)
            continue
        if key in result:
            raise ConfigError(
                f"{source}:{line}: {dotted(inner)} = {shown(_scalar_text(value_node))} is a repeated key: it already "
                f"stands in line {lines[inner]} with {shown(result[key])}; remove one"
            )
        lines[inner] = line
        result[key] = _value(value_node, inner, lines, source, open_nodes)
    for value_node in merges:
        _merge_keys(value_node, result, path, lines, source, open_nodes)
    return result


def _merge_keys(node: Node, result: dict[str, Any], path: Path, lines: dict[Path, int], source: str,
                open_nodes: tuple[int, ...]) -> None:
    """Add what `<<` names: keys that stand in the mapping itself win, then those of the earlier mapping in a list."""
    several = node.value if isinstance(node, SequenceNode) else [node]
    for mapping in several:
        line = mapping.start_mark.line + 1
        if not isinstance(mapping, MappingNode):
            raise ConfigError(f"{source}:{line}: {dotted((*path, '<<'))} = {shown(_scalar_text(mapping))} is not "
                              f"valid: it must be a mapping, such as the alias *base of one marked &base, or a list "
                              f"of mappings")
        if id(mapping) in open_nodes:
            raise ConfigError(f"{source}:{line}: {dotted((*path, '<<'))}: an alias that contains itself")
        found: dict[Path, int] = {}
        merged = _mapping(mapping, path, found, source, (*open_nodes, id(mapping)))
        added = {key: value for key, value in merged.items() if key not in result}
        result.update(added)
        lines.update({key: at for key, at in found.items() if key[len(path):len(path) + 1] and key[len(path)] in added})
        if len(lines) > MOST_VALUES:
            raise ConfigError(f"{source}:{line}: more than {MOST_VALUES} values: aliases repeat each other too often")


def comment_in(text: str) -> str | None:
    """The comment that YAML would drop from a value, from its `#` on; None where there is none or it is no YAML."""
    end = 0
    try:
        for token in yaml.scan(text, Loader=yaml.BaseLoader):
            gap = text[end:token.start_mark.index]
            if "#" in gap:
                return gap[gap.index("#"):]
            end = token.end_mark.index
    except (yaml.YAMLError, ValueError, OverflowError):
        return None
    return None


def quoted(text: str) -> str | None:
    """What stands between YAML's quotes where all of a text is in them; None elsewhere."""
    if not text.startswith(("'", '"')) or comment_in(text) is not None:
        return None
    try:
        node = yaml.compose(text, Loader=yaml.BaseLoader)
    except (yaml.YAMLError, ValueError, OverflowError):
        return None
    return str(node.value) if isinstance(node, ScalarNode) and node.style in ("'", '"') else None


def _scalar_text(node: Node) -> Any:
    if isinstance(node, ScalarNode):
        return Plain(node.value) if node.style is None else node.value
    return "a list" if isinstance(node, SequenceNode) else "a mapping"


def dotted(path: Path) -> str:
    """`("data", "train", 0, "path")` as `data.train[0].path`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def shown(value: Any, limit: int = 80) -> str:
    """A value as one short line for a message; unquoted YAML scalars stay unquoted."""
    if isinstance(value, Plain):
        text = str(value) or "null"
    elif value is None:
        text = "null"
    elif isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, str):
        text = f'"{value}"'
    elif isinstance(value, dict):
        text = "{" + ", ".join(f"{key}: {shown(item)}" for key, item in value.items()) + "}"
    elif isinstance(value, list):
        text = "[" + ", ".join(shown(item) for item in value) + "]"
    else:
        text = str(value)
    text = re.sub(r"\s+", " ", text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def one_line(value: Any) -> str:
    """Any value as YAML of one line, never cut."""
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip()
