"""From a YAML file and `section.key=value` overrides to a checked `Config`, and back to YAML."""

import json
import re
from copy import deepcopy
from pathlib import Path as FilePath
from typing import Any, NoReturn, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from megafour.config.base import expand_home
from megafour.config.coerce import section
from megafour.config.errors import ConfigError
from megafour.config.presets import preset_values
from megafour.config.schema import Config
from megafour.config.suggest import unknown_key
from megafour.config.types import alternatives, item_section, nullable, section_of
from megafour.config.yaml_text import Path, Plain, comment_in, dotted, parse_yaml, quoted, shown


def load_config(path: str | None = None, overrides: list[str] | None = None,
                values: dict[str, Any] | None = None) -> Config:
    """Read a configuration.

    Args:
        path: a YAML file; None starts from `values`, or from the defaults.
        overrides: `section.key=value`. The value of a text key is that text, all of it; of any other key it is YAML.
            Of two for one key the later one holds.
    Raises:
        ConfigError: for anything that is not exactly a key of the schema with a value of its type.
    """
    origins: dict[Path, str] = {}
    tree: Any = deepcopy(values) if values else {}
    if path is not None:
        tree, lines = parse_yaml(_read(path), path)
        origins = {key: f"{path}:{line}" for key, line in lines.items()}
        if not isinstance(tree, dict):
            raise ConfigError(f"{path}: the file must be a mapping of sections, such as `train: {{steps: 100}}`")
    for override in overrides or []:
        _apply(tree, override, origins)
    return _build(tree, origins, path)


def config_from(values: dict[str, Any], source: str | None = None) -> Config:
    """A configuration from nested Python values, through the same gate as a file."""
    return _build(values, {(): source} if source else {}, source)


def to_yaml(config: Config) -> str:
    """The configuration as YAML, every key written out; `load_config` of it gives an equal configuration."""
    return yaml.dump(config.model_dump(), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _Dumper(yaml.SafeDumper):
    """Short lists on one line, no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        flat = not any(isinstance(item, dict | list) for item in sequence)
        return super().represent_sequence(tag, sequence, flow_style=True if flat else flow_style)


_Dumper.add_representer(list, lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data))


def _read(path: str) -> str:
    try:
        return FilePath(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read: {reason}") from None


def _apply(tree: dict[str, Any], override: str, origins: dict[Path, str]) -> None:
    """Write one override into the tree. A mapping for a section sets the keys it names; any other value replaces."""
    key, equals, text = override.partition("=")
    source = f"override {shown(Plain(override))}"
    if not equals or not key:
        raise ConfigError(f"{source}: an override is section.key=value, such as train.steps=100")
    path = tuple(key.strip().split("."))
    value = _override_value(text, _reach(path, source), source)
    *parents, last = path
    place = tree
    for depth, parent in enumerate(parents):
        if place.get(parent) in (None, ""):
            place[parent] = {}
        place = place[parent]
        if not isinstance(place, dict):
            where = ".".join(path[: depth + 1])
            origin = origins.get(path[: depth + 1], source)
            raise ConfigError(f"{origin}: {where} = {shown(place)} is not valid: it must be a mapping")
    for stale in [known for known in origins if known[: len(path)] == path]:
        del origins[stale]
    origins[path] = source
    if _is_section(path) and isinstance(value, dict) and isinstance(place.get(last), dict):
        for inner in value:
            _merge(place[last], inner, value[inner], (*path, inner))
    else:
        place[last] = value


def _override_value(text: str, annotation: Any, source: str) -> Any:
    """What an override sets: for a text key the text as it stands, unless all of it is in YAML's quotes, else YAML."""
    if str in alternatives(annotation):
        inside = quoted(text)
        return Plain(text) if inside is None else inside
    comment = comment_in(text)
    if comment is not None:
        raise ConfigError(f"{source}: {shown(Plain(comment))} is a comment to YAML and would be dropped; leave it out, "
                          "or put quotes around what holds the #")
    return parse_yaml(text, source)[0] if text.strip() else Plain("")


def _merge(place: dict[str, Any], key: str, value: Any, path: tuple[str, ...]) -> None:
    if _is_section(path) and isinstance(value, dict) and isinstance(place.get(key), dict):
        for inner in value:
            _merge(place[key], inner, value[inner], (*path, inner))
    else:
        place[key] = value


def _is_section(path: tuple[str, ...]) -> bool:
    """Whether a path names a section that is always there (not a nullable mapping, which is replaced whole)."""
    model: type[BaseModel] | None = Config
    for part in path:
        field = model.model_fields.get(part) if model else None
        if field is None or nullable(field.annotation):
            return False
        model = section_of(field.annotation)
    return model is not None


def _reach(path: tuple[str, ...], source: str) -> Any:
    """The type of the key that an override sets; refuses a path that leaves the schema before its last key."""
    model: type[BaseModel] | None = Config
    annotation: Any = Config
    for depth, part in enumerate(path):
        if model is None:
            parent = ".".join(path[:depth])
            if parent == "data.valid":
                return Any
            raise ConfigError(f"{source}: {'.'.join(path)} is not a key of the configuration; {parent} is one value: "
                              "set it whole")
        field = model.model_fields.get(part)
        if field is None:
            hint = unknown_key(Config, path[:depth], part)
            raise ConfigError(f"{source}: {'.'.join(path)} is not a key of the configuration; {hint}")
        annotation = field.annotation
        model = section_of(annotation)
    return annotation


def _build(tree: dict[str, Any], origins: dict[Path, str], source: str | None) -> Config:
    """Coerce, expand the preset, validate ranges."""

    def refuse(path: Path, text: str) -> NoReturn:
        origin = next((origins[path[:n]] for n in range(len(path), -1, -1) if path[:n] in origins), None)
        raise ConfigError(f"{origin}: {dotted(path)} {text}" if origin else f"{dotted(path)} {text}")

    values = section(Config, tree, (), refuse)
    model = values.get("model", {})
    if model.get("preset") is not None:
        try:
            values["model"] = {**preset_values(expand_home(model["preset"])), **model}
        except (ConfigError, ValueError) as error:
            refuse(("model", "preset"), f"= {model['preset']}: {error}")
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        path, value, reason = _first_error(error)
        refuse(path, f"= {shown(value)} is not valid: it {reason}")
    config._source = source
    return config


def _first_error(error: ValidationError) -> tuple[Path, Any, str]:
    """Path, value and reason of the error that tells most (a union reports each of its members)."""
    details = error.errors()
    kinds = ("literal_error", "int_type", "float_type", "string_type", "bool_type", "list_type", "none_required")
    detail = next((d for d in details if d["type"] not in kinds), details[0])
    path = _key_path(detail["loc"])
    if detail["type"] == "missing":
        return path, None, "is required"
    if detail["type"] in ("too_short", "too_long"):
        bound = "at least {min_length}" if detail["type"] == "too_short" else "at most {max_length}"
        return path, detail["input"], f"must have {bound.format(**detail['ctx'])} entries"
    message = detail["msg"].removeprefix("Value error, ")
    return path, detail["input"], re.sub(r"^(Input|String) should", "must", message)


def _key_path(location: tuple[str | int, ...]) -> Path:
    """pydantic's location without the names of unions' members, which are no keys."""
    path: list[str | int] = []
    model: type[BaseModel] | None = Config
    annotation: Any = Config
    for part in location:
        if model is not None:
            if part not in model.model_fields:
                break
            annotation = model.model_fields[str(part)].annotation
            model = section_of(annotation)
        elif isinstance(part, int):
            model = item_section(annotation)
        elif not any(get_origin(member) is dict for member in alternatives(annotation)):
            break
        path.append(part)
    return tuple(path)


def json_schema() -> str:
    """The JSON schema that lets an editor complete and check the YAML, as text."""
    schema = Config.model_json_schema()
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=1) + "\n"
