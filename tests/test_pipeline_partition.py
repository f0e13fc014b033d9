"""Layers to stages: optimal against exhaustive search, the yardstick's 6/2, explicit counts and what is refused."""

from itertools import combinations
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megafour.parallel.pipeline.actions import Placement
from megafour.parallel.pipeline.partition import balanced, explicit, partition, partition_layers

LLAMA = SimpleNamespace(num_layers=8, hidden_size=512, num_attention_heads=8, kv_heads=4, head_size=64,
                        ffn_hidden_size=1408, activation="swiglu", vocab_size=32000)


def counts(spans):
    return [count for _, count in spans]


def test_the_head_weighs_as_much_as_layers():
    assert partition(LLAMA, 1024, 2) == [(0, 6), (6, 2)]
    assert counts(partition(LLAMA, 1024, 4)) == [2, 2, 3, 1]
    assert partition(LLAMA, 1024, 1) == [(0, 8)]
    assert counts(partition(LLAMA, 1024, 8)) == [1] * 8


def test_recomputed_layers_weigh_more():
    assert counts(partition(LLAMA, 1024, 2, recompute="full")) == [6, 2]
    heavy = SimpleNamespace(**{**vars(LLAMA), "num_layers": 16})
    assert counts(partition(heavy, 1024, 2)) == [10, 6]
    assert counts(partition(heavy, 1024, 2, recompute="full")) == [10, 6]
    assert counts(partition(heavy, 8192, 2)) == [9, 7]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.data(), st.integers(0, 60), st.integers(0, 90))
def test_optimal_and_whole(costs, data, first, last):
    stages = data.draw(st.integers(1, len(costs)))

    def price(cuts):
        edges = [0, *cuts, len(costs)]
        loads = [sum(costs[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
        loads[0] += first
        loads[-1] += last
        return max(loads), sum(load * load for load in loads)

    spans = balanced(costs, stages, first, last)
    assert [layer for start, count in spans for layer in range(start, start + count)] == list(range(len(costs)))
    assert min(counts(spans)) >= 1
    every = combinations(range(1, len(costs)), stages - 1)
    assert price([start for start, _ in spans[1:]]) == min(price(cuts) for cuts in every)


def test_explicit():
    assert explicit([3, 4, 1], 8, 3) == [(0, 3), (3, 4), (7, 1)]
    with pytest.raises(ValueError, match=r"2 counts for 3 stages: \[4, 4\]"):
        explicit([4, 4], 8, 3)
    with pytest.raises(ValueError, match=r"without layers: \[8, 0\]"):
        explicit([8, 0], 8, 2)
    with pytest.raises(ValueError, match=r"4 \+ 3 = 7 is not num_layers = 8"):
        explicit([4, 3], 8, 2)
    with pytest.raises(ValueError, match="2 layers cannot fill 3 stages"):
        balanced([1, 1], 3)


def test_from_the_configuration():
    def config(asked, vocab):
        return SimpleNamespace(model=SimpleNamespace(**{**vars(LLAMA), "vocab_size": vocab}),
                               data=SimpleNamespace(seq_length=1024), train=SimpleNamespace(recompute="none"),
                               parallel=SimpleNamespace(pipeline=SimpleNamespace(partition=asked)))

    assert partition_layers(config("auto", "auto"), Placement.looped(2), 32000) == [(0, 6), (6, 2)]
    assert partition_layers(config([3, 5], "auto"), Placement.looped(2)) == [(0, 3), (3, 5)]
    assert partition_layers(config("auto", "auto"), Placement.looped(1)) == [(0, 8)]
