"""ZeRO 3: weights are whole only while a unit reads them, gathered one unit ahead, released right after."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megafour.comm import primitives
from megafour.comm.group import Group
from megafour.parallel.data.bucket import Bucket
from megafour.parallel.data.units import Unit


class Gathering:
    """Fills and empties the storage of flat weights; the parameters stay views of it all the while.

    Autograd's saved tensors are such views too: they see the weights again once those are gathered for the backward
    (as in torch's FSDP, Zhao et al. 2023). Their version counters are not those of the flat weights, so
    that a gather, which only brings the same values back, outdates nothing.
    """

    def __init__(self, group: Group) -> None:
        self.group = group

    def allocate(self, bucket: Bucket) -> None:
        """Give the flat weights their storage; what it holds is undefined."""
        bucket.weights.untyped_storage().resize_(bucket.weights.numel() * bucket.weights.element_size())

    def launch(self, buckets: Sequence[Bucket]) -> None:
        """Begin to gather the weights that are neither here nor on their way."""
        for bucket in buckets:
            if bucket.holders or bucket.flying is not None:
                continue
            self.allocate(bucket)
            bucket.flying = primitives.all_gather(bucket.weight_shard, self.group, out=bucket.weights, async_op=True)

    def acquire(self, buckets: Sequence[Bucket]) -> None:
        """The weights are here from now on until as many `release`."""
        self.launch(buckets)
        for bucket in buckets:
            if bucket.flying is not None:
                bucket.flying.wait()
                bucket.flying = None
            bucket.holders += 1

    def release(self, buckets: Sequence[Bucket]) -> None:
        """One reader has done; the last one frees the storage."""
        for bucket in buckets:
            bucket.holders -= 1
            if bucket.holders == 0:
                bucket.weights.untyped_storage().resize_(0)

    @contextmanager
    def whole(self, buckets: Sequence[Bucket]) -> Iterator[None]:
        """Inside, the weights are here. Every rank of the group enters it together."""
        self.acquire(buckets)
        try:
            yield
        finally:
            self.release(buckets)


class GatheredUnit:
    """Hooks on one module: gather before its forward and before its backward, release after each.

    While it computes, the weights of the unit that comes next, one ahead in the forward, one behind in the backward,
    are on their way. A forward that is computed again within the backward finds its weights here and leaves them.
    """

    def __init__(self, gathering: Gathering, unit: Unit, forward: Sequence[Bucket], backward: Sequence[Bucket]) -> None:
        self.gathering, self.forward, self.backward = gathering, forward, backward
        self.ahead: GatheredUnit | None = None
        self.behind: GatheredUnit | None = None
        self.returning = False
        """Whether its backward is under way."""
        unit.module.register_forward_pre_hook(self._before_forward)
        unit.module.register_forward_hook(self._after_forward)

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self.returning:
            return None
        self.gathering.acquire(self.forward)
        if self.ahead is not None:
            self.gathering.launch(self.ahead.forward)
        if not self.backward or not torch.is_grad_enabled():
            return None
        return (_Entered.apply(args[0], self), *args[1:])

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.returning:
            return
        self.gathering.release(self.forward)
        first: Tensor = output if isinstance(output, Tensor) else output[0]
        if self.backward and first.requires_grad:
            first.register_hook(self._before_backward)

    def _before_backward(self, grad: Tensor) -> None:
        self.returning = True
        self.gathering.acquire(self.backward)
        if self.behind is not None:
            self.gathering.launch(self.behind.backward)

    def after_backward(self) -> None:
        """The gradient of its input is complete: weight gradients, also those put off, read no weight."""
        self.returning = False
        self.gathering.release(self.backward)


class _Entered(torch.autograd.Function):
    """A unit's input, unchanged: its backward runs when all of the unit that leads to the input has run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unit: GatheredUnit) -> Tensor:
        ctx.unit = unit
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ctx.unit.after_backward()
        return grad, None


def hook_units(gathering: Gathering, units: Sequence[Unit], of: dict[nn.Parameter, Bucket]) -> None:
    """Put hooks on every unit; those of one virtual stage follow one another."""
    def held(params: Sequence[nn.Parameter]) -> list[Bucket]:
        return list({id(of[param]): of[param] for param in params}.values())

    last: tuple[int, GatheredUnit] | None = None
    for unit in units:
        hooked = GatheredUnit(gathering, unit, held(list(unit.module.parameters())), held(unit.backward))
        if last is not None and last[0] == unit.chunk:
            last[1].ahead, hooked.behind = hooked, last[1]
        last = unit.chunk, hooked
