"""The pool of ranks that all multi-process tests share, under a short name."""

from megafour.verify.pool import PRELOAD, Pool, RankError

__all__ = ["PRELOAD", "Pool", "RankError"]
