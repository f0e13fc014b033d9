"""The command line's manners: exit codes, one error line, said once."""

import pytest

from megafour.cli import main as cli
from megafour.config import errors
from megafour.config.errors import ConfigError


class Verb:
    """Stands in for a verb's module."""

    def __init__(self, outcome):
        self.outcome = outcome

    def add_parser(self, subparsers):
        parser = subparsers.add_parser("try")
        parser.add_argument("--n", type=int)
        parser.add_argument("overrides", nargs="*")

    def run(self, args):
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@pytest.fixture
def verb(monkeypatch):
    def install(outcome):
        monkeypatch.setattr(cli, "verbs", lambda: ["try"])
        monkeypatch.setattr(cli.importlib, "import_module", lambda name: Verb(outcome))
    return install


class DataError(Exception):
    pass


@pytest.mark.parametrize("outcome, code", [(0, 0), (None, 0), (1, 1), (ConfigError("lr: no\n number"), 2),
                                           (DataError("corpus.jsonl:3: not JSON"), 1)])
def test_exit_codes(verb, capsys, outcome, code):
    verb(outcome)
    assert cli.main(["try"]) == code
    err = capsys.readouterr().err
    assert err.count("\n") == err.count("error: ") == (1 if isinstance(outcome, Exception) else 0)


def test_a_bug_keeps_its_traceback(verb):
    verb(ZeroDivisionError("oops"))
    with pytest.raises(ZeroDivisionError):
        cli.main(["try"])


@pytest.mark.parametrize("argv", [["try", "--n", "x"], ["nonsense"], []])
@pytest.mark.parametrize("local_rank, waits", [("0", []), ("3", [errors.REFUSAL_WAIT])])
def test_a_wrong_argument_is_one_line_and_exit_2(verb, capsys, monkeypatch, argv, local_rank, waits):
    """Under torchrun local rank 0 says it first: the others would end the job with their exit."""
    verb(0)
    waited: list[float] = []
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(errors.time, "sleep", waited.append)
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    err = capsys.readouterr().err
    assert ended.value.code == 2 and err.count("\n") == 1 and err.startswith("error: ") and waited == waits


def test_overrides_may_stand_anywhere(verb, capsys):
    verb(0)
    for argv in (["a.b=1", "--n", "3", "c.d=x=y"], ["--n", "3", "a.b=1", "c.d=x=y"], ["a.b=1", "c.d=x=y", "--n", "3"]):
        args = cli.parse(["try", *argv])
        assert (args.n, args.overrides) == (3, ["a.b=1", "c.d=x=y"])
    with pytest.raises(SystemExit):
        cli.parse(["try", "a.b=1", "--m=2"])
    assert "--m=2" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [
    ["prepare", "~/a.txt", "--output", "~/b", "--tokenizer", "huggingface:~/c"],
    ["inspect", "~/a", "~/b", "--tokenizer", "huggingface:~/c"], ["convert", "from-hf", "~/a", "~/b"],
    ["convert", "to-hf", "~/a", "~/b"], ["evaluate", "--checkpoint", "~/a", "--text", "~/b"],
    ["evaluate", "--hf", "~/a", "--data", "~/b"], ["generate", "--checkpoint", "~/a", "--prompt", "a"],
    ["schedule", "--name", "~/a.csv", "--save", "~/b.json", "--out", "~/c.svg"], ["verify", "--config", "~/a"]])
def test_a_home_folder_is_expanded_in_every_argument_that_is_a_path(monkeypatch, capsys, argv):
    monkeypatch.setenv("HOME", "/home/me")
    asked, found = " ".join(argv), str(vars(cli.parse(argv)))
    assert "~" not in found and all((f"/home/me/{name}" in found) == (f"~/{name}" in asked) for name in "abc")
    with pytest.raises(SystemExit) as ended:
        cli.parse([word.replace("~/", "~nosuchuser/") for word in argv])
    assert ended.value.code == 2 and "there is no such user" in capsys.readouterr().err


def test_every_verb_has_a_help(capsys):
    for name in cli.verbs():
        with pytest.raises(SystemExit) as ended:
            cli.main([name, "--help"])
        assert ended.value.code == 0 and f"megafour {name}" in capsys.readouterr().out
