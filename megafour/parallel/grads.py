"""Where a weight's gradient goes: straight into its fp32 bucket when it has one, into autograd's `.grad` when not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from megafour.kernels.matmul import add_mm_, mm


class Deferral:
    """Where weight gradients wait, while the backward of a micro-batch computes only its input's gradient.

    One object for all parameters of a rank. Only matrix products wait, which are nearly all of the cost; gradients of
    norms and biases come with the input's. Until it is run, a waiting gradient holds the layer's input and its output's
    gradient.
    """

    def __init__(self) -> None:
        self._waiting: list[Callable[[], object]] | None = None

    @contextmanager
    def collect(self) -> Iterator[list[Callable[[], object]]]:
        """Inside, weight gradients go into the list that is yielded; each of its functions accumulates one."""
        waiting: list[Callable[[], object]] = []
        self._waiting = waiting
        try:
            yield waiting
        finally:
            self._waiting = None

    def take(self, run: Callable[[], object]) -> bool:
        """Keep `run` for later if gradients are to wait; whether they are."""
        if self._waiting is None:
            return False
        self._waiting.append(run)
        return True


def defer(param: nn.Parameter, run: Callable[[], object]) -> bool:
    """Whether `run`, which accumulates into the parameter's buffer, was put off: no gradient to return then."""
    deferral: Deferral | None = getattr(param, "deferral", None)
    return deferral is not None and deferral.take(run)


def has_main_grad(param: nn.Parameter) -> bool:
    """Whether the parameter accumulates into a flat fp32 (fp64) buffer instead of `.grad`."""
    return hasattr(param, "main_grad")


def attach_main_grad(param: nn.Parameter, buffer: Callable[[], Tensor], ready: Callable[[nn.Parameter], None],
                     deferral: Deferral | None = None) -> None:
    """Give `param` its buffer (a view of its shape), whom to tell after each accumulation, and where it may wait.

    `buffer` is asked whenever a gradient comes, for what holds sums between the micro-batches may be a shard only.
    Gradients that arrive through autograd (norms, biases) are moved over by a hook; the layers of
    `parallel/tensor` write their own matmul's result, which saves a pass over memory for every weight.
    """
    param.main_grad = buffer  # type: ignore[attr-defined]
    param.grad_ready = ready  # type: ignore[attr-defined]
    param.deferral = deferral  # type: ignore[attr-defined]
    param.register_post_accumulate_grad_hook(_move_grad)


def _move_grad(param: Tensor) -> None:
    if param.grad is None:  # a layer wrote into the buffer itself; torch calls this hook for it all the same
        return
    param.main_grad().add_(param.grad)  # type: ignore[attr-defined]
    param.grad = None
    param.grad_ready(param)  # type: ignore[attr-defined]


def weight_grad(param: nn.Parameter, grad_out: Tensor, x: Tensor) -> Tensor | None:
    """The gradient `grad_out.T @ x` of a linear weight, accumulated in place now or later (returns None), or returned.

    grad_out: `[tokens, out]`, x: `[tokens, in]`.
    """
    if not has_main_grad(param):
        return mm(grad_out.t(), x)
    if not defer(param, partial(_accumulate, param, grad_out, x)):
        _accumulate(param, grad_out, x)
    return None


def _accumulate(param: nn.Parameter, grad_out: Tensor, x: Tensor) -> None:
    add_mm_(param.main_grad(), grad_out.t(), x)  # type: ignore[attr-defined]
    param.grad_ready(param)  # type: ignore[attr-defined]


def add_grad(param: nn.Parameter, write: Callable[[Tensor], object]) -> Tensor | None:
    """Let `write` add into the parameter's buffer (returns None), or into zeros that are returned to autograd."""
    if not has_main_grad(param):
        grad = torch.zeros_like(param)
        write(grad)
        return grad
    write(param.main_grad())  # type: ignore[attr-defined]
    param.grad_ready(param)  # type: ignore[attr-defined]
    return None
