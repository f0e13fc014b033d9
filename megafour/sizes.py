"""Every constant that cuts work into tiles, chunks, blocks or buckets, in one value that is handed down."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """What decides into how many parts something is cut; no result may depend on any of them.

    The exception is `init_tile`, which is part of the definition of the initial values.
    """

    init_tile: int = 256
    """Side of the square tiles in which initial weights are drawn: no rank draws more than its shard plus a border."""
    mask_rows: int = 128
    """Query rows of an attention block whose mask is written out; its keys are at most twice as many."""
    short_run: int = 16
    """Runs of rows shorter than this share tiles: a kernel call costs more than the masked part of a tile."""
    query_block: int = 256
    """Queries that a block of the plain attention holds: its causal keys end with it, so that the masked half is
    skipped but for the diagonal tile."""
    head_logits: int = 1 << 24
    """Logits that a chunk of the head's loss holds: 64 MiB of fp32. 2 to 4 chunks of a 1,024-token, 32,000-word step
    are fastest on CPU; smaller matmuls lose more than they save."""
    head_tokens: int = 256
    """Tokens that such a chunk holds at least."""
    bucket_bytes: int = 25 << 20
    """Gradient bytes that a bucket holds: large enough that gloo and NCCL run at bandwidth, small enough to overlap."""
    share_unit: int = 64
    """Elements to which each rank's share of a bucket is rounded, so that every shard starts on a cache line."""
    in_flight: int = 2
    """Reductions that may be under way while the next bucket fills, where each holds a whole bucket's buffer."""
    norm_row: int = 4096
    """Gradients whose squares are added in fp32: enough to fill a kernel, few enough to lose nothing."""
    save_copies: int = 1 << 28
    """Bytes of copies that a save keeps to use again; a larger tensor is copied all the same."""
    checksum_block: int = 1 << 22
    """Bytes that are read at a time when a checkpoint's file is summed."""


PRODUCTION = Sizes()
"""What training uses."""

TOY = Sizes(init_tile=12, mask_rows=4, short_run=3, query_block=5, head_logits=400, head_tokens=10,
            bucket_bytes=12 << 10, share_unit=3, in_flight=1, norm_row=10, save_copies=1 << 10, checksum_block=1 << 12)
"""Small enough that the toy of a verification goes through each of them several times; odd ones, so that the edges of
tiles and of shards do not fall together."""
