"""Context parallelism: which positions a rank holds, and attention across ranks."""
