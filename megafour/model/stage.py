"""What one rank holds, built in one place: which layers, embedding and head, and their first values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megafour.architecture.model import Architecture, Part
from megafour.config.schema import Config
from megafour.kernels.attention import select_attention
from megafour.kernels.attention_plain import PlainAttention
from megafour.kernels.matmul import wide_dtype
from megafour.mesh import Mesh
from megafour.model.build import Build, Pass
from megafour.model.decoder import Decoder
from megafour.model.rope import rope_tables
from megafour.parallel.context import METHODS, Core
from megafour.parallel.context.blocks import Kernel
from megafour.parallel.context.layout import Layout
from megafour.parallel.context.mask import Masks
from megafour.parallel.data.units import Unit
from megafour.parallel.pieces import pieces_of, read_by_backward
from megafour.parallel.pipeline.partition import partition_layers
from megafour.parallel.pipeline.select import pipeline_of
from megafour.parallel.random import normal_rectangle
from megafour.parallel.tensor.embedding import VocabParallelEmbedding
from megafour.sizes import PRODUCTION, Sizes

if TYPE_CHECKING:
    from megafour.data.batch import MicroBatch

Packed = tuple[Tensor | None, Tensor | None, Masks]
"""What depends on where the documents of a micro-batch begin: the rotary tables, cosine and sine, and the masks."""

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""`train.precision` -> dtype of weights and activations."""


def layout_of(config: Config, mesh: Mesh) -> Layout:
    """Which positions of a sequence each context-parallel rank holds."""
    return Layout(config.data.seq_length, mesh.cp, config.parallel.context.layout)


class Stage(nn.Module):
    """The decoder parts of one rank, with all that their forward needs to know about its tokens.

    One part, or one for each virtual stage: `chunk` numbers them in the order in which activations pass them.
    """

    def __init__(self, build: Build, parts: Sequence[Part]) -> None:
        super().__init__()
        self.build = build
        self.is_first, self.is_last = any(part.first for part in parts), any(part.last for part in parts)
        self.decoders = nn.ModuleList()
        shared: VocabParallelEmbedding | None = None
        for part in parts:
            decoder = Decoder(build, part, shared, alone=self.is_first and self.is_last)
            if decoder.embedding is not None:
                shared = decoder.embedding.token
            self.decoders.append(decoder)
        self.positions = build.positions.to(build.device)
        self.masks = Masks(sizes=build.sizes)
        self._packed: dict[int, tuple[MicroBatch, Packed]] = {}
        self.cos: Tensor | None = None
        self.sin: Tensor | None = None
        if build.device.type != "meta":
            self.cos, self.sin = self.rope(self.positions[:, None])

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """The rotary tables `[..., head_dim/2]` of positions `[...]`; none where positions are learned."""
        model = self.build.model
        if model.position != "rope":
            return None, None
        return rope_tables(positions, model.head_size, model.rope_theta, model.rope_scaling)

    def units(self) -> list[Unit]:
        """What is gathered and reduced together, in the order of the forward."""
        found = []
        for chunk in range(len(self.decoders)):
            part = self.part(chunk)
            for module in (part.embedding, *part.layers.values(), part.head):
                if module is not None:
                    found.append(Unit(chunk, module, tuple(p for p in module.parameters() if read_by_backward(p))))
        return found

    @property
    def decoder(self) -> Decoder:
        """The only part, of a rank without virtual stages."""
        assert len(self.decoders) == 1
        return self.part(0)

    def part(self, chunk: int) -> Decoder:
        """The part of one virtual stage."""
        decoder = self.decoders[chunk]
        assert isinstance(decoder, Decoder)
        return decoder

    @property
    def sequence_shard(self) -> slice:
        """The part of this rank's tokens that its residual stream holds: all, or 1/tp under sequence parallelism."""
        n, tp = len(self.build.positions), self.build.tp
        return slice(tp.rank * n // tp.size, (tp.rank + 1) * n // tp.size) if self.build.sequence_parallel else slice(n)

    def activation_shape(self, micro_batch_size: int) -> tuple[int, int, int]:
        """Shape of what travels between stages, `[s(/tp), b, h]`."""
        shard = self.sequence_shard
        return (len(self.build.positions[shard]), micro_batch_size, self.build.model.hidden_size)

    def make_pass(self, batch: MicroBatch, *, step: int, train: bool, chunk: int = 0) -> Pass:
        """Everything a forward of this micro-batch needs besides its activations."""
        cfg = self.build.config
        tokens = batch.sample_ids[None, :] * cfg.data.seq_length + self.positions[self.sequence_shard][:, None]
        (cos, sin), masks = (self.cos, self.sin), self.masks
        if batch.document_starts is not None:
            cos, sin, masks = self._documents(batch, chunk)
        return Pass(cos=cos, sin=sin, seed=cfg.run.seed, step=step, dropout=train, sample_ids=batch.sample_ids,
                    tokens=tokens, recompute=cfg.train.recompute if train else "none", masks=masks)

    def _documents(self, batch: MicroBatch, chunk: int) -> Packed:
        """Rotary tables and masks of packed documents: made for the first part, given up by the last.

        What a backward needs of them the parts' graphs hold, so that nothing stays longer than it would without this.
        """
        known = self._packed.pop(id(batch), None)
        packed = known[1] if known is not None and known[0] is batch else (
            *self.rope(batch.positions.t()), Masks(batch.document_starts, self.build.sizes))
        if chunk < len(self.decoders) - 1:
            self._packed[id(batch)] = (batch, packed)
        return packed

    def forward(self, batch: MicroBatch, x: Tensor | None, scale: Tensor, *, step: int, train: bool,
                chunk: int = 0) -> Tensor:
        """Activations `[s(/tp), b, h]`, or on the last stage the scaled sum of token losses, 0-D."""
        hidden = self.hidden(batch, x, self.make_pass(batch, step=step, train=train, chunk=chunk), chunk)
        head = self.part(chunk).head
        return hidden if head is None else head(hidden, batch.labels, scale)[0]

    def hidden(self, batch: MicroBatch, x: Tensor | None, passed: Pass, chunk: int = 0) -> Tensor:
        """Activations after the layers of one part, `[s(/tp), b, h]`."""
        positions = self.positions[:, None] if batch.document_starts is None else batch.positions.t()
        tokens = batch.tokens if x is None else x
        return self.part(chunk).hidden(tokens, passed, positions[self.sequence_shard])


def attention_kernel(config: Config, device_type: str, sizes: Sizes = PRODUCTION) -> Kernel:
    """How this device computes one block of attention.

    Raises:
        ValueError: for a backend that this device does not have.
    """
    fp32_blocks, dtype = config.parallel.context.fp32_blocks, DTYPES[config.train.precision]
    backend = select_attention(config.kernels.attention, device_type, wide_dtype(dtype) if fp32_blocks else dtype,
                               config.model.attention_dropout > 0, sizes.query_block)
    return Kernel(backend, fp32_blocks, PlainAttention(sizes.query_block))


def build_stage(config: Config, mesh: Mesh, vocab_size: int, *, attention: Core | None = None,
                device: torch.device | None = None, weights: torch.device | None = None,
                sizes: Sizes = PRODUCTION) -> Stage:
    """Build what this rank holds with uninitialised weights, on the mesh's device unless told (`meta` builds none).

    `weights`: where they are made if elsewhere: on `meta` those that are given their storage later.
    """
    device = device or mesh.device
    dtype = DTYPES[config.train.precision]
    layout = layout_of(config, mesh)
    if attention is None:
        attention = METHODS[config.parallel.context.method](layout, mesh, attention_kernel(
            config, mesh.device.type, sizes))
    pipeline = pipeline_of(config)
    placement, spans = pipeline.placement, partition_layers(config, pipeline, vocab_size)
    parts = [Part(range(spans[stage][0], sum(spans[stage])), stage == 0, stage == placement.stages - 1)
             for stage in placement.stages_of[mesh.group("pp").rank]]
    positions = layout.positions(mesh.cp_rank)
    build = Build(config, mesh, dtype, device, attention, Architecture(config.model, vocab_size), positions,
                  weights or device, sizes)
    return Stage(build, parts)


@torch.no_grad()
def initialize_parameter(param: nn.Parameter, seed: int, tile_size: int = PRODUCTION.init_tile) -> None:
    """Fill a weight from (seed, logical name, global index): alike on every mesh; padding rows are zero."""
    param.zero_()
    for piece in pieces_of(param):
        view = param[piece.rows]
        if piece.init == "ones":
            view.fill_(1.0)
        elif piece.init == "normal":
            values = normal_rectangle(seed, piece.name, piece.offset, piece.size, tile_size)
            view.copy_(values.mul_(piece.std))
