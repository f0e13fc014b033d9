"""Flat buckets of weights and fp32 gradients, and what of them a rank keeps under each stage of ZeRO."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from megafour.comm import primitives
from megafour.comm.group import Group, solo
from megafour.cost.parameters import padded, plan
from megafour.parallel.data.bucket import Bucket
from megafour.parallel.data.gathering import Gathering, hook_units
from megafour.parallel.data.reduction import Look, Reduction
from megafour.parallel.data.units import Unit, described, uses_decay
from megafour.parallel.grads import Deferral, attach_main_grad
from megafour.sizes import PRODUCTION, Sizes


class GradientBuckets:
    """Owns the flat storage of a rank's weights and gradients, and their sums over dp×cp.

    dp×cp is `group`, whose ranks share one copy of what the stage of ZeRO (Rajbhandari et al. 2020) shards, times
    `replicas`, whose ranks hold the same shares; without ZeRO every rank is a replica. Gradients are summed over dp×cp
    also when dp is 1: with cp > 1 every rank holds the gradient of its own tokens only.
    """

    def __init__(self, params: Iterable[nn.Parameter], group: Group, *, zero_stage: int, accumulate: torch.dtype,
                 replicas: Group | None = None, units: Sequence[Unit] = (), device: torch.device | None = None,
                 trained: bool = True, sizes: Sizes = PRODUCTION) -> None:
        """Move the parameters into flat buckets.

        Args:
            params: in the order of registration; on `meta` they are given storage, elsewhere their values move.
            group, replicas: as above.
            zero_stage: 0 for a group of one.
            accumulate: dtype of gradients.
            units: what ZeRO 2 and 3 reduce and gather together.
            device: of parameters on `meta`.
            trained: False has no gradients, for inference.
            sizes: of buckets and shares.
        """
        self.group, self.replicas = group, replicas or solo("replicas")
        self.zero_stage, self.sizes = zero_stage, sizes
        self.deferral = Deferral()
        """Where weight gradients wait when a schedule splits the backward."""
        self._gathering = Gathering(self.group) if self.zero_stage == 3 else None
        ordered = list(params)
        known = described(ordered, units)
        wide = torch.empty((), dtype=accumulate).element_size()
        self._trained = trained
        self.buckets = [self._flatten([ordered[i] for i in chosen], known[chosen[0]].chunk, accumulate, device)
                        for chosen in plan(known, wide, self.zero_stage, sizes.bucket_bytes)]
        self._reduction = Reduction(self.buckets, self.group, self.replicas, each=self.zero_stage >= 2,
                                    in_flight=sizes.in_flight)
        for bucket in self.buckets:
            for param in bucket.params if trained else ():
                attach_main_grad(param, partial(bucket.grad_of, param), self._reduction.ready, self.deferral)
        if self._gathering is not None:
            hook_units(self._gathering, units, {p: b for b in self.buckets for p in b.params})

    @property
    def primary(self) -> bool:
        """Whether this rank's shares count in norms and are written: each share is on one such rank."""
        return self.replicas.rank == 0

    def _flatten(self, params: list[nn.Parameter], chunk: int, accumulate: torch.dtype,
                 device: torch.device | None) -> Bucket:
        total = padded(sum(p.numel() for p in params), self.group.size, self.sizes.share_unit)
        share = total // self.group.size
        shard = slice(self.group.rank * share, (self.group.rank + 1) * share) if self.zero_stage else slice(0, total)
        meta = params[0].is_meta
        device = device if meta and device is not None else params[0].device
        weights = (torch.empty if meta else torch.zeros)(total, dtype=params[0].dtype, device=device)
        starts, start = {}, 0
        for param in params:
            _move(param, weights[start : start + param.numel()].view(param.shape))
            starts[param], start = start, start + param.numel()
        weight_shard = weights[shard]
        if self.zero_stage == 3:
            weight_shard = torch.zeros_like(weight_shard) if meta else weight_shard.clone()
            weights.untyped_storage().resize_(0)
        kept = share if self.zero_stage >= 2 else total
        grads = torch.zeros(kept if self._trained else 0, dtype=accumulate, device=device)
        whole, grad_shard = (grads, grads[shard]) if self.zero_stage < 2 else (None, grads)
        return Bucket(params, uses_decay(params[0]), chunk, starts, shard, weights, weight_shard, whole, grad_shard)

    # --- gradients ----------------------------------------------------------------------------------------------

    def zero(self) -> None:
        """Forget the last step's gradients."""
        for bucket in self.buckets:
            bucket.drop_grads()
            (bucket.grad_shard if bucket.grads is None else bucket.grads).zero_()

    def start_reduction(self, microbatches: int, look: Look | None = None) -> None:
        """A step of `microbatches` begins: reduce each bucket as soon as the gradients that it waits for are in.

        `look` sees each bucket's gradients of this rank instead, and nothing is summed over ranks.
        """
        self._reduction.start(microbatches, look)

    def finish_reduction(self) -> None:
        """Wait until every bucket's sum over dp×cp is here."""
        self._reduction.finish()

    # --- weights ------------------------------------------------------------------------------------------------

    def gather_weights(self) -> None:
        """ZeRO 1 and 2: collect the shards that the other ranks have updated; ZeRO 3 does when it reads them."""
        if self.zero_stage in (1, 2):
            flying = [primitives.all_gather(b.weight_shard, self.group, out=b.weights, async_op=True)
                      for b in self.buckets]
            for pending in flying:
                pending.wait()

    @contextmanager
    def whole(self, bucket: Bucket) -> Iterator[None]:
        """Inside, the bucket's parameters can be read. Every rank of the group enters it together."""
        if self._gathering is None:
            yield
            return
        with self._gathering.whole([bucket]):
            yield

    @torch.no_grad()
    def fill(self, write: Callable[[nn.Parameter], object]) -> None:
        """Let `write` set every parameter, bucket by bucket: under ZeRO 3 no rank holds more than one beside its share.

        Nothing is sent, so `write` must give the same values on every rank of the group.
        """
        for bucket in self.buckets:
            if self._gathering is not None:
                self._gathering.allocate(bucket)
                bucket.weights.zero_()
            for param in bucket.params:
                write(param)
            if self._gathering is not None:
                bucket.weight_shard.copy_(bucket.weights[bucket.shard])
                bucket.weights.untyped_storage().resize_(0)


@torch.no_grad()
def _move(param: nn.Parameter, view: Tensor) -> None:
    """Make a parameter a view of a bucket, with its values if it has any; its object and its attributes stay."""
    if not param.is_meta:
        view.copy_(param)
        param.data = view
        return
    placed = nn.Parameter(view.data)    # `.data`: with a version counter of its own, see `Gathering`
    placed.__dict__.update(param.__dict__)
    torch.utils.swap_tensors(param, placed)     # `.data` refuses another device


def sync_replicated(buckets: Iterable[Bucket], groups: dict[str, Group]) -> None:
    """Sum the gradients of replicated pieces over the group that each names, one collective a group.

    Norm weights and row-parallel biases in a sequence-parallel region (`tp`), replicated K/V heads (`kv`), the tied
    embedding on first and last stage (`embedding`). After the data-parallel reduction, so that under ZeRO only this
    rank's shard travels; the sums commute.
    """
    wanted: dict[str, list[Tensor]] = {}
    for bucket in buckets:
        for _, piece, a, b in bucket.shard_ranges():
            if piece.reduce is not None:
                wanted.setdefault(piece.reduce, []).append(bucket.grad_shard[a:b])
    for name in sorted(wanted):
        group, parts = groups[name], wanted[name]
        if group.size == 1:
            continue
        flat = primitives.all_reduce(torch.cat(parts), group)
        for part, summed in zip(parts, flat.split([p.numel() for p in parts]), strict=True):
            part.copy_(summed)


def squared_norm(buckets: Iterable[Bucket], row: int = PRODUCTION.norm_row) -> Tensor:
    """This rank's share of the squared gradient norm, 0-D float64: counted pieces of its shards only.

    A piece that another rank counts adds nothing, but where it is not finite here, the share is not either.
    """
    total: Tensor | None = None
    for bucket in buckets:
        for counted in (True, False):
            for a, b in _merged(bucket, counted):
                part = _squares(bucket.grad_shard[a:b], row) * (1.0 if counted else 0.0)
                total = part if total is None else total + part
        total = torch.zeros((), dtype=torch.float64, device=bucket.grad_shard.device) if total is None else total
    assert total is not None
    return total


def _squares(flat: Tensor, row: int) -> Tensor:
    """The sum of the squares of a flat tensor, 0-D float64: rows of `row` in the tensor's dtype, their sums in float64.

    One `vector_norm` over all of it adds up in fp32 on CPUs, element after element: 4e-4 too little for ten million
    elements, and 1% for a hundred million, which would make clipping and `grad_norm` depend on how the mesh cuts them.
    """
    even = flat.numel() // row * row
    return sum((torch.linalg.vector_norm(part, dim=1).double().square().sum()
                for part in (flat[:even].view(-1, row), flat[even:].view(1, -1))), start=flat.new_zeros(()).double())


def _merged(bucket: Bucket, counted: bool) -> list[tuple[int, int]]:
    """The ranges of the shard that are counted, or are not, neighbours joined: a bucket costs a few kernels."""
    spans: list[tuple[int, int]] = []
    for _, piece, a, b in bucket.shard_ranges():
        if piece.counted is not counted:
            continue
        if spans and spans[-1][1] == a:
            spans[-1] = (spans[-1][0], b)
        else:
            spans.append((a, b))
    return spans
