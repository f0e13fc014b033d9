"""The vocabulary-parallel embedding: each rank looks up its own rows, the sum gives every token its vector."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megafour.architecture.weights import ParameterSpec
from megafour.comm import primitives
from megafour.comm.group import Group
from megafour.parallel.grads import add_grad, has_main_grad
from megafour.parallel.pieces import make_parameter, tensor_parallel


class _Lookup(torch.autograd.Function):
    """Rows of the local shard (zero for foreign ids), summed over the group."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: nn.Parameter, first: int, group: Group, sp: bool) -> Tensor:
        local = ids - first
        foreign = (local < 0) | (local >= weight.shape[0])
        local = local.masked_fill(foreign, 0)
        ctx.save_for_backward(local, foreign)
        ctx.weight, ctx.group, ctx.sp = weight, group, sp
        out = F.embedding(local, weight)
        if group.size == 1:
            return out
        out.masked_fill_(foreign.unsqueeze(-1), 0.0)
        return (primitives.reduce_scatter if sp else primitives.all_reduce)(out, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        local, foreign = ctx.saved_tensors
        full = primitives.all_gather(grad, ctx.group) if ctx.sp else grad

        def write(buffer: Tensor) -> None:
            rows = full.reshape(-1, full.shape[-1]).to(buffer.dtype)
            if ctx.group.size > 1:
                rows = rows.masked_fill(foreign.reshape(-1, 1), 0.0)
            buffer.index_add_(0, local.reshape(-1), rows)

        return None, add_grad(ctx.weight, write), None, None, None


class VocabParallelEmbedding(nn.Module):
    """`[b, s]` token ids -> `[s, b, h]`, or the sequence shard `[s/n, b, h]` under sequence parallelism."""

    def __init__(self, spec: ParameterSpec, group: Group, *, sequence_parallel: bool, dtype: torch.dtype,
                 device: torch.device) -> None:
        super().__init__()
        at, (words,) = tensor_parallel(group, sequence_parallel), spec.weights
        piece = words.piece(at)
        self.group, self.sequence_parallel = group, at.sequence_parallel
        self.first, self.valid_rows = piece.offset[0], piece.size[0]
        self.weight = make_parameter(spec, at, dtype, device)

    def forward(self, tokens: Tensor) -> Tensor:
        """`[b, s]` -> `[s(/n), b, h]`."""
        ids = tokens.t()
        if self.group.size == 1 and not has_main_grad(self.weight):
            return F.embedding(ids, self.weight)
        return _Lookup.apply(ids, self.weight, self.first, self.group, self.sequence_parallel)
