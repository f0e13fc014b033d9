"""bf16 attention against fp64: what splitting a sequence adds to the error, and what fp32 blocks take away again."""

import pytest
import torch

from megafour.kernels.attention import select_attention
from megafour.mesh import Mesh
from megafour.parallel.context import METHODS
from megafour.parallel.context.blocks import Kernel
from megafour.parallel.context.layout import Layout
from megafour.parallel.context.mask import Mask
from megafour.verify.reference import dense_attention

SEQ = 512


class Rounded(Kernel):
    """A kernel that gives bf16, as those of GPUs do."""

    def forward(self, *args):
        out, lse = super().forward(*args)
        return out.bfloat16(), lse

    def backward(self, *args):
        return tuple(x.bfloat16() for x in super().backward(*args))


def squares(rank, world, kind):
    """(Squared error, squared norm) of this rank's out, dq, dk, dv."""
    gen = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, SEQ, heads, 64, generator=gen).bfloat16() for heads in (4, 2, 2, 4)]
    layout = Layout(SEQ, world)
    here = layout.positions(rank)
    backend = select_attention("auto", "cpu", torch.bfloat16, False)
    kernel = Rounded(backend) if kind == "rounded" else Kernel(backend, fp32_blocks=kind == "fp32")
    core = METHODS["ring"](layout, Mesh.build(cp=world), kernel)

    def run(attention, tensors):
        q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
        out = attention(q, k, v, mask=Mask(), scale=0.125)
        out.backward(tensors[3])
        return [x.detach().double() for x in (out, q.grad, k.grad, v.grad)]

    got = run(core, [x[:, here].contiguous() for x in whole])
    want = [x[:, here] for x in run(dense_attention, [x.double() for x in whole])]
    return [[float((a - b).square().sum()), float(b.square().sum())] for a, b in zip(got, want, strict=True)]


def errors(pool, world, kind):
    """Relative L2 error of out, dq, dk, dv over all ranks."""
    found = torch.tensor(pool.run(squares, world, kind)).sum(0)
    return (found[:, 0] / found[:, 1]).sqrt()


@pytest.mark.parametrize("kind,limit", [("rounded", 1.5), ("fp32", 1.02)])
def test_splitting_adds_no_more_than_the_rounding_of_partial_results(pool, kind, limit):
    whole = errors(pool, 1, "rounded")
    split = {world: errors(pool, world, kind) for world in (2, 4, 8)}
    assert all((x / whole).max() <= limit for x in split.values()), {w: x / whole for w, x in split.items()}
    # Rounded partial results: as more early rows have several blocks, out and dq approach sqrt(2) from below.
    assert (split[8] / split[4]).max() <= (1.06 if kind == "rounded" else 1.005)
