"""Random values addressed by name and index, so that none depends on the mesh, on recomputation or on restarts."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megafour.sizes import PRODUCTION

# Multipliers of splitmix64's finaliser (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators").
_MIX = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
_GOLDEN = -0x61C8864680B583EB
_MASK53 = (1 << 53) - 1


def address(*parts: object) -> int:
    """A 63-bit key for a path of names and numbers, the same in every process."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def normal_rectangle(seed: int, name: str, offset: tuple[int, ...], size: tuple[int, ...],
                     tile_size: int = PRODUCTION.init_tile) -> Tensor:
    """Standard normal values of a 1-D or 2-D rectangle of the logical tensor `name`, float32 on the CPU.

    The value at a global index depends only on (seed, name, index): each square tile of `tile_size` has its own
    generator. Drawn on the CPU in fp32 on every device, since generators differ between devices and dtypes.
    """
    generator = torch.Generator()
    if len(offset) == 1:
        return normal_rectangle(seed, name, (0, *offset), (1, *size), tile_size)[0]
    (r0, c0), (rows, cols) = offset, size
    out = torch.empty(rows, cols)
    for tile_row in range(r0 // tile_size, -(-(r0 + rows) // tile_size)):
        for tile_col in range(c0 // tile_size, -(-(c0 + cols) // tile_size)):
            generator.manual_seed(address(seed, name, tile_row, tile_col))
            tile = torch.empty(tile_size, tile_size).normal_(generator=generator)
            top, left = tile_row * tile_size, tile_col * tile_size
            a, b = max(top, r0), min(top + tile_size, r0 + rows)
            c, d = max(left, c0), min(left + tile_size, c0 + cols)
            out[a - r0 : b - r0, c - c0 : d - c0] = tile[a - top : b - top, c - left : d - left]
    return out


def _finalise(x: Tensor) -> Tensor:
    """splitmix64's bit mixer on int64 (wrapping multiply; the shifts are made logical by a mask)."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX[0]
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX[1]
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def kept(key: int, rows: Tensor, cols: Tensor, p: float) -> Tensor:
    """True with probability 1-p at every (row, col): boolean `rows.shape + cols.shape`, a pure function of both.

    `rows`, `cols`: int64 indices of any size; `key` from `address`. The 53 upper bits are compared as integers.
    """
    r = _finalise(rows * _GOLDEN + key).reshape(*rows.shape, *([1] * cols.dim()))
    mixed = _finalise(r + cols * _GOLDEN)
    return ((mixed >> 11) & _MASK53) >= math.ceil(p * 2.0**53)


@dataclass(frozen=True)
class DropoutAddress:
    """Where in the run a dropout bit is drawn: all that it depends on, besides the token and the channel."""

    seed: int
    step: int
    layer: int
    tokens: Tensor
    """Ids of the tokens this rank holds, `[s_local, b]`: sample's index in the global batch × seq + position."""

    def key(self, site: str) -> int:
        """The key of one site (`attention`, `mlp`, `embedding`) of this layer in this step."""
        return address(self.seed, "dropout", self.step, self.layer, site)


def hidden_dropout(x: Tensor, p: float, where: DropoutAddress | None, site: str) -> Tensor:
    """Dropout of `[s, b, h]` activations with addressed bits; identity in evaluation (no `where`) or at p 0."""
    if where is None or p == 0.0:
        return x
    channels = torch.arange(x.shape[-1], device=x.device)
    keep = kept(where.key(site), where.tokens.to(x.device), channels, p)
    return x * keep.to(x.dtype) / (1.0 - p)


@dataclass(frozen=True)
class AttentionDropout:
    """Attention-dropout bits of one layer and step, addressed by (sample, head, query, key)."""

    p: float
    key: int
    seq_length: int
    sample_ids: Tensor
    """`[b]`, the samples' indices in the global batch."""
    first_head: int
    """Global number of this rank's first query head."""
    num_heads: int
    """Query heads of the whole model."""

    def keep(self, heads: slice, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """Boolean `[b, heads, n, m]`: which (query, key) probabilities of the local `heads` survive."""
        head = torch.arange(heads.start, heads.stop, device=q_pos.device) + self.first_head
        rows = (self.sample_ids.to(q_pos.device)[:, None, None] * self.num_heads + head[None, :, None]) * (
            self.seq_length
        ) + q_pos
        return kept(self.key, rows, k_pos, self.p)
