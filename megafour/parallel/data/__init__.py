"""Data parallelism: flat buckets of weights and gradients, their sums, and what ZeRO shards of them."""
