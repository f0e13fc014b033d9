"""The vocabulary-parallel embedding: each rank looks up its own rows, the sum gives every token its vector."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megafour.comm import primitives
from megafour.comm.group import Group
from megafour.parallel.grads import add_grad, has_main_grad
from megafour.parallel.pieces import Piece, set_pieces


def vocabulary_piece(name: str, vocab_size: int, hidden: int, group: Group, std: float) -> tuple[Piece, int]:
    """This rank's rows of a `[vocab, hidden]` weight, and the rows of its local tensor (vocab/n rounded up).

    The rows above the piece's are padding: they are never looked up, never make a logit, never saved.
    """
    rows = -(-vocab_size // group.size)
    first = min(group.rank * rows, vocab_size)
    size = min(rows, vocab_size - first)
    return Piece(name, (vocab_size, hidden), (first, 0), (size, hidden), std=std), rows


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

    def __init__(self, name: str, vocab_size: int, hidden: int, group: Group, *, sequence_parallel: bool, std: float,
                 dtype: torch.dtype, device: torch.device, tied: bool = False, counted: bool = True) -> None:
        super().__init__()
        piece, rows = vocabulary_piece(name, vocab_size, hidden, group, std)
        piece = replace(piece, reduce="embedding" if tied else None, counted=counted)
        self.group, self.sequence_parallel = group, sequence_parallel and group.size > 1
        self.first, self.valid_rows = piece.offset[0], piece.size[0]
        self.weight = set_pieces(nn.Parameter(torch.zeros(rows, hidden, dtype=dtype, device=device)), [piece])

    def forward(self, tokens: Tensor) -> Tensor:
        """`[b, s]` -> `[s(/n), b, h]`."""
        ids = tokens.t()
        if self.group.size == 1 and not has_main_grad(self.weight):
            return F.embedding(ids, self.weight)
        return _Lookup.apply(ids, self.weight, self.first, self.group, self.sequence_parallel)
