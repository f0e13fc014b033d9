"""Initial values: a rectangle on any rank is that part of the whole tensor, tile by tile."""

import itertools

import numpy as np
import pytest
import torch

from megafour.parallel.random import address, normal_rectangle
from megafour.verify.reference import tiled_normal


@pytest.mark.parametrize("tile", [5, 256])
def test_a_rectangle_of_initial_values_is_that_part_of_the_whole(tile):
    """At offsets before, on and after the edges of tiles, in both dims, against the tensor put together by hand."""
    shape = (2 * tile + 3, tile + 7)
    whole = tiled_normal(7, "weight", shape, tile)
    edges = [sorted({0, 1, tile - 1, tile, tile + 1, min(2 * tile, n - 1), n}) for n in shape]
    for rows in itertools.combinations(edges[0], 2):
        for columns in itertools.combinations(edges[1], 2):
            offset, size = (rows[0], columns[0]), (rows[1] - rows[0], columns[1] - columns[0])
            got = normal_rectangle(7, "weight", offset, size, tile)
            assert torch.equal(got, whole[slice(*rows), slice(*columns)]), (offset, size)
    line = tiled_normal(7, "bias", (3 * tile,), tile)
    for a, b in itertools.combinations((0, 1, tile - 1, tile, tile + 1, 3 * tile), 2):
        assert torch.equal(normal_rectangle(7, "bias", (a,), (b - a,), tile), line[a:b])


def test_each_tile_of_initial_values_has_a_generator_of_its_own():
    """The definition, element by element."""
    tile, shape = 4, (9, 10)
    got = normal_rectangle(3, "w", (0, 0), shape, tile)
    for i, j in np.ndindex(*shape):
        generator = torch.Generator().manual_seed(address(3, "w", i // tile, j // tile))
        assert got[i, j] == torch.empty(tile, tile).normal_(generator=generator)[i % tile, j % tile]
