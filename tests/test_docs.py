"""What README, docs and scripts name exists: files, verbs, options, schedules."""

import re
import subprocess
from pathlib import Path

import pytest

from megafour.cli import main as cli
from megafour.config.load import load_config

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
PROSE = [p for p in PAGES if "Written by scripts/" not in p.read_text()]    # generated pages have tests of their own
COMMANDS = re.compile(r"^(?:\$ )?((?:torchrun|python|megafour|bash) .*?)(?:\s+#.*)?$", re.M)


def commands(path: Path) -> list[str]:
    """The command lines in a page's code blocks, continuation lines joined."""
    blocks = re.findall(r"```(?:bash|sh|console)\n(.*?)```", path.read_text(), re.S)
    return [c for block in blocks for c in COMMANDS.findall(block.replace("\\\n", " "))]


def options_of(parser) -> set[str]:
    """The options of a verb, and of the ways in which it splits (`convert from-hf`)."""
    found = {s for action in parser._actions for s in action.option_strings}
    for way in (parser._subparsers._group_actions if parser._subparsers else []):
        found |= {s for inner in way.choices.values() for s in options_of(inner)}
    return found


ALL = [c for page in PROSE for c in commands(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


@pytest.mark.parametrize("command", ALL)
def test_commands_name_what_exists(command):
    words = command.split()
    for word in words:
        if re.fullmatch(r"(?:configs|scripts|tests|docs)/\S+", word):
            assert (ROOT / word).exists(), f"`{command}`: {word} is not there"
    if words[0] == "megafour" or "-m megafour" in command:
        verb = words[words.index("megafour") + 1]
        assert verb in cli.verbs(), f"`{command}`: there is no verb {verb}"
        options = options_of(cli.build_parser([verb])._subparsers._group_actions[0].choices[verb])
        unknown = [w for w in words[words.index(verb):] if w.startswith("--") and w not in options]
        assert not unknown, f"`{command}`: {verb} has no {', '.join(unknown)}"


@pytest.mark.parametrize("command", [c for c in ALL if "train.py --" in c and "configs/" in c])
def test_training_commands_load(command):
    path = re.search(r"--config (\S+)", command)[1]
    load_config(str(ROOT / path), [w for w in command.split() if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+=\S+", w)])


def test_every_verb_is_in_the_readme():
    text = (ROOT / "README.md").read_text()
    missing = [v for v in cli.verbs() if f"megafour {v}" not in text]
    assert not missing, f"README.md does not show {', '.join(missing)}"


def test_scripts_parse():
    for script in [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"]:
        assert subprocess.run(["bash", "-n", script]).returncode == 0, script
