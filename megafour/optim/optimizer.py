"""AdamW and SGD over a few flat master shards, and what of them a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megafour.config.schema import OptimizerConfig
from megafour.parallel.data.bucket import Bucket
from megafour.parallel.data.buckets import GradientBuckets

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's first and second moment, as torch names them."""


class ShardedOptimizer:
    """Updates this rank's flat shard of every bucket; the few long tensors keep torch's fused kernel busy.

    The master weights are fp32 copies for 16-bit models; in fp32 and fp64 they are the weights themselves.
    Weight decay falls on tensors of two or more dims only (`Bucket.decay`).
    """

    def __init__(self, config: OptimizerConfig, buckets: GradientBuckets) -> None:
        self.buckets = buckets
        self.masters = [self._master(bucket) for bucket in buckets.buckets]
        groups = [
            dict(params=[m for m, b in zip(self.masters, buckets.buckets, strict=True) if b.decay is decay],
                 weight_decay=config.weight_decay if decay else 0.0)
            for decay in (True, False)
        ]
        groups = [g for g in groups if g["params"]]
        self.optimizer: torch.optim.Optimizer
        if config.name == "adamw":
            self.optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(config.betas[0], config.betas[1]),
                                               eps=config.eps, fused=True)
            for master in self.masters:
                # Allocated here, not by a dummy step, which would advance the bias correction's counter.
                self.optimizer.state[master] = dict(
                    step=torch.zeros((), dtype=torch.float32, device=master.device),
                    exp_avg=torch.zeros_like(master), exp_avg_sq=torch.zeros_like(master))
        else:
            self.optimizer = torch.optim.SGD(groups, lr=config.lr, foreach=False)

    @staticmethod
    def _master(bucket: Bucket) -> Tensor:
        shard, dtype = bucket.weight_shard, bucket.grad_shard.dtype
        master = shard if shard.dtype == dtype else shard.to(dtype)
        master.grad = bucket.grad_shard
        return master

    @torch.no_grad()
    def step(self, lr: float, grad_scale: float) -> None:
        """Scale the gradients, update the masters at rate `lr`, and round them into the model's weights."""
        if grad_scale != 1.0:
            for master in self.masters:
                assert master.grad is not None
                master.grad.mul_(grad_scale)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Copy masters into the model's weights and gather the other ranks' shards."""
        for master, bucket in zip(self.masters, self.buckets.buckets, strict=True):
            if master.dtype != bucket.weights.dtype:
                bucket.weight_shard.copy_(master)
        self.buckets.gather_weights()

    @torch.no_grad()
    def reset_masters(self) -> None:
        """Take the masters anew from the model's weights (after initialisation)."""
        for master, bucket in zip(self.masters, self.buckets.buckets, strict=True):
            if master.dtype != bucket.weights.dtype:
                master.copy_(bucket.weight_shard)

    @property
    def updates(self) -> int:
        """Updates made so far (skipped steps not counted), which AdamW's bias correction depends on."""
        state = self.optimizer.state.get(self.masters[0], {}) if self.masters else {}
        return int(state["step"]) if "step" in state else 0

    def set_updates(self, count: int) -> None:
        """Restore the counter of updates."""
        for master in self.masters:
            state = self.optimizer.state.get(master, {})
            if "step" in state:
                state["step"].fill_(float(count))

    def flat_states(self) -> Iterator[tuple[str, Bucket, Tensor]]:
        """(kind, bucket, flat shard) of all that must survive: `weights` (the masters), then AdamW's moments."""
        for master, bucket in zip(self.masters, self.buckets.buckets, strict=True):
            yield "weights", bucket, master
            for name in MOMENTS:
                if name in self.optimizer.state.get(master, {}):
                    yield name, bucket, self.optimizer.state[master][name]
