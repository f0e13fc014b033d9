"""Self-attention: fused q/k/v projection, optional q/k norms, rotary positions, grouped K/V heads over tp."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megafour.model.build import Build, Pass
from megafour.model.norm import Norm
from megafour.model.rope import rotate
from megafour.parallel.pieces import Piece
from megafour.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear, replicated_piece, row_piece


def qkv_pieces(build: Build, name: str, kind: str) -> list[Piece]:
    """Rows of wq, wk and wv fused on this rank. With more tp ranks than K/V heads a head lives on several ranks.

    Each replica sees the gradient of its own query heads only, so the replicas' gradients are summed (group `kv`).
    """
    cfg, tp = build.model, build.tp
    tail = (cfg.hidden_size,) if kind == "weight" else ()
    zeros = (0,) * len(tail)
    init = "normal" if kind == "weight" else "zeros"
    pieces, row = [], 0
    for letter, heads in (("q", cfg.num_attention_heads), ("k", cfg.kv_heads), ("v", cfg.kv_heads)):
        local = max(heads // tp.size, 1)
        copies = max(tp.size // heads, 1)
        rows = local * cfg.head_size
        pieces.append(Piece(
            f"{name}.w{letter}.{kind}", (heads * cfg.head_size, *tail), (tp.rank // copies * rows, *zeros),
            (rows, *tail), row=row, reduce="kv" if copies > 1 else None, counted=tp.rank % copies == 0,
            init=init, std=cfg.init_std))
        row += rows
    return pieces


class Attention(nn.Module):
    """Grouped-query self-attention (Ainslie et al. 2023) of one layer, heads split over tp."""

    def __init__(self, layer: int, build: Build) -> None:
        super().__init__()
        cfg, tp = build.model, build.tp
        name = f"layers.{layer}.attention"
        self.layer, self.core, self.seq_length = layer, build.attention, build.config.data.seq_length
        self.dropout, self.all_heads = cfg.attention_dropout, cfg.num_attention_heads
        self.head_dim = cfg.head_size
        self.q_heads = cfg.num_attention_heads // tp.size
        self.kv_heads = max(cfg.kv_heads // tp.size, 1)
        self.first_head = tp.rank * self.q_heads
        self.window = cfg.window(layer)
        biases = qkv_pieces(build, name, "bias") if cfg.qkv_bias else []
        self.wqkv = ColumnParallelLinear(cfg.hidden_size, qkv_pieces(build, name, "weight"), biases, tp,
                                         **build.placement)
        wo = row_piece(f"{name}.wo", cfg.hidden_size, cfg.num_attention_heads * cfg.head_size, tp, build.output_std)
        bias = replicated_piece(f"{name}.wo.bias", cfg.hidden_size, tp, summed=build.sequence_parallel, init="zeros")
        self.wo = RowParallelLinear(cfg.hidden_size, wo, bias if cfg.linear_bias else None, tp, **build.placement)
        # Each rank normalises its own heads, so these gradients are partial with or without sequence parallelism.
        self.q_norm = Norm(f"{name}.q_norm", self.head_dim, build, summed=True, kind="rmsnorm") if cfg.qk_norm else None
        self.k_norm = Norm(f"{name}.k_norm", self.head_dim, build, summed=True, kind="rmsnorm") if cfg.qk_norm else None

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
