"""What every layer's constructor needs: the architecture, the mesh, where and in which dtype weights live."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megafour.architecture.model import Architecture
from megafour.architecture.weights import ParameterSpec
from megafour.comm.group import Group
from megafour.config.schema import Config, ModelConfig
from megafour.mesh import Mesh
from megafour.parallel.context import Core
from megafour.parallel.context.mask import Masks
from megafour.parallel.pieces import make_parameter, tensor_parallel
from megafour.parallel.random import AttentionDropout, DropoutAddress, address
from megafour.sizes import PRODUCTION, Sizes


@dataclass(frozen=True)
class Build:
    """Handed down to every layer of one stage."""

    config: Config
    mesh: Mesh
    dtype: torch.dtype
    device: torch.device
    attention: Core
    architecture: Architecture
    positions: Tensor
    """Global positions of this rank's tokens, `[s_local]`."""
    weights: torch.device
    """Where weights are made: `device`, or `meta` for those that are given their storage later."""
    sizes: Sizes = PRODUCTION

    @property
    def model(self) -> ModelConfig:
        """The configuration's section."""
        return self.config.model

    @property
    def vocab_size(self) -> int:
        """Token ids, without padding."""
        return self.architecture.vocab_size

    @property
    def tp(self) -> Group:
        """The tensor-parallel group."""
        return self.mesh.group("tp")

    @property
    def sequence_parallel(self) -> bool:
        """Whether norms, dropout and the residual hold a shard of the sequence."""
        return self.config.parallel.sequence_parallel and self.tp.size > 1

    @property
    def placement(self) -> dict[str, Any]:
        """Keyword arguments of every parallel linear."""
        return dict(sequence_parallel=self.sequence_parallel, dtype=self.dtype, device=self.weights)

    def parameter(self, spec: ParameterSpec) -> nn.Parameter:
        """This rank's part of a described parameter."""
        return make_parameter(spec, tensor_parallel(self.tp, self.sequence_parallel), self.dtype, self.weights)


@dataclass(frozen=True)
class Pass:
    """What one forward pass of one micro-batch knows besides its activations."""

    cos: Tensor | None = None
    """`[s_local, b or 1, head_dim/2]` in fp32, like `sin`: the rotary tables of this rank's tokens; None without
    RoPE."""
    sin: Tensor | None = None
    seed: int = 0
    step: int = 0
    dropout: bool = False
    """Whether dropout is on (training)."""
    sample_ids: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    """`[b]`: the samples' indices in the global batch."""
    tokens: Tensor = field(default_factory=lambda: torch.zeros(0, 1, dtype=torch.int64))
    """`[s_shard, b]`: ids of the tokens in the residual stream (a sequence shard under sequence parallelism)."""
    recompute: str = "none"
    masks: Masks = field(default_factory=Masks)
    """Who sees whom, per window."""

    def hidden(self, layer: int) -> DropoutAddress | None:
        """The address of a layer's hidden-dropout bits; None when dropout is off. Layer -1 is the embedding."""
        return DropoutAddress(self.seed, self.step, layer, self.tokens) if self.dropout else None

    def attention(self, p: float, layer: int, seq_length: int, first_head: int, heads: int) -> AttentionDropout | None:
        """The attention-dropout bits of a layer; None when dropout is off."""
        if not self.dropout or p == 0.0:
            return None
        key = address(self.seed, "dropout", self.step, layer, "probabilities")
        return AttentionDropout(p, key, seq_length, self.sample_ids, first_head, heads)
