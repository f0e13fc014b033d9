"""The pool of ranks: results in order, failures named, hangs reported and survived."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megafour.verify.pool import Pool, RankError


def total(rank: int, world: int, base: float) -> float:
    x = torch.full((3,), base + rank)
    dist.all_reduce(x)
    return x[0].item()


def fails_on_one(rank: int, world: int) -> None:
    if rank == 1:
        raise KeyError("layers.3")
    dist.barrier()


def fails_on_all(rank: int, world: int) -> None:
    dist.barrier()
    raise KeyError("layers.3")


def process(rank: int, world: int) -> int:
    return os.getpid()


def hangs_on_one(rank: int, world: int) -> None:
    if rank == 2:
        time.sleep(600)


def connects_and_ends(rank: int, world: int) -> None:
    """A rank whose side of the connection stands has nothing left to do, while its peer may still be at it."""
    if rank > 1:
        dist.new_group([2, 3], use_local_synchronization=True)


def ends_while_its_peer_waits(rank: int, world: int) -> None:
    if rank == 1:
        dist.barrier()


def dies_on_one(rank: int, world: int) -> None:
    if rank == 0:
        os.abort()


def spoils_its_process(rank: int, world: int) -> None:
    os.environ["MEGAFOUR_SPOILED"] = "1"
    torch.set_default_dtype(torch.float64)


def is_clean(rank: int, world: int) -> bool:
    return "MEGAFOUR_SPOILED" not in os.environ and torch.get_default_dtype() == torch.float32


@pytest.fixture(scope="module")
def ranks():
    with Pool(4) as pool:
        yield pool


def test_worlds_of_any_size_after_the_caller_used_tensors(ranks):
    torch.randn(512, 512) @ torch.randn(512, 512)
    assert ranks.run(total, 4, 1.0) == [10.0] * 4
    assert ranks.run(total, 2, 1.0) == [3.0] * 2
    assert ranks.run(total, 1, 5.0) == [5.0]
    with pytest.raises(ValueError, match="4 ranks"):
        ranks.run(total, 5, 1.0)


def test_a_failure_names_its_rank_and_the_pool_goes_on(ranks):
    with pytest.raises(RankError, match=r"rank 1: KeyError: 'layers.3'") as caught:
        ranks.run(fails_on_one, 3)
    assert (caught.value.rank, caught.value.kind) == (1, "KeyError")
    assert "fails_on_one" in str(caught.value)
    assert ranks.run(total, 3, 0.0) == [3.0] * 3


def test_ranks_that_fail_all_at_once_are_replaced(ranks):
    """Those that stay have half-closed connections, over which the next call hangs now and then."""
    for _ in range(5):
        before = ranks.run(process, 4)
        with pytest.raises(RankError, match="KeyError"):
            ranks.run(fails_on_all, 4)
        after = ranks.run(process, 4, timeout=60)
        assert not {*before} & {*after} and ranks.run(process, 4) == after
    wait_until_gone(before)


def wait_until_gone(pids: list[int]) -> None:
    end = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.full
def test_a_hundred_failures_of_all_ranks_never_make_the_next_call_hang(ranks):
    for _ in range(100):
        with pytest.raises(RankError, match="KeyError"):
            ranks.run(fails_on_all, 4)
        assert ranks.run(total, 4, 0.0, timeout=60) == [6.0] * 4


def test_a_hang_shows_where_and_the_pool_is_rebuilt(ranks):
    with pytest.raises(TimeoutError, match=r"1 of 3 ranks did not end within 8 s") as caught:
        ranks.run(hangs_on_one, 3, timeout=8)
    assert "rank 2:" in str(caught.value) and "hangs_on_one" in str(caught.value)
    assert ranks.run(total, 3, 0.0) == [3.0] * 3


def test_a_dead_rank_is_named_and_the_pool_is_rebuilt(ranks):
    with pytest.raises(RankError, match="rank 0: died") as caught:
        ranks.run(dies_on_one, 2)
    assert "dies_on_one" in str(caught.value)
    assert ranks.run(total, 4, 0.0) == [6.0] * 4


def test_what_a_function_changes_does_not_reach_the_next(ranks):
    ranks.run(spoils_its_process, 2)
    assert ranks.run(is_clean, 2) == [True, True]


def test_a_rank_that_is_done_stays_until_the_others_are(ranks):
    for _ in range(50):
        ranks.run(connects_and_ends, 4)


@pytest.mark.full
def test_but_not_for_ever(ranks):
    started = time.monotonic()
    with pytest.raises(RankError, match="rank 1: RuntimeError"):
        ranks.run(ends_while_its_peer_waits, 2)
    assert time.monotonic() - started < 120
    assert ranks.run(total, 4, 0.0) == [6.0] * 4
