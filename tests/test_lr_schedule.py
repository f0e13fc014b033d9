"""Learning rates by hand: warm-up, each shape's landmarks, and what comes after the end."""

import math
from types import SimpleNamespace

import pytest

from megafour.optim.lr_schedule import NAMES, learning_rate

OPTIMIZER = SimpleNamespace(lr=1.0)


def rates(name, total=100, warmup=10, decay=None, floor=0.1):
    schedule = SimpleNamespace(name=name, warmup_steps=warmup, decay_steps=decay, min_lr=floor)
    return [learning_rate(OPTIMIZER, schedule, step, total) for step in range(total + 20)]


@pytest.mark.parametrize("name", NAMES)
def test_warmup_is_linear_and_reaches_the_peak(name):
    assert rates(name)[:10] == pytest.approx([n / 10 for n in range(1, 11)])
    assert rates(name, warmup=0)[0] == pytest.approx(1.0, abs=0.02)


def test_cosine():
    found = rates("cosine")
    assert found[54] == pytest.approx(0.1 + 0.9 / 2)
    assert found[9 + 30] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi / 3)))
    assert found[99:] == [0.1] * 21
    assert rates("cosine", decay=50)[49:] == [0.1] * 71


def test_linear():
    found = rates("linear")
    assert found[54] == pytest.approx(0.55)
    assert found[99:] == [0.1] * 21
    assert [a - b for a, b in zip(found[10:99], found[11:100], strict=True)] == pytest.approx([0.01] * 89)


def test_wsd():
    found = rates("wsd", decay=20)
    assert found[10:80] == [1.0] * 70
    assert found[89] == pytest.approx(0.55)
    assert found[99:] == [0.1] * 21
    assert rates("wsd")[10:90] == [1.0] * 80  # null: the last tenth
    assert rates("wsd", decay=500)[98] == pytest.approx(0.1 + 0.9 / 90)  # never into the warm-up


def test_constant_and_degenerate_lengths():
    assert rates("constant")[10:] == [1.0] * 110
    assert rates("cosine", total=10, warmup=10)[10:] == [0.1] * 20
    assert rates("linear", decay=5)[10:] == [0.1] * 110
    with pytest.raises(ValueError, match="sqrt.*cosine"):
        rates("sqrt")
