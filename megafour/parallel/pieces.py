"""Local parameters made from their description, and the record of pieces that each carries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from megafour.architecture.pieces import Piece
from megafour.architecture.weights import ParameterSpec, TensorParallel
from megafour.comm.group import Group


def tensor_parallel(group: Group, sequence_parallel: bool) -> TensorParallel:
    """The description of this rank's place in a tensor-parallel group."""
    return TensorParallel(group.size, group.rank, sequence_parallel and group.size > 1)


def make_parameter(spec: ParameterSpec, at: TensorParallel, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """This rank's part of a described parameter, with its record; zeros, so that padding is zero."""
    param = nn.Parameter(torch.zeros(spec.shape(at), dtype=dtype, device=device))
    return set_pieces(param, spec.pieces(at), uses=spec.uses, read_by_backward=spec.read_by_backward)


def set_pieces(param: nn.Parameter, pieces: Iterable[Piece], *, uses: int = 1,
               read_by_backward: bool = True) -> nn.Parameter:
    """Attach its record to a parameter and return it; `uses`, `read_by_backward`: as of a `ParameterSpec`."""
    param.pieces = tuple(pieces)  # type: ignore[attr-defined]
    param.uses, param.read_by_backward = uses, read_by_backward  # type: ignore[attr-defined]
    return param


def pieces_of(param: nn.Parameter) -> tuple[Piece, ...]:
    """The record attached by `set_pieces`."""
    return param.pieces  # type: ignore[attr-defined, no-any-return]


def uses_of(param: nn.Parameter) -> int:
    """Modules whose forward reads a parameter: its gradient is whole once so many have come."""
    return param.uses  # type: ignore[attr-defined, no-any-return]


def read_by_backward(param: nn.Parameter) -> bool:
    """Whether a backward reads a parameter."""
    return param.read_by_backward  # type: ignore[attr-defined, no-any-return]


def named_pieces(module: nn.Module) -> Iterator[tuple[nn.Parameter, Piece]]:
    """Every (local parameter, piece) of a stage, in registration order; a tied parameter once."""
    for param in module.parameters():
        for piece in pieces_of(param):
            yield param, piece
