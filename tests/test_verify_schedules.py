"""Every pipeline schedule is the same model as one process, alone and with other axes and options."""

from contextlib import contextmanager
from unittest import mock

import pytest

from megafour.config.load import config_from
from megafour.verify.matrix import OPTIONS
from megafour.verify.run import check
from megafour.verify.shrink import option_case
from tests.verify_rows import SCHEDULES, schedule_rows

NAMES = ("schedule", "mesh", "micro_batches", "recompute", "tied", "layers", "dropout", "documents")


def walk(pool, rows, deviation):
    failed = []
    for row in rows:
        outcome = check(pool, option_case(config_from({}), row, 2), 2)
        if outcome.gradient is not None:
            deviation(max(outcome.gradient, outcome.loss, outcome.weights, outcome.grad_norm))
        if not outcome.passed:
            failed.append(({name: row[name] for name in NAMES}, outcome.gradient, outcome.error))
    assert not failed


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_is_the_same_model(pool, schedule, deviation):
    walk(pool, [row for row in schedule_rows(whole=False) if row["schedule"] == schedule], deviation)


@pytest.mark.full
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_with_everything(pool, schedule, deviation):
    walk(pool, [row for row in schedule_rows(whole=True) if row["schedule"] == schedule], deviation)


def test_the_walk_is_what_it_says():
    rows = schedule_rows(whole=True)
    for schedule in SCHEDULES:
        for mesh in ("pp2", "pp4"):
            found = {row["micro_batches"] for row in rows if (row["schedule"], row["mesh"]) == (schedule, mesh)}
            assert found == {"1", "3", "4", "8"}
        mixed = [row for row in rows if row["schedule"] == schedule]
        for option, value in (("tied", "true"), ("layers", "uneven"), ("recompute", "full"), ("dropout", "on"),
                              ("zero_stage", "1"), ("sequence_parallel", "true"), ("mesh", "pp2-cp2")):
            assert any(row.get(option) == value for row in mixed), option
        for method in OPTIONS["method"]:
            assert any(row.get("method", "ring") == method and row["documents"] == "on" and "cp" in row["mesh"]
                       for row in mixed), method
    seen = [row for row in schedule_rows(whole=False) if row["documents"] == "on"]
    assert {row.get("method", "ring") for row in seen} == set(OPTIONS["method"])


@contextmanager
def a_weight_gradient_forgotten():
    """A split backward forgets the first of the weight gradients that waited."""
    from megafour.parallel.pipeline import executor

    real = executor._Run._backward_weight

    def forgetful(self, action):
        self._weights[action.microbatch, action.chunk][:1] = [lambda: None]
        real(self, action)

    with mock.patch.object(executor._Run, "_backward_weight", forgetful):
        yield


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_v"])
def test_a_forgotten_weight_gradient_is_found(pool, schedule):
    row = next(row for row in schedule_rows(whole=False) if row["schedule"] == schedule)
    outcome = check(pool, option_case(config_from({}), row, 2), 2, plant=a_weight_gradient_forgotten)
    assert outcome.error is None and not outcome.passed and outcome.gradient > 0.1
