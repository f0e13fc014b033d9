"""The scale on which verify compares: gradients that are nothing but rounding pass, a millionth elsewhere does not."""

from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest

from megafour.config.load import config_from
from megafour.verify.matrix import parse_mesh
from megafour.verify.run import check
from megafour.verify.shrink import user_cases


@contextmanager
def gradients_a_millionth_off():
    from megafour.trainer import step

    real = step.sync_replicated

    def sync(buckets, groups):
        real(buckets, groups)
        for bucket in buckets:
            bucket.grad_shard.mul_(1 + 1e-6)

    with mock.patch.object(step, "sync_replicated", sync):
        yield


@pytest.mark.parametrize(("norm", "mesh"), [
    ("layernorm", "tp2"), ("layernorm", "cp2"), pytest.param("rmsnorm", "dp2", marks=pytest.mark.full)])
def test_a_hidden_size_of_one_passes_and_a_millionth_does_not(pool, norm, mesh):
    """Under a norm of one channel every gradient below it is zero but for what cancellation leaves."""
    case = user_cases(config_from({"model": {"norm": norm}}), [parse_mesh(mesh)], 3)[0]
    case = replace(case, config=case.config.replace({"model.hidden_size": 1}))
    outcome = check(pool, case, 3)
    assert outcome.passed, outcome
    assert not check(pool, case, 1, plant=gradients_a_millionth_off).passed


@pytest.mark.parametrize("mesh", ["dp2", "tp2-cp2"])
def test_a_batch_with_one_trained_token_passes(pool, mesh):
    """Most of the ranks train nothing."""
    case = replace(user_cases(config_from({}), [parse_mesh(mesh)], 2)[0], valid="one")
    outcome = check(pool, case, 2)
    assert outcome.passed and outcome.loss == outcome.loss, outcome


@pytest.mark.parametrize("optimizer", [pytest.param("sgd", marks=pytest.mark.full), "adamw"])
def test_a_rate_at_which_training_diverges_is_lowered(pool, optimizer):
    config = config_from({"optimizer": {"name": optimizer, "lr": 1e3}, "lr_schedule": {"min_lr": 1.0}})
    outcome = check(pool, user_cases(config, [parse_mesh("dp2")], 3)[0], 3)
    assert outcome.passed, outcome
