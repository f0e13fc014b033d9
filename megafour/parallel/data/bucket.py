"""One flat bucket: a run of parameters whose weights, and whose gradients, lie in one tensor each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megafour.architecture.pieces import Piece
from megafour.comm import primitives
from megafour.parallel.pieces import pieces_of


@dataclass
class Bucket:
    """A run of parameters one after another, padded to equal shares of the ranks that share one copy."""

    params: list[nn.Parameter]
    decay: bool
    chunk: int
    """Which of the rank's virtual stages they belong to."""
    starts: dict[nn.Parameter, int]
    shard: slice
    """The range this rank optimises: all of it, or its 1/n under ZeRO."""
    weights: Tensor
    """Flat, in the model's dtype; the parameters are views of it. Under ZeRO 3 its storage is empty but for the time
    from a gather to a release."""
    weight_shard: Tensor
    """The range `shard` of the weights: a view of `weights`, or under ZeRO 3 all that is kept of them."""
    grads: Tensor | None
    """Flat fp32 (fp64 in fp64 runs) sums over micro-batches; under ZeRO 2 and 3 only while a micro-batch fills it."""
    grad_shard: Tensor
    """The range `shard` of the gradients: a view of `grads`, or under ZeRO 2 and 3 all that is kept of them."""

    came: dict[nn.Parameter, int] = field(default_factory=dict)
    """Gradients that came in this step; beside it, what makes it due for a reduction."""
    due: dict[nn.Parameter, int] = field(default_factory=dict)
    missing: int = 0
    """Parameters of which something is missing to the next reduction."""
    round: int = 0
    """Reductions launched in this step, and of those the ones whose sum has arrived."""
    landed: int = 0
    holders: int = 0
    """ZeRO 3: units that read the weights now."""
    flying: primitives.Pending | None = None
    """ZeRO 3: the gather that is under way."""

    @property
    def grads_sharded(self) -> bool:
        """Whether only a share of the gradients is kept (ZeRO 2 and 3)."""
        return self.grad_shard.untyped_storage().nbytes() < self.weights.numel() * self.grad_shard.element_size()

    def whole_grads(self) -> Tensor:
        """The flat gradients, made anew where only the shares are kept."""
        if self.grads is None:
            self.grads = torch.zeros(self.weights.shape, dtype=self.grad_shard.dtype, device=self.grad_shard.device)
        return self.grads

    def drop_grads(self) -> None:
        """Forget the whole gradients where only the shares are kept."""
        if self.grads_sharded:
            self.grads = None

    def grad_of(self, param: nn.Parameter) -> Tensor:
        """The buffer of one parameter's gradient, in its shape."""
        start = self.starts[param]
        return self.whole_grads()[start : start + param.numel()].view(param.shape)

    def shard_ranges(self) -> Iterable[tuple[nn.Parameter, Piece, int, int]]:
        """(param, piece, start, stop): each piece's part within this rank's shard, as offsets into the shard."""
        for param in self.params:
            for piece in pieces_of(param):
                a, b = piece.flat_range(tuple(param.shape))
                a, b = a + self.starts[param] - self.shard.start, b + self.starts[param] - self.shard.start
                a, b = max(a, 0), min(b, self.shard.stop - self.shard.start)
                if a < b:
                    yield param, piece, a, b
