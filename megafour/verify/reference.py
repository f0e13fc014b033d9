"""The one-process reference: dense attention, the whole global batch at once, plain autograd, plain optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megafour.config.schema import OptimizerConfig
from megafour.data.batch import IGNORE, MicroBatch
from megafour.mesh import Mesh
from megafour.model.stage import Stage, build_stage, initialize_parameter
from megafour.optim.lr_schedule import learning_rate
from megafour.parallel.context.mask import Mask
from megafour.parallel.pieces import named_pieces, pieces_of
from megafour.parallel.random import AttentionDropout, address, normal_rectangle
from megafour.verify.shrink import Case
from megafour.verify.toy import EVALUATION, GENERATED, prompt_of, toy_batches

SPREAD = 0.1
"""Standard deviation added to biases and norm weights: zeros and ones would hide a misplaced shard."""

ROUNDING = 256.0
"""How many times its error in fp32 a gradient's scale is at least.

Under a norm of one channel a gradient is nothing but what cancellation left, magnified by 1/sqrt(eps) per norm: more
than 1e-9 of the floor, which knows only the largest gradient. Its error in fp32, whose unit roundoff is 2^29 times that
of fp64, measures this. A gradient that fp32 knows to 0.4% keeps its own scale, and a fault of 1e-6 is found in every
gradient that fp32 knows at all."""


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
    total = F.cross_entropy(_logits(stage, batch, step).flatten(0, 1), labels.flatten(), ignore_index=IGNORE,
                            reduction="sum")
    return total / (labels != IGNORE).sum().clamp_min(1)


def _logits(stage: Stage, batch: MicroBatch, step: int, train: bool = True) -> Tensor:
    """`[b, s, vocab]` of a whole global batch, with plain autograd."""
    passed = replace(stage.make_pass(batch, step=step, train=train), recompute="none")
    head = stage.decoder.head
    assert head is not None
    return head.logits(stage.hidden(batch, None, passed)).transpose(0, 1)


@torch.no_grad()
def start(param: torch.nn.Parameter, seed: int, dtype: torch.dtype, tile_size: int) -> None:
    """A run's initial weights with biases and norms spread out, rounded to `dtype`: alike on every mesh."""
    initialize_parameter(param, seed, tile_size)
    for piece in pieces_of(param):
        if piece.init != "normal":
            noise = normal_rectangle(seed, _noise(piece.name), piece.offset, piece.size, tile_size)
            param[piece.rows].add_(noise.mul_(SPREAD))
    param.copy_(param.to(dtype))


@torch.no_grad()
def reference_start(param: torch.nn.Parameter, seed: int, dtype: torch.dtype, tile_size: int) -> None:
    """The values that `start` gives, from their definition: every tile of the whole tensor, side by side."""
    for piece in pieces_of(param):
        name, spread = (piece.name, piece.std) if piece.init == "normal" else (_noise(piece.name), SPREAD)
        values = tiled_normal(seed, name, piece.shape, tile_size).mul_(spread)
        param[piece.rows].copy_((values.to(param.dtype) + (piece.init == "ones")).to(dtype))


def _noise(name: str) -> str:
    return f"verify/{name}"


def tiled_normal(seed: int, name: str, shape: tuple[int, ...], tile_size: int) -> Tensor:
    """Standard normal values of a logical tensor of one or two dims, fp32: tile (i, j) has a generator of its own."""
    rows, cols = (1, *shape)[-2:]
    tiles = []
    for i in range(-(-rows // tile_size)):
        generators = [torch.Generator().manual_seed(address(seed, name, i, j)) for j in range(-(-cols // tile_size))]
        tiles.append(torch.cat([torch.empty(tile_size, tile_size).normal_(generator=g) for g in generators], 1))
    return torch.cat(tiles)[:rows, :cols].reshape(shape).clone()


ONE_PROCESS = {"parallel.dp": 1, "parallel.pp": 1, "parallel.tp": 1, "parallel.cp": 1, "parallel.context": {},
               "parallel.zero_stage": 0, "parallel.zero_size": None,
               "parallel.pipeline.partition": "auto", "parallel.pipeline.schedule": "1f1b",
               "parallel.pipeline.virtual_stages": None, "train.micro_batch_size": 1, "train.recompute": "none"}
"""What of a training config changes when one process holds the whole model."""


@dataclass
class Reference:
    """What one process computes; tensors on the CPU by logical name."""

    losses: list[float] = field(default_factory=list)
    """Per step; for a thorough case one more than the mesh takes, for the run that is resumed."""
    norms: list[float] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)
    """Per step, before clipping."""
    rounding: dict[str, float] = field(default_factory=dict)
    """ROUNDING times the largest error of each gradient in fp32, over all steps; empty where that is the reference."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """After the last step that the mesh takes."""
    moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """AdamW's `exp_avg` and `exp_avg_sq` there."""
    evaluation: float = 0.0
    """Mean loss there of the batch EVALUATION, without dropout; of a thorough case, like what follows."""
    generated: list[tuple[int, Tensor]] = field(default_factory=list)
    """The greedy continuation of `prompt_of` there: each token, and the logits `[vocab]` it was taken from."""
    resumed_weights: dict[str, Tensor] = field(default_factory=dict)
    """After one more step."""
    learning_rates: list[float] = field(default_factory=list)


def run_reference(case: Case, vocab_size: int, steps: int, device: torch.device, dtype: torch.dtype) -> Reference:
    """`steps` steps of the global batches that the case's mesh trains on. `dtype` is that of the mesh's weights."""
    config = case.config
    alone = config.replace({
        **ONE_PROCESS, "train.micro_batch_size": config.train.global_batch_size,
        "train.precision": "fp64" if dtype == torch.float64 else "fp32"})
    stage = build_stage(alone, Mesh.single(device), vocab_size, attention=dense_attention)
    for param in stage.parameters():
        reference_start(param, config.run.seed, dtype, case.sizes.init_tile)
    shadow = build_stage(alone.replace({"train.precision": "fp32"}), Mesh.single(device), vocab_size,
                         attention=dense_attention) if dtype == torch.float64 and case.measures_rounding else None
    optimizer = PlainOptimizer(config.optimizer, list(stage.parameters()))
    result = Reference()

    def batch_of(step: int, valid: str) -> MicroBatch:
        (batch,) = toy_batches(config, alone, vocab_size, step, valid, dp_rank=0, positions=stage.build.positions)
        return batch.to(device)

    for step in range(steps + case.thorough):
        batch = batch_of(step, case.valid)
        loss = _backward(stage, batch, step)
        result.grads.append({name: grad for name, grad in _logical(stage, lambda p: p.grad)})
        for name, error in _rounding(stage, shadow, batch, step, result.grads[-1]).items():
            result.rounding[name] = max(error, result.rounding.get(name, 0.0))
        norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in result.grads[-1].values()))
        clip = min(1.0, config.train.grad_clip / (norm + 1e-6)) if config.train.grad_clip > 0 else 1.0
        rate = learning_rate(config.optimizer, config.lr_schedule, step, int(config.train.steps or 0))
        optimizer.update(rate, clip)
        result.losses.append(loss)
        result.norms.append(norm)
        result.learning_rates.append(rate)
        if step == steps - 1:
            result.weights = dict(_logical(stage, lambda p: p))
            result.moments = {kind: dict(_logical(stage, lambda p, of=of: of[p]))  # type: ignore[misc]
                              for kind, of in optimizer.moments.items()}
            if case.thorough:
                _use(stage, result, batch_of(*EVALUATION))
    if case.thorough:
        result.resumed_weights = dict(_logical(stage, lambda p: p))
    return result


def _backward(stage: Stage, batch: MicroBatch, step: int) -> float:
    """The loss; the gradients are the parameters' own."""
    for param in stage.parameters():
        param.grad = torch.zeros_like(param)
    loss = reference_loss(stage, batch, step)
    loss.backward()
    return float(loss.detach())


def _rounding(stage: Stage, shadow: Stage | None, batch: MicroBatch, step: int,
              grads: dict[str, Tensor]) -> dict[str, float]:
    """As `Reference.rounding` of one step; what overflows fp32 says nothing."""
    if shadow is None:
        return {}
    with torch.no_grad():
        for rounded, param in zip(shadow.parameters(), stage.parameters(), strict=True):
            rounded.copy_(param)
    _backward(shadow, batch, step)
    errors = {name: float((grad.double() - grads[name]).abs().max())
              for name, grad in _logical(shadow, lambda p: p.grad)}
    return {name: ROUNDING * error for name, error in errors.items() if math.isfinite(error)}


@torch.no_grad()
def _use(stage: Stage, result: Reference, batch: MicroBatch) -> None:
    """Evaluate the batch and continue the prompt."""
    logits = _logits(stage, batch, 0, train=False)
    total = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE, reduction="sum")
    result.evaluation = float(total / (batch.labels != IGNORE).sum().clamp_min(1))
    tokens = prompt_of(stage.build.vocab_size, len(stage.positions))
    for _ in range(GENERATED):    # padded to the whole sequence, which no token before the padding sees
        text = torch.zeros(1, len(stage.positions), dtype=torch.int64, device=stage.positions.device)
        recent = tokens[-text.shape[1]:]
        text[0, : len(recent)] = torch.tensor(recent)
        whole = replace(batch, tokens=text, sample_ids=batch.sample_ids[:1], document_starts=None)
        last = _logits(stage, whole, 0, train=False)[0, len(recent) - 1, : stage.build.vocab_size]
        tokens.append(int(last.argmax()))
        result.generated.append((tokens[-1], last.cpu()))


def _logical(stage: Stage, of: Callable[[Tensor], Tensor | None]) -> Iterator[tuple[str, Tensor]]:
    """(logical name, copy on the CPU) of a tensor that belongs to every weight."""
    for param, piece in named_pieces(stage):
        whole = of(param)
        assert whole is not None
        yield piece.name, whole[piece.rows].detach().cpu().clone()


class PlainOptimizer:
    """AdamW (Loshchilov & Hutter 2019) or SGD, one parameter after the other."""

    def __init__(self, config: OptimizerConfig, params: list[torch.nn.Parameter]) -> None:
        self.config, self.params, self.count = config, params, 0
        kinds = ("exp_avg", "exp_avg_sq") if config.name == "adamw" else ()
        self.moments = {kind: {p: torch.zeros_like(p) for p in params} for kind in kinds}

    @torch.no_grad()
    def update(self, rate: float, clip: float) -> None:
        """One step at `rate`, of gradients times `clip`."""
        config = self.config
        self.count += 1
        for param in self.params:
            assert param.grad is not None
            grad = param.grad * clip
            decay = config.weight_decay if param.dim() >= 2 else 0.0
            if not self.moments:    # torch's SGD has coupled decay
                param.sub_(rate * (grad + decay * param))
                continue
            param.mul_(1 - rate * decay)
            m, v = self.moments["exp_avg"][param], self.moments["exp_avg_sq"][param]
            beta1, beta2 = config.betas
            m.mul_(beta1).add_(grad * (1 - beta1))
            v.mul_(beta2).add_(grad.square() * (1 - beta2))
            whole_m, whole_v = m / (1 - beta1**self.count), v / (1 - beta2**self.count)
            param.sub_(rate * whole_m / (whole_v.sqrt() + config.eps))
