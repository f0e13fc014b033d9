"""The nine primitives against plain arithmetic, the ledger's convention, and the exchange's backward."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch

from megafour.comm import primitives, regions
from megafour.comm.group import solo
from megafour.comm.ledger import Ledger
from megafour.comm.objects import gather_objects
from megafour.mesh import Mesh


def everything(rank: int, world: int) -> dict:
    """Each primitive once on `[world, 6]` doubles: results and ledger."""
    ledger = Ledger()
    group = Mesh.build(tp=world, ledger=ledger).group("tp")
    x = torch.arange(world * 6, dtype=torch.float64).view(world, 6) + 100 * rank
    out = {
        "all_reduce": primitives.all_reduce(x.clone(), group),
        "max": primitives.all_reduce(x.clone(), group, op="max", async_op=True).wait(),
        "all_gather": primitives.all_gather(x, group, dim=1),
        "reduce_scatter": primitives.reduce_scatter(x, group, dim=0),
        "broadcast": primitives.broadcast(x.clone(), group, src=1),
        "reduce": primitives.reduce(x.clone(), group, dst=1),
        "scatter": primitives.scatter(x, group, src=1),
        "gather": primitives.gather(x, group, dst=1),
        "all_to_all": primitives.all_to_all(x, group),
        "send_recv": primitives.send_recv([(x, (rank + 1) % world)], [(torch.empty_like(x), (rank - 1) % world)],
                                          group).wait()[0],
    }
    return {"out": {k: None if v is None else v.tolist() for k, v in out.items()}, "rows": ledger.rows()}


@pytest.mark.parametrize("world", [2, 4])
def test_primitives_and_their_bytes(pool, world: int) -> None:
    results = pool.run(everything, world)
    xs = [torch.arange(world * 6, dtype=torch.float64).view(world, 6) + 100 * r for r in range(world)]
    total, nbytes = sum(xs), world * 6 * 8
    for rank, result in enumerate(results):
        out = {k: None if v is None else torch.tensor(v, dtype=torch.float64) for k, v in result["out"].items()}
        assert out["all_reduce"].equal(total) and out["max"].equal(xs[-1])
        assert out["all_gather"].equal(torch.cat(xs, 1))
        assert out["reduce_scatter"].equal(total[rank : rank + 1])
        assert out["broadcast"].equal(xs[1]) and out["scatter"].equal(xs[1][rank : rank + 1])
        assert out["all_to_all"].equal(torch.cat([x[rank : rank + 1] for x in xs]))
        assert out["send_recv"].equal(xs[rank - 1])
        assert out["gather"].equal(torch.cat(xs)) if rank == 1 else out["gather"] is None
        assert rank != 1 or out["reduce"].equal(total)
        counted = {primitive: count for _, primitive, _, _, count in result["rows"]}
        n = world
        assert counted["all_reduce"] == 2 * round(2 * (n - 1) / n * nbytes)  # two calls
        assert counted["all_gather"] == (n - 1) * nbytes
        assert counted["reduce_scatter"] == (n - 1) * nbytes // n
        assert counted["all_to_all"] == nbytes * (n - 1) // n
        assert counted["send_recv"] == nbytes
        assert counted.get("broadcast") == ((n - 1) * nbytes if rank == 1 else None)
        assert counted.get("gather") == (None if rank == 1 else nbytes)


def exchanged(rank: int, world: int) -> float:
    """|<f(x), y> - <x, f*(y)>| over all ranks for the all-to-all and its backward."""
    group = Mesh.build(tp=world).group("tp")
    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    out = regions.exchange(x, group)
    y = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(50 + rank))
    out.backward(y)
    sums = torch.stack([(out.detach() * y).sum(), (x.detach() * x.grad).sum()])
    primitives.all_reduce(sums, group)
    return abs(float(sums[0] - sums[1]))


def test_the_exchange_is_the_adjoint_of_its_backward(pool) -> None:
    assert max(pool.run(exchanged, 4)) < 1e-10


def test_a_group_of_one_moves_nothing() -> None:
    x = torch.ones(3)
    group = solo("tp")
    assert primitives.all_reduce(x, group) is x and primitives.all_gather(x, group) is x
    assert primitives.reduce_scatter(x, group, async_op=True).wait() is x and regions.exchange(x, group) is x


def through_channels(rank: int, world: int) -> list[float]:
    """What came from the neighbours before and behind, where each direction has a group of its own as on GPUs."""
    from megafour import mesh as grid

    pp = Mesh.build(pp=world).group("pp")
    found, heard = grid._channels(pp), []
    for step in (1, -1):
        target, source = (rank + step) % world, (rank - step) % world
        there, here = found[f"pp:{rank}>{target}"], found[f"pp:{source}>{rank}"]
        x, got = torch.full((1,), float(rank)), torch.empty(1)
        came = primitives.send_recv([], [(got, here.ranks.index(source))], here)
        primitives.send_recv([(x, there.ranks.index(target))], [], there).wait()
        came.wait()
        heard.append(float(got))
    return heard


@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_each_direction_between_stages_has_a_group_that_both_ends_find(pool, world: int) -> None:
    """torch names a group by how many its maker has: unequal numbers would let the two ends wait for ever."""
    assert pool.run(through_channels, world) == [
        [(rank - 1) % world, (rank + 1) % world] for rank in range(world)]


def late_values(rank: int, world: int) -> tuple[list[int], float, float]:
    """What every rank gave, the last one half a second late; how long this rank waited; rows in the ledger."""
    mesh = Mesh.build(tp=world, ledger=Ledger())
    gather_objects(0, mesh.group("world"))
    mesh.waits.take()
    if rank == world - 1:
        time.sleep(0.5)
    return gather_objects(rank, mesh.group("world")), mesh.waits.take(), len(mesh.ledger.rows())


def test_waiting_for_values_is_no_time_of_ones_own_and_no_traffic(pool) -> None:
    (values, first, _), (_, last, rows) = pool.run(late_values, 2)
    assert values == [0, 1] and first > 0.4 and last < 0.4 and rows == 0


def timeouts(rank: int, world: int) -> set[timedelta]:
    """Of every process group in this process, once the mesh's were shortened."""
    mesh = Mesh.build(tp=world)
    assert mesh.kv_replicas(2) is mesh.kv_replicas(2) and mesh.kv_replicas(2).size == world // 2
    mesh.shorten_timeout(timedelta(seconds=77))
    groups = [mesh.kv_replicas(2), *mesh.groups.values()]
    return {group.pg._get_backend(torch.device("cpu")).options._timeout for group in groups if group.pg is not None}


def test_a_shorter_timeout_reaches_every_group(pool) -> None:
    assert pool.run(timeouts, 4) == [{timedelta(seconds=77)}] * 4
