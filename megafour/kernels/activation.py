"""The MLP's activations: gated ones act on fused [gate, up] features, plain ones on up alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _SwiGLU(torch.autograd.Function):
    """silu(gate) · up; keeps its input only, and makes the gradient of both halves in one allocation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        out = torch.empty_like(x)
        d_gate, d_up = out.chunk(2, -1)
        torch.mul(F.silu(gate), grad, out=d_up)
        d_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        return out


def swiglu(x: Tensor) -> Tensor:
    """`[..., 2n]` (gate, then up) -> silu(gate) · up, `[..., n]` (Shazeer 2020)."""
    return _SwiGLU.apply(x)


def geglu(x: Tensor) -> Tensor:
    """`[..., 2n]` (gate, then up) -> gelu(gate) · up, `[..., n]` (Shazeer 2020)."""
    gate, up = x.chunk(2, -1)
    return F.gelu(gate) * up


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by GPT-2's tanh approximation."""
    return F.gelu(x, approximate="tanh")


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function of `model.activation`."""
    known: dict[str, Callable[[Tensor], Tensor]] = {"swiglu": swiglu, "geglu": geglu, "gelu": F.gelu,
                                                    "gelu_tanh": gelu_tanh}
    return known[name]
