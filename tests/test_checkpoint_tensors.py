"""Rectangles of flat ranges, and the joining of what a rank holds."""

import itertools
import math

import pytest
import torch

from megafour.checkpoint import tensors
from megafour.checkpoint.errors import CheckpointError
from megafour.checkpoint.scratch import ScratchPlanner
from megafour.checkpoint.tensors import LogicalTensor, flat_parts, rectangles, state_dict


@pytest.mark.parametrize("offset, size", [((), ()), ((3,), (7,)), ((2, 5), (4, 3)), ((1, 0), (1, 6)), ((0, 2), (5, 1)),
                                          ((1, 2, 3), (2, 3, 2))])
def test_every_flat_range_is_cut_into_its_rectangles(offset, size):
    total = math.prod(size)
    whole = tuple(o + s + 1 for o, s in zip(offset, size, strict=True))
    for start, stop in itertools.combinations_with_replacement(range(total + 1), 2):
        place = torch.full(whole, -1.0)
        found = rectangles(offset, size, start, stop)
        assert len(found) <= 2 * max(len(size), 1) - 1
        for o, s, flat in flat_parts(offset, size, start, stop, torch.arange(start, stop).float()):
            place[tuple(slice(a, a + n) for a, n in zip(o, s, strict=True))] = flat
        mine = place[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))].reshape(-1)
        expected = torch.full((total,), -1.0)
        expected[start:stop] = torch.arange(start, stop)
        assert torch.equal(mine, expected) and (place >= 0).sum() == stop - start


def test_a_range_outside_is_refused():
    with pytest.raises(ValueError, match=r"\[3, 13\)"):
        rectangles((0, 0), (4, 3), 3, 13)
    with pytest.raises(ValueError, match="needs a flat tensor of 3"):
        flat_parts((0, 0), (4, 3), 1, 4, torch.zeros(4))


def part(offset, size):
    return offset, size, torch.zeros(size)


def test_parts_under_one_name_are_joined_and_empty_ones_dropped():
    held = [LogicalTensor("a", (4, 3), torch.float32, [part((0, 0), (1, 3)), part((1, 0), (0, 3))]),
            LogicalTensor("a", (4, 3), torch.float32, [part((1, 0), (3, 3))]),
            LogicalTensor("b", (2,), torch.float32, [part((0,), (2,))], primary=False)]
    assert list(tensors.state_dict(held, primary_only=False)["a"].parts) == [(0, 0), (1, 0)]
    assert list(tensors.state_dict(held, primary_only=True)) == ["a"]


@pytest.mark.parametrize("parts, message", [
    ([part((0, 0), (2, 3)), part((0, 0), (4, 3))], "a: two parts start at"),
    ([part((2, 0), (3, 3))], "a: the part at .* leaves the logical shape"),
    ([((0, 0), (4, 3), torch.zeros(3, 4))], "a: a part at .* holds a tensor of shape"),
])
def test_parts_that_do_not_fit_are_refused_by_name(parts, message):
    with pytest.raises(CheckpointError, match=message):
        tensors.state_dict([LogicalTensor("a", (4, 3), torch.float32, parts)], primary_only=False)


def test_a_save_copies_one_tensor_at_a_time():
    """torch leaves its own copies in reference cycles: a save would hold the whole share once more."""
    flat = torch.arange(40.0)
    held = [LogicalTensor(name, (10,), torch.float32, [((0,), (10,), flat[10 * i : 10 * i + 10])])
            for i, name in enumerate("abc")]
    held.append(LogicalTensor("d", (5,), torch.float32, [((0,), (5,), flat[30:35])]))
    held.append(LogicalTensor("own", (3,), torch.float32, [((0,), (3,), own := torch.ones(3))]))
    planner = ScratchPlanner(50)
    planner.set_up_planner(dict(state_dict(held, primary_only=True)), None, True)
    items = {item.index.fqn: item for item in planner.create_local_plan().items}
    first = planner.resolve_data(items["a"])
    assert first.untyped_storage().nbytes() == 40 and first.tolist() == flat[:10].tolist()
    second = planner.resolve_data(items["b"])
    assert second.data_ptr() == first.data_ptr() and second.tolist() == flat[10:20].tolist()
    assert planner.resolve_data(items["own"]).data_ptr() == own.data_ptr()
    assert planner.resolve_data(items["d"]).tolist() == flat[30:35].tolist()
    assert first.untyped_storage().nbytes() == 0
