"""Which layers go to which stage: the cut that balances the ranks' work and then their memory, or explicit counts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from megafour.architecture.model import Architecture, Part
from megafour.architecture.sublayer import Flops
from megafour.cost.flops import ModelFlops, model_flops
from megafour.cost.memory import sharing, state_bytes
from megafour.cost.parameters import parameters
from megafour.cost.step import ELEMENT
from megafour.parallel.pipeline.balance import Loads, balance
from megafour.parallel.pipeline.check import peak_live
from megafour.parallel.pipeline.select import Pipeline, micro_batches

Span = tuple[int, int]
"""(first layer, number of layers) of one stage."""


def partition_layers(config: Any, pipeline: Pipeline, vocab_size: int | None = None) -> list[Span]:
    """The layers of each stage of a resolved configuration, first to last, at least one each.

    Explicit counts are taken as they are. Else `balance` cuts: by FLOPs first, with the embedding's look-up on the
    first stage, the head on the last, and what recomputation does again; then by memory (`loads`). Every rank computes
    the same answer, from the configuration alone. `vocab_size`: where the model's own is still `auto`. Raises
    ValueError where layers and stages do not fit.
    """
    model, placement, asked = config.model, pipeline.placement, config.parallel.pipeline.partition
    if asked != "auto":
        return explicit(asked, model.num_layers, placement.stages)
    if placement.stages == 1:
        return [(0, model.num_layers)]  # holds before the vocabulary's size is known, too
    vocabulary = int(model.vocab_size) if vocab_size is None else vocab_size
    return _spans(balance(loads(config, pipeline, vocabulary), placement))


def explicit(counts: Sequence[int], num_layers: int, stages: int) -> list[Span]:
    """The spans of explicit per-stage layer counts; ValueError shows the equation that fails."""
    if len(counts) != stages:
        raise ValueError(f"partition has {len(counts)} counts for {stages} stages: {list(counts)}")
    if any(count < 1 for count in counts):
        raise ValueError(f"partition leaves a stage without layers: {list(counts)}")
    if sum(counts) != num_layers:
        raise ValueError(f"partition {' + '.join(map(str, counts))} = {sum(counts)} is not num_layers = {num_layers}")
    return _spans(counts)


def _spans(counts: Sequence[int]) -> list[Span]:
    return list(zip([0, *accumulate(counts)], counts, strict=False))


def loads(config: Any, pipeline: Pipeline, vocab_size: int) -> Loads:
    """What the cut has to balance.

    Compute in FLOPs a token. Memory in bytes: weights, gradients and optimizer of what a stage holds, and for each
    micro-batch that the schedule keeps alive on a rank, what its layers save for their backward.
    """
    flops = model_flops(Architecture(config.model, vocab_size), config.data.seq_length)
    first, last = Part(range(0), True, False), Part(range(0), False, True)
    ends = pipeline.placement.rank_of[0] == pipeline.placement.rank_of[-1]

    moments = 2 if config.optimizer.name == "adamw" else 0
    zero_stage, shares = sharing(config.parallel)

    def held(*parts: Part) -> int:
        elements = sum(p.numel for p in parameters(config, parts, 0, vocab_size))
        return state_bytes(elements, zero_stage=zero_stage, shares=shares, element=ELEMENT[config.train.precision],
                           moments=moments).total

    saved, layer = saved_bytes(config), held(Part(range(1), False, False))
    live = peak_live(pipeline.table(max(1, micro_batches(config))))
    return Loads(
        layers=layer_costs(flops, config.train.recompute), first=flops.embedding, last=flops.head,
        memory=[layer + round(count * saved) for count in live], first_memory=held(first),
        last_memory=held(first, last) - held(first) if ends else held(last))    # a tied embedding on one rank is one


def layer_costs(flops: ModelFlops, recompute: str = "none") -> list[int]:
    """FLOPs a token that each layer really costs: its own, and a third of what the backward computes again."""
    def again(layer: Flops) -> int:
        return {"none": 0, "selective": layer.pairs, "full": layer.total}[recompute]

    return [layer.total + again(layer) // 3 for layer in flops.layers]


def saved_bytes(config: Any) -> int:
    """What one layer keeps of one micro-batch for its backward, with fused attention; with full recomputation its
    input. Sequence parallelism keeps a share of what is as wide as the residual: inputs and outputs of two norms."""
    model, tp = config.model, config.parallel.tp
    tokens = config.data.seq_length // config.parallel.cp * config.train.micro_batch_size
    residual = model.hidden_size // (tp if config.parallel.sequence_parallel else 1)
    if config.train.recompute == "full":
        return tokens * residual * ELEMENT[config.train.precision]
    heads = 2 * model.head_size * (model.num_attention_heads + model.kv_heads)    # queries, keys, values, the output
    inside = heads + model.ffn_size * (3 if model.gated else 2)
    return tokens * (4 * residual + inside // tp) * ELEMENT[config.train.precision]
