"""What is generated from the schema is up to date, and whole: every key has words, every alias has a key."""

import importlib.util
import json

import pytest

from megafour.config.aliases import ALIASES, LATER, PROJECTS, SECTIONS
from megafour.config.presets import PRESETS
from megafour.config.schema import Config
from megafour.config.suggest import all_keys, unknown_key
from megafour.config.types import item_section, section_of


@pytest.fixture
def generator(pytestconfig, monkeypatch):
    monkeypatch.syspath_prepend(str(pytestconfig.rootpath / "scripts"))
    path = pytestconfig.rootpath / "scripts" / "generate_docs.py"
    spec = importlib.util.spec_from_file_location("generate_docs", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_files_are_up_to_date(generator):
    for path, text in generator.documents().items():
        assert path.read_text("utf-8") == text, f"{path.name}: run python scripts/generate_docs.py"


def test_every_key_has_a_docstring():
    def walk(model):
        assert model.__doc__
        for key, field in model.model_fields.items():
            assert field.description and field.description.strip().endswith("."), f"{model.__name__}.{key}"
            inner = section_of(field.annotation) or item_section(field.annotation)
            if inner:
                walk(inner)

    walk(Config)


def test_the_documentation_names_every_key(generator):
    text = generator.configuration()
    for key in all_keys(Config):
        assert f"`{key[-1]}`" in text or f"## {key[-1]}" in text, key
    assert all(f"`{preset}`" in text for preset in PRESETS)


def test_aliases_lead_to_keys_and_are_in_the_table(generator):
    keys = {".".join(key) for key in all_keys(Config)}
    table = generator.migrating()
    for alias in ALIASES:
        assert alias.key in keys and set(alias.names) <= set(PROJECTS)
        for names in alias.names.values():
            for name in names:
                assert f"`{name}`" in table
                last = name.rsplit(".", 1)[-1].lstrip("-").replace("-", "_")
                if tuple([*alias.key.split(".")[:-1], last]) not in all_keys(Config):
                    assert alias.key.split(".")[0] in unknown_key(Config, tuple(alias.key.split(".")[:-1]), name)
    assert set(SECTIONS.values()) <= keys
    assert not set(LATER) & keys


def test_the_json_schema_describes_the_yaml(pytestconfig):
    schema = json.loads((pytestconfig.rootpath / "configs" / "schema.json").read_text())
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == set(Config.model_fields)
    optimizer = schema["$defs"]["OptimizerConfig"]
    assert optimizer["additionalProperties"] is False and optimizer["properties"]["lr"]["description"]
