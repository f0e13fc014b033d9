"""What is gathered and reduced together: one block, embedding or head of one virtual stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from megafour.cost.parameters import Parameter, parameter_of
from megafour.parallel.pieces import pieces_of, read_by_backward, uses_of


@dataclass(frozen=True)
class Unit:
    """A module whose weights are read together, from its call to its return and again in its backward."""

    chunk: int
    """Which of the rank's virtual stages it belongs to."""
    module: nn.Module
    backward: tuple[nn.Parameter, ...]
    """The weights that its backward reads."""


def uses_decay(param: nn.Parameter) -> bool:
    """Weight decay falls on every tensor of two or more dims, nothing else."""
    return param.dim() >= 2


def described(params: Iterable[nn.Parameter], units: Sequence[Unit]) -> list[Parameter]:
    """The parameters as `cost.parameters.plan` knows them; a tied one belongs to the first unit that has it."""
    places: dict[nn.Parameter, tuple[int, int]] = {}
    for index, unit in enumerate(units):
        for param in unit.module.parameters():
            places.setdefault(param, (unit.chunk, index))
    found = []
    for param in params:
        chunk, index = places.get(param, (0, 0))
        found.append(parameter_of(tuple(param.shape), pieces_of(param), chunk=chunk, unit=index,
                                  gathers=uses_of(param) + read_by_backward(param)))
    return found
