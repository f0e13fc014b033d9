"""Rules on how a sequence is split: length against layout and mesh, heads against ulysses, keys against the method."""

import math
from collections.abc import Iterator

from megafour.config.schema import Config


def ulysses_ranks(config: Config) -> int:
    """Ranks that split heads: parallel.context.ulysses, or what `auto` stands for."""
    context, cp = config.parallel.context, config.parallel.cp
    if context.ulysses != "auto":
        return int(context.ulysses)
    if context.method == "ulysses":
        return cp
    return math.gcd(cp, max(config.model.kv_heads // config.parallel.tp, 1)) if context.method == "usp" else 1


def context_rules(config: Config) -> Iterator[str]:
    """One message for each broken rule."""
    yield from _sequence(config)
    yield from _ulysses(config)
    yield from _inner_ring(config)


def multiples(value: int, unit: int) -> str:
    """The multiples of `unit` on both sides of `value`, in words."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


def _sequence(config: Config) -> Iterator[str]:
    seq, cp, tp = config.data.seq_length, config.parallel.cp, config.parallel.tp
    layout = config.parallel.context.layout
    unit, shown = (2 * cp, f"2 · parallel.cp {cp}") if layout == "zigzag" else (cp, f"parallel.cp {cp}")
    if cp > 1 and seq % unit:
        yield (f"{layout}: data.seq_length {seq} is not a multiple of {shown} = {unit}; set data.seq_length to "
               f"{multiples(seq, unit)}, or change parallel.cp")
    elif config.parallel.sequence_parallel and tp > 1 and seq // cp % tp:
        yield (f"sequence parallel: data.seq_length {seq} / parallel.cp {cp} = {seq // cp} is not a multiple of "
               f"parallel.tp {tp}; change data.seq_length or set parallel.sequence_parallel=false")


def _ulysses(config: Config) -> Iterator[str]:
    context, cp, tp = config.parallel.context, config.parallel.cp, config.parallel.tp
    ranks, heads = ulysses_ranks(config), config.model.num_attention_heads
    if context.method not in ("ulysses", "usp"):
        if ranks != 1:
            yield (f"parallel.context.ulysses = {ranks} contradicts parallel.context.method = {context.method}, which "
                   "splits no heads; set parallel.context.ulysses=auto, or parallel.context.method=usp")
        return
    if context.method == "ulysses" and ranks != cp:
        yield (f"parallel.context.ulysses = {ranks} contradicts parallel.context.method = ulysses, in which all of "
               f"parallel.cp {cp} split heads; set parallel.context.ulysses=auto, or parallel.context.method=usp")
    elif cp % ranks:
        yield (f"cp = ring · ulysses: parallel.cp {cp} is not a multiple of parallel.context.ulysses {ranks}; change "
               "one of them")
    elif heads % (tp * ranks):
        yield (f"query heads per rank: model.num_attention_heads {heads} is not a multiple of parallel.tp {tp} · "
               f"parallel.context.ulysses {ranks} = {tp * ranks}; lower parallel.context.ulysses (method usp), or use "
               "parallel.context.method=ring")


def _inner_ring(config: Config) -> Iterator[str]:
    context, cp = config.parallel.context, config.parallel.cp
    inner = context.inner_ring
    if context.method != "double_ring":
        if inner is not None:
            yield (f"parallel.context.inner_ring = {inner} contradicts parallel.context.method = {context.method}, "
                   "which has one ring; set it to null, or parallel.context.method=double_ring")
    elif inner is None:
        yield ("parallel.context.method = double_ring needs parallel.context.inner_ring, the ranks of the ring inside "
               f"a node: cp = outer ring · inner ring, so set it to a divisor of parallel.cp {cp}")
    elif cp % inner:
        yield (f"cp = outer ring · inner ring: parallel.cp {cp} is not a multiple of parallel.context.inner_ring "
               f"{inner}; change one of them")
