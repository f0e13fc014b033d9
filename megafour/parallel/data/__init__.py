"""Data parallelism: gradient buckets and the sharded optimizer state of ZeRO."""
