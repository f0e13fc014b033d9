"""Matrix products that stay fast in 16-bit types on CPUs without instructions for them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def native_matmul(dtype: torch.dtype) -> bool:
    """Whether this CPU has fast matrix products in `dtype`. Without AVX-512 bf16, torch's are ~50 times slower."""
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return True


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What is summed over many terms of `dtype`: fp32, or fp64 where the terms are."""
    return torch.promote_types(dtype, torch.float32)


def matmul_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which to multiply tensors like `x`: its own, or fp32 where the CPU has no instructions for it."""
    return x.dtype if x.device.type != "cpu" or native_matmul(x.dtype) else torch.float32


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x W^T`: `[..., in]`, `[out, in]` -> `[..., out]` in x's dtype."""
    wide = matmul_dtype(x)
    return F.linear(x, weight) if wide == x.dtype else F.linear(x.to(wide), weight.to(wide)).to(x.dtype)


def mm(a: Tensor, b: Tensor) -> Tensor:
    """`a b` of two matrices, in their dtype."""
    wide = matmul_dtype(a)
    return torch.mm(a, b) if wide == a.dtype else torch.mm(a.to(wide), b.to(wide)).to(a.dtype)


def add_mm_(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`out += a b` in place, `out` of the same or a wider dtype; the product is not rounded to 16 bits on the way
    where it was made in fp32."""
    wide = matmul_dtype(a)
    if out.dtype == wide:
        return out.addmm_(a.to(wide), b.to(wide))
    return out.add_(torch.mm(a.to(wide), b.to(wide)))
