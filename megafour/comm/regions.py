"""Conjugate autograd pairs of the primitives: what the forward splits or sums, the backward joins or copies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megafour.comm import primitives
from megafour.comm.group import Group


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return primitives.all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.group), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return primitives.all_reduce(x.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return primitives.all_gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return primitives.reduce_scatter(grad, ctx.group, ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return primitives.reduce_scatter(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return primitives.all_gather(grad, ctx.group, ctx.dim), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return primitives.all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return primitives.all_to_all(grad, ctx.group), None


def copy_to(x: Tensor, group: Group) -> Tensor:
    """Identity forward, all-reduce backward (Megatron's f: Shoeybi et al. 2019, section 3)."""
    return x if group.size == 1 else _CopyTo.apply(x, group)


def reduce_from(x: Tensor, group: Group) -> Tensor:
    """All-reduce forward, identity backward (Megatron's g)."""
    return x if group.size == 1 else _ReduceFrom.apply(x, group)


def gather_from(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """All-gather along `dim` forward, reduce-scatter backward (g of Korthikanti et al. 2022, section 4.2.2)."""
    return x if group.size == 1 else _Gather.apply(x, group, dim)


def reduce_scatter_to(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Reduce-scatter along `dim` forward, all-gather backward (g-bar of Korthikanti et al. 2022)."""
    return x if group.size == 1 else _ReduceScatter.apply(x, group, dim)


def exchange(x: Tensor, group: Group) -> Tensor:
    """All-to-all of the blocks of dim 0, one for each rank; it is its own inverse and its own backward."""
    return x if group.size == 1 else _AllToAll.apply(x, group)
