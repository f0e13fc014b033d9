"""The decoder: one pre-norm block, and the part of the stack that one pipeline stage holds. No rank arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megafour.architecture.ends import EmbeddingSpec, HeadSpec
from megafour.architecture.model import LayerSpec, Part
from megafour.model.attention import Attention
from megafour.model.build import Build, Pass
from megafour.model.mlp import MLP
from megafour.model.norm import Norm
from megafour.parallel.random import hidden_dropout
from megafour.parallel.tensor.cross_entropy import head_loss
from megafour.parallel.tensor.embedding import VocabParallelEmbedding

BUILDERS: dict[str, Callable[[Any, Build], nn.Module]] = {"attention": Attention, "mlp": MLP}
"""Kind of `architecture.model.KINDS` -> the module made from its description; called with activations and a `Pass`."""


class Block(nn.Module):
    """For each branch of a layer, first to last: x + body(norm(x)). The default is attention, then MLP."""

    def __init__(self, spec: LayerSpec, build: Build) -> None:
        super().__init__()
        self.layer, self.p = spec.index, build.model.hidden_dropout
        self.kinds = [branch.kind for branch in spec.branches]
        for branch in spec.branches:
            self.add_module(f"{branch.kind}_norm", Norm(branch.norm, build))
            self.add_module(branch.kind, BUILDERS[branch.kind](branch.body, build))

    def forward(self, x: Tensor, step: Pass) -> Tensor:
        """`[s(/tp), b, h]` -> the same shape."""
        where = step.hidden(self.layer)
        for kind in self.kinds:
            norm, body = getattr(self, f"{kind}_norm"), getattr(self, kind)
            x = x + hidden_dropout(body(norm(x), step), self.p, where, kind)
        return x


class Embedding(nn.Module):
    """Token embedding plus, for learned positions, the position embedding."""

    def __init__(self, spec: EmbeddingSpec, build: Build) -> None:
        super().__init__()
        self.p = build.model.hidden_dropout
        self.token = VocabParallelEmbedding(spec.token, build.tp, **build.placement)
        self.position = None if spec.position is None else build.parameter(spec.position)

    def forward(self, tokens: Tensor, positions: Tensor, step: Pass) -> Tensor:
        """tokens `[b, s]`, positions of the residual stream's tokens `[s(/tp), b or 1]` -> `[s(/tp), b, h]`."""
        x = self.token(tokens)
        if self.position is not None:
            # Beyond the table lies only the padding of an evaluation's window: a token is refused there by the rules.
            x = x + F.embedding(positions.clamp_max(len(self.position) - 1), self.position)
        return hidden_dropout(x, self.p, step.hidden(-1), "embedding")


class Head(nn.Module):
    """Final norm and output projection, fused with the loss. A tied head shares the embedding's weight."""

    def __init__(self, spec: HeadSpec, build: Build, shared: VocabParallelEmbedding | None) -> None:
        super().__init__()
        self.norm, self.sizes = Norm(spec.norm, build), build.sizes
        output = shared if spec.output is None else VocabParallelEmbedding(spec.output, build.tp, **build.placement)
        assert output is not None
        self.output = output

    def forward(self, x: Tensor, labels: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """(scale × sum of token losses, per-token losses `[s*b]`) of `[s(/tp), b, h]` and labels `[b, s]`."""
        out = self.output
        return head_loss(self.norm(x), out.weight, labels.t(), scale, first=out.first, valid=out.valid_rows,
                         group=out.group, sequence_parallel=out.sequence_parallel, sizes=self.sizes)

    def logits(self, x: Tensor) -> Tensor:
        """`[s, b, h]` -> `[s, b, vocab]`, for a world of one (generation, the reference)."""
        return F.linear(self.norm(x), self.output.weight)


class Decoder(nn.Module):
    """The layers of one pipeline stage under their global numbers; embedding and head where the stage has them."""

    def __init__(self, build: Build, part: Part, shared: VocabParallelEmbedding | None = None, *,
                 alone: bool = True) -> None:
        """`shared`: the embedding, where this rank holds it in another stage; `alone`: this rank holds both the first
        and the last stage, so that a tied embedding has no second copy elsewhere."""
        super().__init__()
        self.first, self.last, self.build, described = part.first, part.last, build, build.architecture
        self.embedding = Embedding(described.embedding(apart=not alone), build) if part.first else None
        self.layers = nn.ModuleDict({str(i): Block(described.layers[i], build) for i in part.layers})
        if self.embedding is not None:
            shared = self.embedding.token
        self.head = Head(described.head(apart=not alone), build, shared) if part.last else None

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
