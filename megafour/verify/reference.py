"""The one-process reference: dense attention, the whole global batch at once, plain autograd, plain optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megafour.config.schema import Config, OptimizerConfig
from megafour.data.batch import IGNORE, MicroBatch
from megafour.mesh import Mesh
from megafour.model.stage import Stage, build_stage, initialize_parameter
from megafour.optim.lr_schedule import learning_rate
from megafour.parallel.context.mask import Mask
from megafour.parallel.pieces import named_pieces, pieces_of
from megafour.parallel.random import AttentionDropout, normal_rectangle
from megafour.verify.toy import toy_batches

SPREAD = 0.1
"""Standard deviation added to biases and norm weights: zeros and ones would hide a misplaced shard."""


def dense_attention(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float,
                    dropout: AttentionDropout | None = None) -> Tensor:
    """Matmul, mask, softmax, matmul: `[b, s, heads, head_dim]` in and out; each K/V head repeated for its queries."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    position = torch.arange(q.shape[2], device=q.device)
    hidden = (position > position[:, None]).expand(len(q), 1, -1, -1)
    if mask.window is not None:
        hidden = hidden | (position <= position[:, None] - mask.window)
    if mask.starts is not None:    # another document begins after the key
        hidden = hidden | (position < mask.starts.to(q.device)[:, None, :, None])
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(hidden, -math.inf)
    weights = scores.softmax(-1)
    if dropout is not None:
        kept = dropout.keep(slice(0, q.shape[1]), position, position)
        weights = weights * kept.to(weights.dtype) / (1.0 - dropout.p)
    return (weights @ v).transpose(1, 2)


def reference_loss(stage: Stage, batch: MicroBatch, step: int = 0) -> Tensor:
    """Mean loss of the trained tokens of a whole global batch, with plain autograd."""
    labels = batch.labels
    passed = replace(stage.make_pass(batch, step=step, train=True), recompute="none")
    head = stage.decoder.head
    assert head is not None
    logits = head.logits(stage.hidden(batch, None, passed)).transpose(0, 1)
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
    return total / (labels != IGNORE).sum().clamp_min(1)


@torch.no_grad()
def start(param: torch.nn.Parameter, seed: int, dtype: torch.dtype) -> None:
    """A run's initial weights with biases and norms spread out, rounded to `dtype`: alike on every mesh."""
    initialize_parameter(param, seed)
    for piece in pieces_of(param):
        if piece.init != "normal":
            noise = normal_rectangle(seed, f"verify/{piece.name}", piece.offset, piece.size)
            piece.view(param).add_(noise.mul_(SPREAD))
    param.copy_(param.to(dtype))


@dataclass
class Reference:
    """What one process computes; tensors on the CPU by logical name."""

    losses: list[float]
    norms: list[float]
    grads: list[dict[str, Tensor]]
    """Per step, before clipping."""
    weights: dict[str, Tensor]
    """After the last step."""
    learning_rates: list[float]


def run_reference(config: Config, vocab_size: int, steps: int, valid: str, device: torch.device,
                  dtype: torch.dtype) -> Reference:
    """`steps` steps of the global batches that `config`'s mesh trains on. `dtype` is that of the mesh's weights."""
    alone = config.replace({
        "parallel.dp": 1, "parallel.pp": 1, "parallel.tp": 1, "parallel.cp": 1, "parallel.context": {},
        "parallel.pipeline": {},
        "train.micro_batch_size": config.train.global_batch_size, "train.recompute": "none",
        "train.precision": "fp64" if dtype == torch.float64 else "fp32"})
    stage = build_stage(alone, Mesh.single(device), vocab_size, attention=dense_attention)
    for param in stage.parameters():
        start(param, config.run.seed, dtype)
    update = plain_optimizer(config.optimizer, list(stage.parameters()))
    result = Reference([], [], [], {}, [])
    for step in range(steps):
        (batch,) = toy_batches(config, alone, vocab_size, step, valid, dp_rank=0, positions=stage.build.positions)
        batch = batch.to(device)
        for param in stage.parameters():
            param.grad = torch.zeros_like(param)
        loss = reference_loss(stage, batch, step)
        loss.backward()
        result.grads.append({name: grad for name, grad in _logical(stage, lambda p: p.grad)})
        norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in result.grads[-1].values()))
        clip = min(1.0, config.train.grad_clip / (norm + 1e-6)) if config.train.grad_clip > 0 else 1.0
        rate = learning_rate(config.optimizer, config.lr_schedule, step, int(config.train.steps or 0))
        update(rate, clip)
        result.losses.append(float(loss))
        result.norms.append(norm)
        result.learning_rates.append(rate)
    result.weights = {name: weight for name, weight in _logical(stage, lambda p: p)}
    return result


def _logical(stage: Stage, of: Callable[[Tensor], Tensor | None]) -> Iterator[tuple[str, Tensor]]:
    """(logical name, copy on the CPU) of a tensor that belongs to every weight."""
    for param, piece in named_pieces(stage):
        whole = of(param)
        assert whole is not None
        yield piece.name, piece.view(whole).detach().cpu().clone()


def plain_optimizer(config: OptimizerConfig, params: list[torch.nn.Parameter]) -> Callable[[float, float], None]:
    """`update(rate, clip)`: AdamW (Loshchilov & Hutter 2019) or SGD, one parameter after the other."""
    first = [torch.zeros_like(p) for p in params]
    second = [torch.zeros_like(p) for p in params]
    count = 0

    @torch.no_grad()
    def update(rate: float, clip: float) -> None:
        nonlocal count
        count += 1
        for param, m, v in zip(params, first, second, strict=True):
            assert param.grad is not None
            grad = param.grad * clip
            decay = config.weight_decay if param.dim() >= 2 else 0.0
            if config.name == "sgd":    # torch's SGD has coupled decay
                param.sub_(rate * (grad + decay * param))
                continue
            param.mul_(1 - rate * decay)
            beta1, beta2 = config.betas
            m.mul_(beta1).add_(grad * (1 - beta1))
            v.mul_(beta2).add_(grad.square() * (1 - beta2))
            whole_m, whole_v = m / (1 - beta1**count), v / (1 - beta2**count)
            param.sub_(rate * whole_m / (whole_v.sqrt() + config.eps))

    return update
