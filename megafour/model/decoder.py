"""The decoder: one pre-norm block, and the part of the stack that one pipeline stage holds. No rank arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megafour.model.attention import Attention
from megafour.model.build import Build, Pass
from megafour.model.mlp import MLP
from megafour.model.norm import Norm
from megafour.parallel.pieces import Piece, set_pieces
from megafour.parallel.random import hidden_dropout
from megafour.parallel.tensor.cross_entropy import head_loss
from megafour.parallel.tensor.embedding import VocabParallelEmbedding


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, layer: int, build: Build) -> None:
        super().__init__()
        self.layer, self.p = layer, build.model.hidden_dropout
        self.attention_norm = Norm(f"layers.{layer}.attention_norm", build.model.hidden_size, build)
        self.attention = Attention(layer, build)
        self.mlp_norm = Norm(f"layers.{layer}.mlp_norm", build.model.hidden_size, build)
        self.mlp = MLP(layer, build)

    def forward(self, x: Tensor, step: Pass) -> Tensor:
        """`[s(/tp), b, h]` -> the same shape."""
        where = step.hidden(self.layer)
        x = x + hidden_dropout(self.attention(self.attention_norm(x), step), self.p, where, "attention")
        return x + hidden_dropout(self.mlp(self.mlp_norm(x), step), self.p, where, "mlp")


class Embedding(nn.Module):
    """Token embedding plus, for learned positions, the position embedding."""

    def __init__(self, build: Build, *, tied: bool) -> None:
        super().__init__()
        cfg = build.model
        self.p = cfg.hidden_dropout
        self.token = VocabParallelEmbedding(
            "embedding.weight", build.vocab_size, cfg.hidden_size, build.tp, std=cfg.init_std, tied=tied,
            **build.placement)
        self.position: nn.Parameter | None = None
        if cfg.position == "learned":
            shape = (int(cfg.max_position_embeddings or 0), cfg.hidden_size)
            weight = nn.Parameter(torch.empty(shape, dtype=build.dtype, device=build.weights))
            summed = "tp" if build.sequence_parallel else None
            self.position = set_pieces(weight, [Piece("position_embedding.weight", shape, (0, 0), shape, reduce=summed,
                                                      counted=build.tp.rank == 0, std=cfg.init_std)])

    def forward(self, tokens: Tensor, positions: Tensor, step: Pass) -> Tensor:
        """tokens `[b, s]`, positions of the residual stream's tokens `[s(/tp), b or 1]` -> `[s(/tp), b, h]`."""
        x = self.token(tokens)
        if self.position is not None:
            # Beyond the table lies only the padding of an evaluation's window: a token is refused there by the rules.
            x = x + F.embedding(positions.clamp_max(len(self.position) - 1), self.position)
        return hidden_dropout(x, self.p, step.hidden(-1), "embedding")


class Head(nn.Module):
    """Final norm and output projection, fused with the loss. A tied head shares the embedding's weight."""

    def __init__(self, build: Build, shared: VocabParallelEmbedding | None, *, tied: bool) -> None:
        super().__init__()
        cfg = build.model
        self.norm, self.sizes = Norm("norm", cfg.hidden_size, build), build.sizes
        # A tied head on another stage than the embedding is a second copy of one logical weight: one counts.
        self.output = shared or VocabParallelEmbedding(
            "embedding.weight" if tied else "head.weight", build.vocab_size, cfg.hidden_size, build.tp,
            std=cfg.init_std, tied=tied, counted=not tied, **build.placement)

    def forward(self, x: Tensor, labels: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """(scale × sum of token losses, per-token losses `[s*b]`) of `[s(/tp), b, h]` and labels `[b, s]`."""
        out = self.output
        return head_loss(self.norm(x), out.weight, labels.t(), scale, first=out.first, valid=out.valid_rows,
                         group=out.group, sequence_parallel=out.sequence_parallel, sizes=self.sizes)

    def logits(self, x: Tensor) -> Tensor:
        """`[s, b, h]` -> `[s, b, vocab]`, for a world of one (generation, the reference)."""
        return F.linear(self.norm(x), self.output.weight)


@dataclass(frozen=True)
class Part:
    """What one pipeline stage holds of the stack."""

    layers: range
    """Global numbers."""
    first: bool = True
    """With the embedding."""
    last: bool = True
    """With the head."""


class Decoder(nn.Module):
    """The layers of one pipeline stage under their global numbers; embedding and head where the stage has them."""

    def __init__(self, build: Build, part: Part, shared: VocabParallelEmbedding | None = None, *,
                 alone: bool = True) -> None:
        """`shared`: the tied embedding, where this rank holds it in another stage; `alone`: this rank holds the first
        and the last stage, so that a tied embedding has no second copy elsewhere."""
        super().__init__()
        tied = build.model.tie_embeddings
        self.first, self.last, self.build = part.first, part.last, build
        self.embedding = Embedding(build, tied=tied and not alone) if part.first else None
        self.layers = nn.ModuleDict({str(i): Block(i, build) for i in part.layers})
        if self.embedding is not None and tied:
            shared = self.embedding.token
        if shared is not None and part.last:
            shared.weight.uses = 2  # type: ignore[attr-defined]  # its gradient is whole after the head's and the look-up's
        self.head = Head(build, shared, tied=tied) if part.last else None

    def hidden(self, x: Tensor, step: Pass, positions: Tensor) -> Tensor:
        """Token ids `[b, s]` on the first stage, activations `[s(/tp), b, h]` elsewhere -> activations."""
        if self.embedding is not None:
            x = self.embedding(x, positions, step)
        inner = replace(step, recompute="none") if step.recompute == "full" else step
        for layer in self.layers.values():
            if step.recompute == "full" and torch.is_grad_enabled():
                x = checkpoint(layer, x, inner, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, step)
        return x
