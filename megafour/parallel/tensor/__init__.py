"""Tensor parallelism with sequence-parallel regions: linears, embedding, cross-entropy."""
