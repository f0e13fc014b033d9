"""From text to micro-batches: tokenizers, indexed datasets, blends, samples and batches."""
