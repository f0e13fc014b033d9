"""Where a weight's gradient goes: straight into its fp32 bucket when it has one, into autograd's `.grad` when not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megafour.kernels.matmul import add_mm_, mm


def has_main_grad(param: nn.Parameter) -> bool:
    """Whether the parameter accumulates into a flat fp32 (fp64) buffer instead of `.grad`."""
    return getattr(param, "main_grad", None) is not None


def attach_main_grad(param: nn.Parameter, buffer: Tensor, ready: Callable[[nn.Parameter], None]) -> None:
    """Give `param` its buffer (a view of its shape) and whom to tell after each accumulation.

    Gradients that arrive through autograd (norms, biases) are moved over by a hook; the layers of
    `parallel/tensor` write their own matmul's result, which saves a pass over memory for every weight.
    """
    param.main_grad = buffer  # type: ignore[attr-defined]
    param.grad_ready = ready  # type: ignore[attr-defined]
    param.register_post_accumulate_grad_hook(_move_grad)


def _move_grad(param: Tensor) -> None:
    if param.grad is None:  # a layer wrote into the buffer itself; torch calls this hook for it all the same
        return
    param.main_grad.add_(param.grad)  # type: ignore[attr-defined]
    param.grad = None
    param.grad_ready(param)  # type: ignore[attr-defined]


def weight_grad(param: nn.Parameter, grad_out: Tensor, x: Tensor) -> Tensor | None:
    """The gradient `grad_out.T @ x` of a linear weight, accumulated in place (returns None) or returned to autograd.

    grad_out: `[tokens, out]`, x: `[tokens, in]`.
    """
    if not has_main_grad(param):
        return mm(grad_out.t(), x)
    add_mm_(param.main_grad, grad_out.t(), x)  # type: ignore[attr-defined]
    param.grad_ready(param)  # type: ignore[attr-defined]
    return None


def add_grad(param: nn.Parameter, write: Callable[[Tensor], object]) -> Tensor | None:
    """Let `write` add into the parameter's buffer (returns None), or into zeros that are returned to autograd."""
    if not has_main_grad(param):
        grad = torch.zeros_like(param)
        write(grad)
        return grad
    write(param.main_grad)  # type: ignore[attr-defined]
    param.grad_ready(param)  # type: ignore[attr-defined]
    return None
