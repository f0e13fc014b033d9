"""Rotary position embedding (Su et al. 2021) with the scalings of released models: linear, llama3, yarn."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megafour.config.model_schema import RopeScaling


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> tuple[Tensor, float]:
    """(`[head_dim/2]` inverse frequencies in fp32, factor on cos and sin), bit-equal to those of `transformers`.

    fp32, operation by operation, as in the code that released models were trained and are served with: at long
    positions angles of other frequencies would differ from theirs by more than rounding.
    """
    bases = theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if scaling is None:
        return 1.0 / bases, 1.0
    if scaling.type == "linear":
        return 1.0 / bases / scaling.factor, 1.0
    if scaling.type == "llama3":
        return _llama3(1.0 / bases, scaling.factor, scaling), 1.0
    return _yarn(bases, head_dim, theta, scaling.factor, scaling)


def _llama3(inv: Tensor, factor: float, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: wavelengths longer than the trained context are stretched, short ones kept, a ramp between."""
    low, high = scaling.low_freq_factor or 1.0, scaling.high_freq_factor or 4.0
    context = float(scaling.original_max_position_embeddings or 0)
    wavelength = 2 * math.pi / inv
    smooth = (context / wavelength - low) / (high - low)
    blended = (1 - smooth) * inv / factor + smooth * inv
    stretched = torch.where(wavelength > context / low, inv / factor, inv)
    between = (wavelength >= context / high) & (wavelength <= context / low)
    return torch.where(between, blended, stretched)


def _yarn(bases: Tensor, head_dim: int, theta: float, factor: float,
          scaling: RopeScaling) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023, equations 13 to 16): interpolate low frequencies, keep high ones, ramp between."""
    context = float(scaling.original_max_position_embeddings or 0)
    fast, slow = scaling.beta_fast or 32.0, scaling.beta_slow or 1.0

    def dim_of(rotations: float) -> float:
        return head_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(dim_of(fast)), 0), min(math.ceil(dim_of(slow)), head_dim - 1)
    width = high - low or 0.001     # negative beyond the last dimension, as in transformers: all are interpolated
    keep = 1 - ((torch.arange(head_dim // 2).float() - low) / width).clamp(0, 1)
    scale = scaling.attention_factor
    if scale is None:
        scale = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
    return 1.0 / (factor * bases) * (1 - keep) + 1.0 / bases * keep, scale


def rope_tables(positions: Tensor, head_dim: int, theta: float,
                scaling: RopeScaling | None) -> tuple[Tensor, Tensor]:
    """cos and sin of every (position, pair), `[..., head_dim/2]` of positions `[...]`, in fp32."""
    inv, factor = inverse_frequencies(head_dim, theta, scaling)
    angles = positions.float().unsqueeze(-1) * inv.to(positions.device)
    return angles.cos() * factor, angles.sin() * factor


class _Rotate(torch.autograd.Function):
    """Rotates pairs (i, i + d/2); the backward is the inverse rotation, so that nothing but the tables is kept."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors  # type: ignore[attr-defined]
        return _rotate(grad, cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """In the wider type of `x` and the tables, rounded once to that of `x`."""
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))
    half = x.shape[-1] // 2
    a, b = wide[..., :half], wide[..., half:]
    out = torch.empty(x.shape, dtype=wide.dtype, device=x.device)
    torch.mul(a, cos, out=out[..., :half]).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=out[..., half:]).addcmul_(a, sin)
    return out.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `[s, b, heads, head_dim]` by tables `[s, b or 1, head_dim/2]`; Hugging Face's rotate-half convention."""
    return _Rotate.apply(x, cos.unsqueeze(2), sin.unsqueeze(2))
