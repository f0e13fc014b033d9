"""Text on disk to token batches: tokenizers, `megafour prepare`, indexed datasets, sampling, micro-batches."""
