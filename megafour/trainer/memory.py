"""Process memory: keeping the heap between steps, and the peak that a run reports."""

from __future__ import annotations

import ctypes
import resource
import sys

import torch

_M_MMAP_MAX, _M_TRIM_THRESHOLD, _M_TOP_PAD = -4, -1, -2


def keep_heap() -> None:
    """Make glibc keep freed blocks: fresh pages for every large activation cost 10% of an fp32 CPU step, 28% in bf16.

    Costs 0.2 to 0.4 GiB of resident memory. Does nothing where the C library has no `mallopt`.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_M_TOP_PAD, 64 << 20)


def peak_bytes(device: torch.device) -> int:
    """Peak memory of this rank so far: allocated on its GPU, or resident in its process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
