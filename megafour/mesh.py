"""The grid of process groups: a value built once from the launch, and handed down explicitly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megafour.comm.group import Group, Lane
from megafour.comm.ledger import Ledger
from megafour.comm.waits import Waits
from megafour.config.launch import Launch
from megafour.config.parallel_schema import AXES, ORDERS

DERIVED = {
    "cp": ("ulysses", "ring"),  # who shares one sequence
    "dp_cp": ("ulysses", "ring", "dp"),  # who holds the same weights: gradients and losses are summed here
}
"""Groups made of several axes, each named by its use."""

OF_LAYERS = ("tp", "ulysses", "ring", "ring_inner", "ring_outer")
"""Groups over which a micro-batch's own forward and backward go."""

Known = dict[tuple[int, ...], dist.ProcessGroup | None]
"""Process groups by their ranks."""


def device_of(launch: Launch, wanted: str = "auto") -> torch.device:
    """The device of this rank: `auto` takes GPUs only where there is one for every local rank."""
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= launch.local_world
    if wanted == "cuda" or (wanted == "auto" and enough):
        return torch.device("cuda", launch.local_rank)
    return torch.device("cpu")


@dataclass(frozen=True)
class Mesh:
    """A DP×PP×TP×CP grid seen from one rank; cp = ring × ulysses. Two meshes can live in one process."""

    sizes: dict[str, int]
    coords: dict[str, int]
    rank: int
    device: torch.device
    groups: dict[str, Group] = field(repr=False)
    ledger: Ledger | None = None
    waits: Waits = field(default_factory=Waits, repr=False)
    """What this rank waits for, on all of its groups."""
    lane: Lane | None = field(default=None, repr=False)
    """Where the layers' groups have twins: how a second thread says that it goes over those."""

    @property
    def world(self) -> int:
        """Number of ranks in the grid."""
        return self.groups["world"].size

    @property
    def dp(self) -> int:
        """Data-parallel degree."""
        return self.sizes["dp"]

    @property
    def pp(self) -> int:
        """Pipeline-parallel degree."""
        return self.sizes["pp"]

    @property
    def tp(self) -> int:
        """Tensor-parallel degree."""
        return self.sizes["tp"]

    @property
    def cp(self) -> int:
        """Context-parallel degree, ring × ulysses."""
        return self.sizes["ring"] * self.sizes["ulysses"]

    @property
    def cp_rank(self) -> int:
        """This rank's place in the layout of a sequence: ulysses ranks adjacent, whatever the order of ranks."""
        return self.coords["ring"] * self.sizes["ulysses"] + self.coords["ulysses"]

    def group(self, name: str) -> Group:
        """The group called `name`: an axis, `cp`, `dp_cp`, `shard`, `replicas`, `embedding` or `world`."""
        return self.groups[name]

    def channel(self, source: int, target: int) -> Group:
        """The group that carries what one pipeline rank (an index of the group `pp`) sends to another.

        On GPUs the neighbours have one of their own for each direction: NCCL runs the transfers of one communicator
        one after another, and one that waits for its receiver must not hold up those that go elsewhere.
        """
        return self.groups.get(f"pp:{source}>{target}", self.groups["pp"])

    def describe(self) -> str:
        """`rank 12 (pp1-tp0)`: only the axes larger than one."""
        parts = [f"{axis}{self.coords[axis]}" for axis in ("dp", "pp", "tp") if self.sizes[axis] > 1]
        if self.cp > 1:
            parts.append(f"cp{self.cp_rank}")
        return f"rank {self.rank}" + (f" ({'-'.join(parts)})" if parts else "")

    @property
    def words(self) -> str:
        """The mesh in words, `dp2-pp2-tp2-cp2`; `dp1` for a world of one."""
        degrees = {"dp": self.dp, "pp": self.pp, "tp": self.tp, "cp": self.cp}
        return "-".join(f"{axis}{n}" for axis, n in degrees.items() if n > 1) or "dp1"

    @classmethod
    def single(cls, device: torch.device | None = None, ledger: Ledger | None = None) -> Mesh:
        """The grid of one process."""
        return cls.build(device=device, ledger=ledger)

    @classmethod
    def build(cls, *, dp: int = 1, pp: int = 1, tp: int = 1, cp: int = 1, ulysses: int = 1, inner_ring: int = 1,
              zero_size: int | None = None, order: str = "auto", device: torch.device | None = None,
              ledger: Ledger | None = None, rank: int | None = None, two_lanes: bool = False) -> Mesh:
        """Build the grid over the default process group (a world of one needs none).

        Args:
            dp, pp, tp, cp: degrees of the axes; ulysses divides cp.
            inner_ring: adjacent ranks of the ring that form an inner one; divides cp / ulysses.
            zero_size: nearest ranks of dp×cp that form the group `shard`, and strides of it the group `replicas`; None:
                all of them.
            order: a name of ORDERS, or the axes joined by `-`, fastest first.
            device: where this rank computes.
            ledger: counts the traffic of every group; None counts nothing.
            rank: build the grid as this rank would see it, of any size and without process groups: for plans and
                shapes, nothing can be sent over it.
            two_lanes: give the groups that layers use twins, so that a forward can run beside a backward.
        Raises:
            ValueError: if dp·pp·tp·cp is not the world's size, or the order is no permutation of the axes.
        """
        device = device or torch.device("cpu")
        sizes = {"tp": tp, "ulysses": ulysses, "ring": cp // ulysses, "dp": dp, "pp": pp}
        imagined = rank is not None
        here, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if rank is not None:
            here, world = rank, dp * pp * tp * cp
        axes = ORDERS.get(order) or tuple(order.split("-"))
        if sorted(axes) != sorted(AXES):
            raise ValueError(f"parallel.order={order}: not a permutation of {'-'.join(AXES)}")
        if dp * pp * tp * cp != world:
            raise ValueError(f"world {world} is not dp {dp} × pp {pp} × tp {tp} × cp {cp} = {dp * pp * tp * cp}")
        slow_first = axes[::-1]
        grid = torch.arange(world).view([sizes[a] for a in slow_first])
        coords = dict(zip(slow_first, (grid == here).nonzero()[0].tolist(), strict=True))
        groups, known = _make_groups(grid, slow_first, here, device, ledger, imagined)
        cut: dict[tuple[str, str], tuple[tuple[str, ...], int | None]] = {
            ("ring_inner", "ring_outer"): (("ring",), inner_ring), ("shard", "replicas"): (DERIVED["dp_cp"], zero_size)}
        for names, (dims, size) in cut.items():
            for name, ranks in zip(names, _cut(_slices(grid, slow_first, dims), size), strict=True):
                groups[name] = _new_group(name, ranks, here, ledger, known)
        for name in ("shard", "replicas"):
            if groups[name].ranks == groups["dp_cp"].ranks:     # then it is counted under that name
                groups[name] = groups["dp_cp"]
        for name in ("ring", "ring_inner", "ring_outer"):
            if groups[name].pg is not None and device.type == "cpu":
                groups[name] = replace(groups[name], poster=ThreadPoolExecutor(1, f"{name}-poster"))
        waits = Waits()
        groups = {name: replace(group, waits=waits) for name, group in groups.items()}
        lane = Lane() if two_lanes else None
        if lane is not None:
            waits.beside = Waits()
            aside = Ledger("forward", ledger.counts) if ledger is not None else None
            groups |= _twins({name: groups[name] for name in OF_LAYERS}, lane, waits.beside, aside)
        return cls(sizes, coords, here, device, groups, ledger, waits, lane)

    def kv_replicas(self, num_kv_heads: int) -> Group:
        """The tp ranks that hold the same K/V heads (tp > K/V heads); a group of one elsewhere.

        Made at the first call, which all ranks make together, and one of the mesh's groups from then on.
        """
        name = f"kv {num_kv_heads}"
        if name in self.groups:
            return self.groups[name]
        tp = self.group("tp")
        width = tp.size // num_kv_heads if tp.size > num_kv_heads else 1
        first = tp.rank // width * width
        ranks = tp.ranks[first:first + width]
        known: Known = {tp.ranks: tp.pg}
        if tp.pg is None:
            known[ranks] = None
        self.groups[name] = replace(_new_group("kv", [ranks], self.rank, self.ledger, known), waits=self.waits)
        return self.groups[name]

    def shorten_timeout(self, timeout: timedelta) -> None:
        """From the long timeout of start-up to that of steady steps, on every group."""
        for group in (*self.groups.values(), *(group.twin for group in self.groups.values() if group.twin)):
            if group.pg is not None:
                dist.distributed_c10d._set_pg_timeout(timeout, group.pg)


def _make_groups(grid: torch.Tensor, dims: tuple[str, ...], rank: int, device: torch.device,
                 ledger: Ledger | None,
                 imagined: bool) -> tuple[dict[str, Group], Known]:
    """Every named group that `rank` is in, and the process groups by ranks: groups of the same ranks share one."""
    world = tuple(range(grid.numel()))
    known: Known = defaultdict(lambda: None) if imagined else {}
    if len(world) > 1 and not imagined:
        known[world] = dist.group.WORLD
        large = [d for d in dims if grid.shape[dims.index(d)] > 1]
        device_mesh = DeviceMesh(device.type, grid.squeeze(), mesh_dim_names=tuple(large))
        for name in large:
            pg = device_mesh.get_group(name)
            known[tuple(dist.get_process_group_ranks(pg))] = pg
    groups = {}
    for name, axes in {**{d: (d,) for d in dims}, **DERIVED}.items():
        groups[name] = _new_group(name, _slices(grid, dims, axes), rank, ledger, known)
    stages = _slices(grid, dims, ("pp",))
    groups["embedding"] = _new_group("embedding", [(r[0], r[-1]) if len(r) > 1 else r for r in stages], rank, ledger,
                                     known)
    if device.type == "cuda" and not imagined:
        groups |= _channels(groups["pp"])
    groups["world"] = Group("world", world, rank, known.get(world), ledger)
    return groups, known


def _channels(pp: Group) -> dict[str, Group]:
    """A group of two for each direction between neighbours on the ring of pipeline ranks.

    In turns, in each of which a rank is in one pair, or in a group of its own: see `_new_group`.
    """
    found, size = {}, pp.size
    links = [(first, (first + 1) % size) for first in range(size if size > 2 else size - 1)]
    even = size - size % 2      # the last link of an odd ring has a rank in each of the two turns before it
    for turn in (links[:even:2], links[1:even:2], links[even:]):
        pair = next((link for link in turn if pp.rank in link), (pp.rank, pp.rank))
        for source, target in (pair, pair[::-1]) if turn else ():
            ranks = tuple(sorted({pp.ranks[source], pp.ranks[target]}))
            name = f"pp:{source}>{target}"
            group = dist.new_group(list(ranks), use_local_synchronization=True, group_desc=name)
            if source != target:
                found[name] = Group("pp", ranks, ranks.index(pp.ranks[pp.rank]), group, pp.ledger)
    return found


def _twins(groups: dict[str, Group], lane: Lane, waits: Waits, ledger: Ledger | None) -> dict[str, Group]:
    """The same groups, those of two ranks or more each with a twin that has its own waits and its own ledger."""
    known: Known = {}
    found = {}
    for name, group in groups.items():
        if group.pg is None:
            continue
        twin = _new_group(name, [group.ranks], group.ranks[group.rank], ledger, known)
        poster = ThreadPoolExecutor(1, f"{name}-poster-2") if group.poster is not None else None
        found[name] = replace(group, lane=lane, twin=replace(twin, poster=poster, waits=waits))
    return found


def _cut(slices: list[tuple[int, ...]], size: int | None) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """(`size` neighbours of each slice, the strides of it across them); None: the whole slice, and single ranks."""
    size = size or len(slices[0])
    return ([ranks[i:i + size] for ranks in slices for i in range(0, len(ranks), size)],
            [ranks[i::size] for ranks in slices for i in range(size)])


def _slices(grid: torch.Tensor, dims: tuple[str, ...], axes: Iterable[str]) -> list[tuple[int, ...]]:
    """The rank lists that differ only along `axes`, ascending, as torch sorts the members of a group."""
    inside = sorted(dims.index(a) for a in axes)
    outside = [i for i in range(grid.dim()) if i not in inside]
    width = 1
    for i in inside:
        width *= grid.shape[i]
    return [tuple(row) for row in grid.permute(*outside, *inside).reshape(-1, width).tolist()]


def _new_group(name: str, candidates: list[tuple[int, ...]], rank: int, ledger: Ledger | None,
               known: Known) -> Group:
    """The one of `candidates` that holds `rank`, over a new process group unless the same ranks have one already.

    A rank in none of them makes a group of its own, for torch's name of a group holds the number of groups that its
    maker had, and its members would wait for each other under different names.
    """
    imagined = isinstance(known, defaultdict)
    ranks = next((c for c in candidates if rank in c), (rank,))
    if len(ranks) == 1:
        if ranks not in candidates and not imagined:
            dist.new_group([rank], use_local_synchronization=True, group_desc=name)
        return Group(name, ranks=ranks, rank=0, ledger=ledger)
    if ranks not in known and not imagined:
        # Only members call, so ranks outside need not know of the group and nobody waits for the whole world.
        known[ranks] = dist.new_group(list(ranks), use_local_synchronization=True, group_desc=name)
    return Group(name, ranks, ranks.index(rank), known[ranks], ledger)
