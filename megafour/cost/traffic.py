"""Bytes that one rank moves, by axis and primitive: the formulas that the ledger's counts are compared with.

Conventions (n = ranks of the axis, B = bytes of the whole tensor): all-reduce 2(n-1)/n·B; all-gather and
reduce-scatter (n-1)/n·B, which is (n-1) shards; all-to-all (n-1)/n·B, what goes to others; point-to-point the
payload, at its sender. Forward and backward together unless a docstring says otherwise. `e` is the bytes of an
activation's element, `w` those of what is accumulated: 4, or 8 in fp64 runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from megafour.architecture.sublayer import Collective


@dataclass
class Traffic:
    """(axis, primitive) -> calls and exact bytes of one rank."""

    entries: dict[tuple[str, str], tuple[int, Fraction]] = field(default_factory=dict)

    def __add__(self, other: Traffic) -> Traffic:
        out = dict(self.entries)
        for key, (calls, nbytes) in other.entries.items():
            had = out.get(key, (0, Fraction(0)))
            out[key] = (had[0] + calls, had[1] + nbytes)
        return Traffic(out)

    def __mul__(self, times: int) -> Traffic:
        return Traffic({key: (c * times, b * times) for key, (c, b) in self.entries.items() if times})

    def rows(self) -> Iterator[tuple[str, str, int, int]]:
        """Sorted (axis, primitive, calls, bytes)."""
        for (axis, primitive), (calls, nbytes) in sorted(self.entries.items()):
            yield axis, primitive, calls, round(nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes over all axes."""
        return round(sum((b for _, b in self.entries.values()), Fraction(0)))


def total(parts: Iterable[Traffic]) -> Traffic:
    """The sum of all parts."""
    return sum(parts, Traffic())


def collective(axis: str, primitive: str, n: int, whole: int, calls: int = 1) -> Traffic:
    """`calls` calls of all_reduce, all_gather, reduce_scatter or all_to_all on tensors of `whole` bytes over n ranks.

    `whole` is the gathered tensor of an all-gather and the summed one of a reduce-scatter. Nothing for n = 1.
    """
    if n == 1 or calls == 0:
        return Traffic()
    share = Fraction((2 if primitive == "all_reduce" else 1) * (n - 1), n)
    return Traffic({(axis, primitive): (calls, share * whole * calls)})


def sends(axis: str, calls: int, nbytes: int) -> Traffic:
    """`calls` point-to-point sends of `nbytes` bytes each."""
    return Traffic({(axis, "send_recv"): (calls, Fraction(calls * nbytes))}) if calls else Traffic()


def collectives(described: Iterable[Collective], ranks: Mapping[str, int], tokens: int, element: int) -> Traffic:
    """Collectives that sublayers describe, of a micro-batch of `tokens` tokens on this rank; `ranks` of each axis."""
    out = Traffic()
    for made in described:
        whole = tokens * made.elements * (max(4, element) if made.wide else element)
        once = collective(made.axis, made.primitive, ranks[made.axis], whole)
        out += Traffic({key: (made.calls, nbytes) for key, (_, nbytes) in once.entries.items()})
    return out


# --- context parallelism -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heads:
    """One attention as a rank of the context-parallel axis has it: sizes before any exchange."""

    tokens: int
    """Tokens held, s·b."""
    query: int
    """Query heads of this tp rank."""
    kv: int
    """K/V heads of this tp rank."""
    size: int
    element: int
    """Bytes of an element of q, k, v."""

    @property
    def wide(self) -> int:
        """Bytes of an element of dK and dV on their way: they are sums, in fp32 or fp64."""
        return max(4, self.element)

    def keys(self, element: int) -> int:
        """K and V, packed, at `element` bytes an element."""
        return 2 * self.tokens * self.kv * self.size * element

    def exchanged(self, ranks: int) -> Heads:
        """The same after the all-to-all: `ranks` times the tokens, 1/`ranks` of the heads."""
        repeated = math.lcm(self.kv, ranks)
        return replace(self, tokens=self.tokens * ranks, query=self.query // ranks, kv=repeated // ranks)


def ring(heads: Heads, rank: int, reach: Sequence[int], *, again: bool = False) -> Traffic:
    """Ring attention on `rank`; `reach[j]` is how many hops the keys of rank j travel (see `reach`).

    Forward: at step t rank r holds the keys of rank r-t and sends them on if they go further: one send of
    2·tokens·kv·d·e for each t with reach[r-t] > t. The backward sends them the same way again. dK/dV follow: they
    leave rank r once for each t at which the keys of r-t are here, in `w` bytes an element, onwards or, from their
    last rank, straight home; a rank whose keys stay at home (reach 0) sends none of its own.
    zigzag, striped: all reach n-1, so 2(n-1) sends of K/V and n of dK/dV on every rank. contiguous: reach[j] = n-1-j,
    nothing is sent backwards: 2(r+1) sends of K/V and r+1 of dK/dV on rank r, but 0 and n-1 on the last. The sum over
    ranks is half of zigzag's n·2(n-1) and n²: (n-1)·n, and (n-1)(n+2)/2.
    """
    n, steps = len(reach), max(reach)
    here = [reach[(rank - t) % n] >= t for t in range(steps + 1)]
    onwards = sum(reach[(rank - t) % n] > t for t in range(steps))
    gradients = sum(here) - (reach[rank] == 0)
    return (sends("ring", (3 if again else 2) * onwards, heads.keys(heads.element))
            + sends("ring", gradients, heads.keys(heads.wide)))


def reach(layout: str, n: int, seq_length: int, *, ulysses: int = 1, window: int | None = None) -> list[int]:
    """Per ring rank, the hops after which the last rank that sees any of its keys has had them; one document.

    A member holds the tokens of `ulysses` adjacent ranks of the layout. A query sees `window` keys, its own among
    them, so that of whole chunks of c tokens it sees those at most (window-2)//c + 1 before its own. contiguous:
    chunk j on member j. zigzag: chunks j and 2n-1-j on member j. striped: from the nearest later member i the nearest
    key is (i-1)·ulysses + 1 tokens away, also across the seam where there is a second round of stripes.
    """
    width = seq_length if window is None else window
    if layout == "striped" and seq_length > n * ulysses:
        return [min(n - 1, (width - 2) // ulysses + 1 if width > 1 else 0)] * n
    chunks = [(j, 2 * n - 1 - j) if layout == "zigzag" else (j,) for j in range(n)]
    size = seq_length // (len(chunks[0]) * n)
    far = (width - 2) // size + 1 if width > 1 else 0
    return [max(i for i in range(n)
                if any(0 <= q - k <= far for q in chunks[(j + i) % n] for k in chunks[j])) for j in range(n)]


def double_ring(heads: Heads, outer: int, inner: int, *, again: bool = False) -> Traffic:
    """Double ring, alike on every rank: every mask, every layout.

    Forward: outer rounds of inner-1 hops of K/V inside, outer-1 hops across; the backward repeats them. dK/dV go all
    the way round the inner ring in every round, outer·inner hops, and their sums all the way round the outer one,
    `outer` hops, each in `w` bytes an element. Across nodes that is 2(outer-1) and `outer` in place of a plain ring's
    2(n-1) and n.
    """
    kv, gradients, passes = heads.keys(heads.element), heads.keys(heads.wide), 3 if again else 2
    out = sends("ring_inner", passes * outer * (inner - 1), kv) + sends("ring_outer", passes * (outer - 1), kv)
    if inner > 1:
        out += sends("ring_inner", outer * inner, gradients)
    return out + sends("ring_outer", outer if outer > 1 else 0, gradients)


def ulysses(heads: Heads, ranks: int, *, again: str = "none") -> Traffic:
    """The exchanges of Ulysses over `ranks`, also those around the ring of USP.

    One all-to-all takes q, k and v together, tokens·(query + 2·lcm(kv, U))·d·e bytes of which (U-1)/U leave: with
    K/V heads a multiple of U none is repeated, with fewer each is, up to lcm. One brings the output back,
    tokens·query·d·e. The backward makes the same two the other way. Recomputing the whole block (`full`) repeats both
    forward ones; recomputing attention (`selective`) the first only, as nothing is kept of what follows the second.
    """
    there = heads.tokens * (heads.query + 2 * math.lcm(heads.kv, ranks)) * heads.size * heads.element
    back = heads.tokens * heads.query * heads.size * heads.element
    return (collective("ulysses", "all_to_all", ranks, there, 2 + (again != "none"))
            + collective("ulysses", "all_to_all", ranks, back, 2 + (again == "full")))


def all_gather(heads: Heads, n: int, *, again: bool = False) -> Traffic:
    """K/V all-gather over the ring axis, one K/V head at a time, alike on every rank.

    Each head's K and V, n·2·tokens·d·e bytes gathered, once in the forward and anew in the backward; their gradients
    are reduce-scattered, in `w` bytes an element.
    """
    one = replace(heads, kv=1)
    return (collective("ring", "all_gather", n, n * one.keys(heads.element), (3 if again else 2) * heads.kv)
            + collective("ring", "reduce_scatter", n, n * one.keys(heads.wide), heads.kv))


# --- pipeline and data parallelism -------------------------------------------------------------------------------


def pipeline(activation: int, rank: int, rank_of: Sequence[int], micro_batches: int) -> Traffic:
    """The stages of `rank` in a pipeline whose stage i lives on rank_of[i]; `activation` is bytes of one send.

    For each micro-batch a stage sends its output to the next stage and its input's gradient to the one before, unless
    they are on the same rank: 2(A)·m on a middle rank, half of it on the first and the last. `activation` is the
    shard s·b·h·e/tp under sequence parallelism.
    """
    last = len(rank_of) - 1
    out = 0
    for stage, owner in enumerate(rank_of):
        if owner == rank:
            out += sum(0 <= other <= last and rank_of[other] != rank for other in (stage - 1, stage + 1))
    return sends("pp", out * micro_batches, activation)


def data_parallel(buckets: Iterable[tuple[int, int]], n: int, *, zero_stage: int, element: int,
                  shares: int | None = None, micro_batches: int = 1, updated: bool = True) -> Traffic:
    """Gradients and weights over the n = dp·cp ranks that hold the same weights.

    N elements; gradients are `w` bytes an element whatever the weights are. ZeRO 0: each bucket is all-reduced once a
    step, 2(n-1)/n·N·w. ZeRO 1: reduce-scattered, (n-1)/n·N·w, and the updated weights are gathered, (n-1)/n·N·e: the
    same bytes in fp32, a quarter less with 16-bit weights. ZeRO 2: no rank keeps a whole gradient until the next
    micro-batch, so each of m is reduce-scattered, (n-1)/n·N·(m·w + e). ZeRO 3: weights are gathered for the forward and
    anew for the backward of each, (n-1)/n·N·m·(w + 2e), but for the matrices of embedding and head, which no backward
    reads; with m = 1 and fp32 that is half more than ZeRO 0 (Rajbhandari et al. 2020, section 7.2.2).
    Hybrid: all that is over `shares` of the ranks, and the shares of the gradients are all-reduced once a step over
    the n/shares replicas, 2(r-1)/r·N/shares·w: between nodes goes no more than that.

    Args:
        buckets: (elements, gathers in a micro-batch under ZeRO 3) of each flat bucket.
        zero_stage: 0 where `shares` is 1.
        element: bytes of a weight.
        shares: ranks that share one copy; None: all.
        updated: False for a step that was skipped.
    """
    out = Traffic()
    shares = shares or n
    inside, across = ("shard", "replicas") if shares < n else ("dp_cp", "dp_cp")
    wide = max(4, element)
    for size, gathers in buckets:
        if zero_stage == 0:
            out += collective("dp_cp", "all_reduce", n, size * wide)
            continue
        out += collective(inside, "reduce_scatter", shares, size * wide, micro_batches if zero_stage > 1 else 1)
        out += collective(across, "all_reduce", n // shares, size // shares * wide)
        again = gathers * micro_batches if zero_stage == 3 else int(updated)
        out += collective(inside, "all_gather", shares, size * element, again)
    return out
