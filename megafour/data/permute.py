"""Pseudo-random order without memory: a bijection of [0, n), and an exact weighted interleaving of several sources."""

from __future__ import annotations

import heapq
import math
from fractions import Fraction

import numpy as np

from megafour.data.errors import DataError

MASK = (1 << 64) - 1
ROUNDS = 6
MAX_PERIOD = 1 << 20  # samples after which a blend repeats; bounds its table to 5 MiB


def mix(value: int) -> int:
    """SplitMix64's finaliser: 64 bits in, 64 well-mixed bits out."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def address(*parts: int) -> int:
    """One 64-bit value for a tuple of integers, the same on every machine and version."""
    value = 0
    for part in parts:
        value = mix((value + 0x9E3779B97F4A7C15 + (part & MASK)) & MASK)
    return value


class Permutation:
    """A bijection of [0, size) chosen by a 64-bit key: no table, any entry in microseconds, alike on all ranks.

    A Feistel network permutes the next power of two (at least 64); values that fall outside [0, size) are permuted
    again until they fall inside ("cycle walking", Black and Rogaway 2002), which keeps it a bijection and takes under
    two turns on average. A stored shuffle of a large corpus would cost every rank gigabytes, or a cache file that ranks
    and jobs race for.
    """

    def __init__(self, size: int, key: int) -> None:
        self.size = size
        bits = max(6, (size - 1).bit_length())
        self._low = bits // 2
        self._high = bits - self._low
        self._keys = [address(key, r) for r in range(ROUNDS)]

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.size:
            raise IndexError(f"{index} is outside a permutation of {self.size}")
        value = self._permute(index)
        while value >= self.size:
            value = self._permute(value)
        return value

    def _permute(self, value: int) -> int:
        low, high = self._low, self._high
        low_mask, high_mask = (1 << low) - 1, (1 << high) - 1
        for even, odd in zip(self._keys[::2], self._keys[1::2], strict=True):
            left, right = value >> low, value & low_mask
            left ^= mix((right + even) & MASK) & high_mask
            right ^= mix((left + odd) & MASK) & low_mask
            value = left << low | right
        return value


class Blend:
    """Interleaves sources by weight: after any n samples, source j has given n x weight_j of them to within one sample.

    The order is that of Tijdeman's chairman assignment (1980), whose largest deviation is 1 - 1/(2k-2) for k sources:
    item m of source j becomes eligible at (m + d)/w_j and the eligible item with the earliest (m + 1 - d)/w_j goes
    next, d = 1/(2k-2). Weights are taken as the decimal numbers that were written. Over a common denominator L the
    order repeats every L samples, so a source's own position follows from the global index alone. Where L would exceed
    2^20, weights are rounded to multiples of 2^-20.
    """

    def __init__(self, weights: list[float]) -> None:
        self.counts = _counts(weights)
        self.period = sum(self.counts)
        self._source, self._rank = _tijdeman(self.counts)

    def locate(self, index: int) -> tuple[int, int]:
        """The source of global sample `index`, and its position among that source's own samples."""
        turn, place = divmod(index, self.period)
        source = int(self._source[place])
        return source, turn * self.counts[source] + int(self._rank[place])

    def count(self, source: int, samples: int) -> int:
        """How many of the first `samples` samples are the source's."""
        turns, rest = divmod(samples, self.period)
        return turns * self.counts[source] + int((self._source[:rest] == source).sum())


def _counts(weights: list[float]) -> list[int]:
    """Whole numbers in the ratio of the weights, their sum at most MAX_PERIOD."""
    exact = [Fraction(repr(weight)) if isinstance(weight, float) else Fraction(weight) for weight in weights]
    if not exact or any(weight <= 0 for weight in exact):
        raise DataError(f"weights of a blend must be positive numbers, found {weights}")
    total = sum(exact)
    shares = [weight / total for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period > MAX_PERIOD:
        shares, period = _rounded(shares), MAX_PERIOD
    return [int(share * period) for share in shares]


def _rounded(shares: list[Fraction]) -> list[Fraction]:
    """Multiples of 1/MAX_PERIOD that sum to one, each at least one such part; the largest remainders are rounded up."""
    floors = [max(1, int(share * MAX_PERIOD)) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda j: floors[j] - shares[j] * MAX_PERIOD)
    missing = MAX_PERIOD - sum(floors)
    for j in by_remainder[: max(0, missing)]:
        floors[j] += 1
    if missing < 0:  # many tiny weights were raised to one part: the largest source gives those up
        floors[max(range(len(shares)), key=lambda j: floors[j])] += missing
    return [Fraction(count, MAX_PERIOD) for count in floors]


def _tijdeman(counts: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """One period of the order: source u16 [L] and position within the source's period u32 [L]."""
    period, scale = sum(counts), max(1, 2 * len(counts) - 2)
    source = np.zeros(period, np.uint16 if len(counts) > 256 else np.uint8)
    rank = np.zeros(period, np.uint32)
    if len(counts) == 1:
        rank[:] = np.arange(period)
        return source, rank

    def release(j: int, m: int) -> int:  # first slot, counted from 1, in which item m of source j may go
        return -(-(m * scale + 1) * period // (scale * counts[j]))

    waiting = [(release(j, 0), j, 0) for j in range(len(counts))]
    heapq.heapify(waiting)
    eligible: list[tuple[float, int, int]] = []
    for slot in range(1, period + 1):
        while waiting and waiting[0][0] <= slot:
            _, j, m = heapq.heappop(waiting)
            heapq.heappush(eligible, (((m + 1) * scale - 1) / counts[j], j, m))
        _, j, m = heapq.heappop(eligible)
        source[slot - 1], rank[slot - 1] = j, m
        if m + 1 < counts[j]:
            heapq.heappush(waiting, (release(j, m + 1), j, m + 1))
    return source, rank
