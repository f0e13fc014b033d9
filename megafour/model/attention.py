"""Self-attention: fused q/k/v projection, optional q/k norms, rotary positions, grouped K/V heads over tp."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megafour.architecture.attention import AttentionSpec
from megafour.model.build import Build, Pass
from megafour.model.norm import Norm
from megafour.model.rope import rotate
from megafour.parallel.pieces import tensor_parallel
from megafour.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear


class Attention(nn.Module):
    """Grouped-query self-attention (Ainslie et al. 2023) of one layer, heads split over tp."""

    def __init__(self, spec: AttentionSpec, build: Build) -> None:
        super().__init__()
        at = tensor_parallel(build.tp, build.sequence_parallel)
        self.layer, self.core, self.seq_length = spec.layer, build.attention, build.config.data.seq_length
        self.dropout, self.all_heads = build.model.attention_dropout, spec.heads
        self.head_dim = spec.head_size
        heads = spec.local_heads(at)
        self.q_heads, self.kv_heads = heads.query, heads.kv
        self.first_head = at.rank * self.q_heads
        self.window = spec.window
        self.wqkv = ColumnParallelLinear(spec.qkv, build.tp, **build.placement)
        self.wo = RowParallelLinear(spec.output, build.tp, **build.placement)
        self.q_norm = None if spec.q_norm is None else Norm(spec.q_norm, build)
        self.k_norm = None if spec.k_norm is None else Norm(spec.k_norm, build)

    def forward(self, x: Tensor, step: Pass) -> Tensor:
        """`[s(/tp), b, h]` -> the same shape."""
        q, k, v = self._project(x, step)
        kwargs: dict[str, Any] = dict(
            mask=step.masks.within(self.window), scale=1.0 / math.sqrt(self.head_dim),
            dropout=step.attention(self.dropout, self.layer, self.seq_length, self.first_head, self.all_heads))
        if step.recompute == "selective" and q.requires_grad:
            # Korthikanti et al. 2022, section 5. No RNG state to keep: dropout bits are addressed, not consumed.
            out = checkpoint(self.core, q, k, v, use_reentrant=False, preserve_rng_state=False, **kwargs)
        else:
            out = self.core(q, k, v, **kwargs)
        return self.wo(out.transpose(0, 1).reshape(out.shape[1], out.shape[0], -1))

    def _project(self, x: Tensor, step: Pass) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q, k and v, `[b, s, heads, head_dim]` each."""
        qkv = self.wqkv(x)
        s, b, _ = qkv.shape
        heads = qkv.view(s, b, -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = heads.split([self.q_heads, self.kv_heads, self.kv_heads], 2)
            q, k = self.q_norm(q), self.k_norm(k)
            if step.cos is not None and step.sin is not None:
                q, k = rotate(q, step.cos, step.sin), rotate(k, step.cos, step.sin)
        elif step.cos is not None and step.sin is not None:
            qk, v = heads.split([self.q_heads + self.kv_heads, self.kv_heads], 2)
            q, k = rotate(qk, step.cos, step.sin).split([self.q_heads, self.kv_heads], 2)
        else:
            q, k, v = heads.split([self.q_heads, self.kv_heads, self.kv_heads], 2)
        return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
