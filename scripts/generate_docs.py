"""Writes what follows from the schema: docs/configuration.md, docs/migrating.md and configs/schema.json."""

import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from written import ROOT, main

from megafour.config.aliases import ALIASES, PROJECTS
from megafour.config.load import json_schema
from megafour.config.presets import PRESETS
from megafour.config.schema import Config
from megafour.config.types import in_words, item_section, section_of
from megafour.config.yaml_text import shown

CONFIGURATION = """\
# Configuration

<!-- Written by scripts/generate_docs.py from the docstrings in megafour/config/. Do not edit. -->

One YAML file describes a run; it names only what differs from the defaults below. Any key can be set on the command
line as `section.key=value` and passes the same checks: `train.steps=100`, `run.name=exp #2`,
`data.train=[{path: data/a}, {path: data/b, weight: 2}]`, `parallel.pipeline={schedule: gpipe}`. Of two overrides of
one key the later one holds. A mapping given for a section sets the keys that it names; anything else, and a nullable
mapping such as `model.rope_scaling`, is replaced whole.

- The value of a text key on the command line is that text, all of it: blanks, `#`, `:` and brackets mean nothing.
  Only `null`, `~` and nothing at all stand for null, and quotes around the whole value are taken off
  (`run.name='"null"'` in a shell is the name null). The value of any other key is YAML, without comments.
- Unknown and repeated keys, wrong types and keys in a wrong section are refused before any process group exists. The
  message names the file and line, the key's full path, its value and the nearest valid key; names from Megatron-LM,
  torchtitan, Hugging Face and nanotron are known ([migrating.md](migrating.md)).
- The type of an unquoted value is the key's: `1e-4` and `1_000` are numbers where a number is asked for, `1e9` is also
  a whole number, and `off` is false only for a key that is true or false. Quoted text stays text. `010` is refused,
  since some readers of YAML take it for 8 and others for 10.
- `~` or `~user` at the beginning of a path is that home folder, as in a shell, in the file and on the command line;
  `./~` is a folder of that name. The run's `config.yaml` holds the full path.
- Anchors, aliases and merge keys mean what they mean in YAML 1.1. `<<: *base` adds the keys of the mapping marked
  `&base` that the mapping does not set itself; of a list, `<<: [*first, *second]`, the earlier mapping wins. Mappings
  inside are not merged, but taken whole. An anchor stands on a value of the schema, for there are no other keys:
  `train: [&web {path: data/web, weight: 2}, {<<: *web, path: data/news}]`.
- `${VAR}` stands for an environment variable; one that is not set is refused.
- `python train.py --check --world N --config FILE` checks every rule for N ranks without launching.
- An editor with a YAML language server completes keys by `configs/schema.json`: put
  `# yaml-language-server: $schema=schema.json` in the first line of a file beside it.
"""

MIGRATING = """\
# Coming from Megatron or Hugging Face flags

<!-- Written by scripts/generate_docs.py from megafour/config/aliases.py. Do not edit. -->

What your framework calls it, and its key here. A configuration that uses one of these names is refused with the key to
use. Names are alike in meaning, not always in value: [configuration.md](configuration.md) says what each key takes.

- The world is dp · pp · tp · cp; `parallel.dp=auto` follows from the number of ranks.
- `train.global_batch_size` counts samples over all ranks. Accumulation is not set: it is
  global batch / (dp · micro batch).
- `train.steps` counts optimizer steps; `train.tokens` gives the length in tokens instead.
- A Hugging Face model's shape needs no flags: `model.preset=PATH` reads its `config.json`.
"""

RULES = """
## Rules between keys

Checked at start, on every rank; the message shows the equation with its numbers and names the key to turn.

- world = dp · pp · tp · cp, and `train.global_batch_size` = dp · `train.micro_batch_size` · accumulation.
- cp > 1: `data.seq_length` is a multiple of 2 · cp (zigzag) or cp (striped, contiguous). tp > 1 with
  `parallel.sequence_parallel`: `data.seq_length` / cp is a multiple of tp.
- Heads are a multiple of tp and of key/value heads; key/value heads are a multiple of tp or tp is a multiple of them;
  `model.ffn_hidden_size` is a multiple of tp. The vocabulary is padded and has no rule.
- pp · virtual stages ≤ layers; an explicit `parallel.pipeline.partition` has as many entries of at least 1 that add up
  to the layers.
- RoPE: the head dimension is even. Scalings: `factor` ≥ 1; llama3: `low_freq_factor` < `high_freq_factor`; yarn:
  `rope_theta` > 1, `beta_slow` ≤ `beta_fast`. `rope_theta` ≥ 1,
  and every number is between 2^-126 and 2^127, the range of fp32.
- Learned positions: `data.seq_length` ≤ `model.max_position_embeddings`.
- One of `train.steps` and `train.tokens`; warm-up < steps, warm-up < decay (wsd: warm-up + decay ≤ steps),
  min_lr ≤ lr.
- `data.train` names a dataset; `eval.every` needs `data.valid` or a `data.split` with a validation part.

## Presets

`model.preset` takes one of these names, or the path of a Hugging Face folder or of its `config.json` (model types
llama, mistral, qwen2, qwen3, gpt2). Its values have the types that `transformers` asks for. What such a file asks for
and this version does not compute is refused by name; keys that are not known, and whose names say nothing about the
forward pass, are listed in one note. Where `layer_types` mixes full and sliding attention,
`model.attention_window` is a list. A length given as `max_sequence_length` is ignored, as `transformers` does.

"""


def configuration() -> str:
    """docs/configuration.md: one table a section."""
    parts = [CONFIGURATION]
    parts += [text for key, field in Config.model_fields.items() for text in _section(field.annotation, key)]
    columns = ("num_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "ffn_hidden_size",
               "vocab_size")
    header = ("preset", "layers", "hidden", "heads", "key/value heads", "ffn", "vocabulary")
    rows = [(f"`{name}`", *(shown(values.get(column, "—")).strip('"') for column in columns))
            for name, values in PRESETS.items()]
    return "\n".join(parts) + RULES + _table(header, rows)


def _section(annotation: Any, path: str) -> list[str]:
    """The table of a section, then those of the sections inside it."""
    model = section_of(annotation) or item_section(annotation)
    assert model is not None
    rows, inner = [], []
    for key, field in model.model_fields.items():
        nested = section_of(field.annotation) or item_section(field.annotation)
        kind = f"see [{path}.{key}](#{_anchor(path, key)})" if nested else in_words(field.annotation)
        if nested and not section_of(field.annotation):
            kind = "mapping of names to lists, " + kind if shown(field.default) == "{}" else "list, " + kind
        rows.append((f"`{key}`", f"`{_default(field)}`" if _default(field) else "", kind, _line(field.description)))
        if nested and (path, key) != ("data", "valid"):
            inner += _section(field.annotation, f"{path}.{key}")
    text = f"\n## {path}\n\n{_line(model.__doc__)}\n\n" + _table(("key", "default", "accepts", ""), rows)
    return [text.rstrip("\n"), *inner]


def _anchor(path: str, key: str) -> str:
    place = "data.train" if (path, key) == ("data", "valid") else f"{path}.{key}"
    return place.replace(".", "")


def _default(field: Any) -> str:
    if field.default is PydanticUndefined:
        return "required"
    return "" if isinstance(field.default, BaseModel) else shown(field.default).strip('"')


def _line(text: str | None) -> str:
    return " ".join((text or "").split())


def migrating() -> str:
    """docs/migrating.md: the table of aliases."""
    rows = []
    for alias in ALIASES:
        names = [", ".join(f"`{name}`" for name in alias.names.get(project, ())) for project in PROJECTS]
        rows.append((f"`{alias.key}`", *names, alias.note))
    return MIGRATING + "\n" + _table(("here", *PROJECTS, ""), rows)


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def documents() -> dict[Path, str]:
    """Every generated file and its text."""
    return {
        ROOT / "docs" / "configuration.md": configuration(),
        ROOT / "docs" / "migrating.md": migrating(),
        ROOT / "configs" / "schema.json": json_schema(),
    }


if __name__ == "__main__":
    sys.exit(main(__doc__, documents))
