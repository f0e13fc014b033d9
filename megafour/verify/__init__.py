"""Proof that every mesh computes what one process computes, on the user's own config."""
