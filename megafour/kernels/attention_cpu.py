"""Attention through torch's flash op for CPU, which gives the log-sum-exp and takes grouped K/V heads as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from megafour.kernels.attention import Dropped, refuse_empty
from megafour.kernels.matmul import matmul_dtype


class TorchCPUAttention:
    """`aten._scaled_dot_product_flash_attention_for_cpu`: fp64, fp32, bf16, fp16; no dropout. Bitwise deterministic.

    An empty tensor would kill the process (SIGFPE); it is refused. Causal blocks are square, so that the op's top-left
    alignment of the mask does not matter. 16-bit types run in fp32 on a CPU that has no instructions for them, and
    the results stay in it.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float,
                dropped: Dropped | None = None) -> tuple[Tensor, Tensor]:
        """As `AttentionBackend.forward`."""
        refuse_empty(q, k)
        compute = matmul_dtype(q)
        q, k, v = (x.transpose(1, 2).to(compute) for x in (q, k, v))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return out.transpose(1, 2), lse.contiguous()

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool,
                 scale: float, dropped: Dropped | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """As `AttentionBackend.backward`."""
        refuse_empty(q, k)
        compute = matmul_dtype(q)
        grad, q, k, v, out = (x.transpose(1, 2).to(compute) for x in (grad, q, k, v, out))
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale)
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        return dq, dk, dv
