"""What all tests share: one pool of local ranks, and the `--all` run that writes docs/verified.md."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")    # before torch is imported: two cores are easily oversubscribed

import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from megafour.config.notes import say_note
from megafour.verify.pool import PRELOAD, Pool

ROOT = Path(__file__).resolve().parent.parent
hypothesis.settings.register_profile("steady", deadline=None, derandomize=True,
                                     suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("steady")    # a test depends on neither chance nor the machine's speed
ROWS = pytest.StashKey[list[dict]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="walk the full products too, and write docs/verified.md")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        for item in items:
            if item.get_closest_marker("full"):
                item.add_marker(pytest.mark.skip(reason="a full product: runs with --all"))


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Sixteen gloo ranks: `pool.run(fn, world, *args)` calls `fn(rank, world, *args)` on each of the first `world`."""
    with Pool(16, preload=(*PRELOAD, "pytest")) as ranks:
        yield ranks


@pytest.fixture(autouse=True)
def notes_are_new() -> None:
    """A process says each note once, and all tests are one process."""
    say_note.cache_clear()


@pytest.fixture
def deviation(request: pytest.FixtureRequest) -> Callable[[float], None]:
    """`deviation(value)` notes a measured deviation; the worst one of a test goes into its row of docs/verified.md."""
    seen: list[float] = request.node.stash.setdefault(DEVIATIONS, [])
    return seen.append


DEVIATIONS = pytest.StashKey[list[float]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    if report.when == "call" and item.get_closest_marker("full"):
        seen = item.stash.get(DEVIATIONS, [])
        item.config.stash[ROWS].append({"what": item.nodeid, "outcome": report.outcome, "seconds": report.duration,
                                        "worst": f"{max(seen):.1e}" if seen else "–"})
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    config, rows = session.config, session.config.stash[ROWS]
    part = (config.args_source is pytest.Config.ArgsSource.ARGS or config.option.keyword
            or config.option.markexpr not in ("", "full"))
    if config.getoption("--all") and rows and not part:    # a part of the tests would pass for all of them
        write_verified(rows, ROOT / "docs" / "verified.md")


def write_verified(rows: list[dict], path: Path) -> None:
    """Write what ran, on which commit, how long it took and the worst deviation seen."""
    def git(*words: str) -> str:
        answer = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return answer.stdout.strip() if answer.returncode == 0 else ""

    changed = " with uncommitted changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    lines = ["# Verified", "", "Written by `bash scripts/test.sh --all`: the full products of options and meshes.", "",
             f"- commit: {git('rev-parse', 'HEAD') or 'unknown'}{changed}",
             f"- when: {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}",
             f"- with: Python {platform.python_version()}, torch {_torch_version()}, {os.cpu_count()} cores",
             f"- passed: {sum(r['outcome'] == 'passed' for r in rows)} of {len(rows)}", "",
             "| what ran | outcome | seconds | worst deviation |", "|---|---|---|---|"]
    lines += [f"| `{r['what']}` | {r['outcome']} | {r['seconds']:.1f} | {r['worst']} |" for r in rows]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def _torch_version() -> str:
    import torch

    return torch.__version__
