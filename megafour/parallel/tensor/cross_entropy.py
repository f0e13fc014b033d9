"""The output head fused with a vocabulary-parallel cross-entropy, chunk by chunk: full logits never exist."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megafour.comm import primitives
from megafour.comm.group import Group
from megafour.kernels.matmul import add_mm_, linear, mm, wide_dtype
from megafour.parallel.grads import add_grad
from megafour.sizes import PRODUCTION, Sizes

IGNORE = -100
"""Label of a token that is not trained."""


def chunk_tokens(vocab_local: int, sizes: Sizes = PRODUCTION) -> int:
    """Tokens that a chunk holds: as many as `sizes.head_logits` allows, but never fewer than `sizes.head_tokens`."""
    return max(sizes.head_tokens, sizes.head_logits // max(vocab_local, 1))


def _chunk_losses(logits: Tensor, labels: Tensor, first: int, group: Group) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per-token losses of `[n, v_local]` logits, which are overwritten by exp(logit - max).

    Returns (losses [n], sum of exponentials [n], local label index [n], mask of labels on this rank [n]).
    Two collectives: the maximum; then the exponentials' sum and the label's logit together.
    """
    n, v = logits.shape
    peak = logits.amax(-1) if v else logits.new_full((n,), float("-inf"))
    primitives.all_reduce(peak, group, op="max")
    logits.sub_(peak.unsqueeze(-1))
    local = labels - first
    mine = (local >= 0) & (local < v)
    local = local.masked_fill(~mine, 0)
    sums = logits.new_zeros(2, n)
    if v:
        torch.where(mine, logits.gather(-1, local.unsqueeze(-1)).squeeze(-1), sums[1], out=sums[1])
        torch.sum(logits.exp_(), -1, out=sums[0])
    primitives.all_reduce(sums, group)
    losses = (sums[0].log() - sums[1]).masked_fill(labels == IGNORE, 0.0)
    return losses, sums[0], local, mine


class _HeadLoss(torch.autograd.Function):
    """Sum of token losses; gradients are made with the losses, while a chunk's probabilities are at hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, labels: Tensor, scale: Tensor, first: int, valid: int,
                group: Group, sp: bool, train: bool, sizes: Sizes) -> tuple[Tensor, Tensor]:
        full = primitives.all_gather(x, group) if sp else x
        flat, targets = full.reshape(-1, full.shape[-1]), labels.reshape(-1)
        rows = weight.detach()[:valid]
        compute = wide_dtype(x.dtype)
        grad_x = torch.empty_like(flat) if train else None
        grad_w: Tensor | None = None
        losses = flat.new_empty(flat.shape[0], dtype=compute)
        # By the padded rows: the last tp rank has fewer words, and all must cut the same chunks for their collectives.
        step = chunk_tokens(weight.shape[0], sizes)
        for a in range(0, flat.shape[0], step):
            part, label = flat[a : a + step], targets[a : a + step]
            logits = linear(part, rows).to(compute)
            losses[a : a + step], total, local, mine = _chunk_losses(logits, label, first, group)
            if grad_x is None:
                continue
            logits.mul_((scale / total).masked_fill(label == IGNORE, 0.0).unsqueeze(-1))
            hit = (mine & (label != IGNORE)).to(compute) * -scale
            if valid:
                logits.scatter_add_(-1, local.unsqueeze(-1), hit.unsqueeze(-1))
            probabilities = logits.to(x.dtype)
            grad_x[a : a + step] = mm(probabilities, rows)
            if grad_w is None:
                grad_w = mm(probabilities.t(), part).to(compute)
            else:
                add_mm_(grad_w, probabilities.t(), part)
        ctx.weight, ctx.group, ctx.sp, ctx.shape, ctx.valid = weight, group, sp, full.shape, valid
        ctx.save_for_backward(grad_x, grad_w)
        ctx.mark_non_differentiable(losses)
        return losses.sum() * scale, losses

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Any) -> tuple[Any, ...]:
        grad_x, grad_w = ctx.saved_tensors
        grad_x = (grad_x * upstream.to(grad_x.dtype)).view(ctx.shape)
        move = primitives.reduce_scatter if ctx.sp else primitives.all_reduce
        moving = move(grad_x, ctx.group, async_op=True)
        weight_grad = add_grad(ctx.weight, lambda buffer: buffer[: ctx.valid].add_(
            grad_w * upstream if buffer.device.type != "cpu" or float(upstream) != 1.0 else grad_w))
        return moving.wait(), weight_grad, *[None] * 8


def head_loss(x: Tensor, weight: nn.Parameter, labels: Tensor, scale: Tensor, *, first: int, valid: int, group: Group,
              sequence_parallel: bool, sizes: Sizes = PRODUCTION) -> tuple[Tensor, Tensor]:
    """Cross-entropy of a language-model head.

    x: `[s, b, h]` (or `[s/n, b, h]` under sequence parallelism); weight: `[v_local, h]`, of which `valid` rows from
    global row `first` are words, the rest padding; labels: `[s, b]` (-100 = not trained); scale: 0-D tensor, by which
    the sum is multiplied (1 / valid tokens of the global batch, times the fp16 loss scale).
    Returns (scaled sum of this rank's token losses, 0-D and equal on all ranks of the group; losses `[s*b]`, detached).
    """
    train = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    sp = sequence_parallel and group.size > 1
    return _HeadLoss.apply(x, weight, labels, scale, first, valid, group, sp, train, sizes)
