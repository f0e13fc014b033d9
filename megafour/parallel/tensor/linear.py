"""Column- and row-parallel linear layers with Megatron sequence-parallel regions at their outer edges."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megafour.architecture.sublayer import LinearSpec
from megafour.comm import primitives
from megafour.comm.group import Group
from megafour.kernels.matmul import linear, mm
from megafour.parallel.grads import defer, has_main_grad, weight_grad
from megafour.parallel.pieces import make_parameter, tensor_parallel


class _Column(torch.autograd.Function):
    """y = gather(x) W^T; backward overlaps the gather of x with dX, and the reduction of dX with dW."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, group: Group, sequence_parallel: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.group, ctx.sp = weight, group, sequence_parallel
        full = primitives.all_gather(x, group) if sequence_parallel else x
        return linear(full, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        weight, group = ctx.weight, ctx.group
        flat = grad.reshape(-1, grad.shape[-1])
        later = defer(weight, partial(_column_weight, weight, flat, x, group, ctx.sp))
        # Only the shard of x is kept between the passes (Korthikanti et al. 2022, section 4.2.2): gathered anew here.
        gathered = primitives.all_gather(x, group, async_op=True) if ctx.sp and not later else None
        grad_x = mm(flat, weight).view(*grad.shape[:-1], weight.shape[1])
        full = gathered.wait() if gathered is not None else x
        move = primitives.reduce_scatter if ctx.sp else primitives.all_reduce
        moving = move(grad_x, group, async_op=True)
        grad_w = None if later else weight_grad(weight, flat, full.reshape(-1, full.shape[-1]))
        return moving.wait(), grad_w, None, None


def _column_weight(weight: nn.Parameter, flat: Tensor, x: Tensor, group: Group, sp: bool) -> None:
    """The weight gradient of a column-parallel layer that was put off; the shard of x is gathered only now."""
    full = primitives.all_gather(x, group) if sp else x
    weight_grad(weight, flat, full.reshape(-1, full.shape[-1]))


class _Row(torch.autograd.Function):
    """y = reduce(x W^T), summed over the group, scattered along the sequence under sequence parallelism."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, group: Group, sequence_parallel: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.group, ctx.sp = weight, group, sequence_parallel
        partial = linear(x, weight)
        return (primitives.reduce_scatter if sequence_parallel else primitives.all_reduce)(partial, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        weight = ctx.weight
        full = primitives.all_gather(grad, ctx.group) if ctx.sp else grad
        flat = full.reshape(-1, full.shape[-1])
        grad_x = mm(flat, weight).view(*full.shape[:-1], weight.shape[1])
        return grad_x, weight_grad(weight, flat, x.reshape(-1, x.shape[-1])), None, None


def _apply(function: Any, x: Tensor, weight: nn.Parameter, group: Group, sequence_parallel: bool) -> Tensor:
    if group.size == 1 and not has_main_grad(weight):
        return linear(x, weight)
    return function.apply(x, weight, group, sequence_parallel)


class ColumnParallelLinear(nn.Module):
    """A linear layer whose output features are split over the group; several logical weights may be fused by rows.

    Input `[s, b, in]`, or its sequence shard `[s/n, b, in]` under sequence parallelism; output `[s, b, out_local]`.
    (Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2.)
    """

    def __init__(self, spec: LinearSpec, group: Group, *, sequence_parallel: bool, dtype: torch.dtype,
                 device: torch.device) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel and group.size > 1
        at = tensor_parallel(group, sequence_parallel)
        self.weight = make_parameter(spec.weight, at, dtype, device)
        self.bias = None if spec.bias is None else make_parameter(spec.bias, at, dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        """`[s(/n), b, in]` -> `[s, b, out_local]`."""
        y = _apply(_Column, x, self.weight, self.group, self.sequence_parallel)
        return y if self.bias is None else y + self.bias


class RowParallelLinear(nn.Module):
    """A linear layer whose input features are split over the group; its partial outputs are summed.

    Input `[s, b, in_local]`; output `[s, b, out]`, or the sequence shard `[s/n, b, out]` under sequence parallelism.
    The bias is added after the sum, so that it counts once.
    """

    def __init__(self, spec: LinearSpec, group: Group, *, sequence_parallel: bool, dtype: torch.dtype,
                 device: torch.device) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel and group.size > 1
        at = tensor_parallel(group, sequence_parallel)
        self.weight = make_parameter(spec.weight, at, dtype, device)
        self.bias = None if spec.bias is None else make_parameter(spec.bias, at, dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        """`[s, b, in_local]` -> `[s(/n), b, out]`."""
        y = _apply(_Row, x, self.weight, self.group, self.sequence_parallel)
        return y if self.bias is None else y + self.bias
