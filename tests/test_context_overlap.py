"""Transfers under compute: what a ring posts before which block, what it waits for when, and into how many buffers."""

from unittest import mock

import pytest
import torch

from megafour.comm.primitives import send_recv
from megafour.kernels.attention_plain import PlainAttention
from megafour.mesh import Mesh
from megafour.parallel.context import METHODS, double_ring, ring
from megafour.parallel.context.blocks import Kernel
from megafour.parallel.context.layout import Layout
from megafour.parallel.context.mask import Mask

WORLD, SEQ = 4, 32


class Noting(Kernel):
    """A kernel that notes each call in `Noting.log`."""

    log: list

    def forward(self, *args):
        self.log.append("block")
        return super().forward(*args)

    def backward(self, *args):
        self.log.append("block")
        return super().backward(*args)


class Noted:
    """A transfer that notes when it is awaited."""

    def __init__(self, pending, word, log):
        self.pending, self.word, self.log = pending, word, log

    def wait(self):
        self.log.append(f"wait {self.word}")
        return self.pending.wait()


def walked(rank, world, method, late):
    """The forward's log, the backward's, and how many buffers K/V and how many gradients were received into.

    K/V are bf16, their gradients fp32. `late` posts a transfer only when it is awaited, as a ring without overlap.
    """
    log, buffers = [], {"kv": set(), "grad": set()}

    def noting(sends, recvs, group):
        kind = "kv" if (sends or recvs)[0][0].dtype == torch.bfloat16 else "grad"
        word = f"{kind} {group.name}"
        buffers[kind].update(x.data_ptr() for x, _ in recvs)
        if late:
            pending = mock.Mock(wait=lambda: (log.append(f"post {word}"), send_recv(sends, recvs, group).wait()))
        else:
            log.append(f"post {word}")
            pending = send_recv(sends, recvs, group)
        return Noted(pending, word, log)

    mesh = Mesh.build(cp=world, **({"inner_ring": 2} if method == "double_ring" else {}))
    kernel = Noting(PlainAttention())
    object.__setattr__(kernel, "log", log)
    core = METHODS[method](Layout(SEQ, world, "striped"), mesh, kernel)
    q, k, v = (torch.randn(1, SEQ // world, heads, 8).bfloat16().requires_grad_() for heads in (4, 2, 2))
    with mock.patch.object(ring, "send_recv", noting), mock.patch.object(double_ring, "send_recv", noting):
        out = core(q, k, v, mask=Mask(), scale=0.3)
        there, log[:] = list(log), []
        out.sum().backward()
    return [once(there), once(log)], {kind: len(found) for kind, found in buffers.items()}


def once(log):
    """Blocks that follow each other are one."""
    return [word for word, before in zip(log, [None, *log], strict=False) if (word, before) != ("block", "block")]


def test_a_ring_posts_the_next_step_before_it_computes(pool):
    for (forward, backward), buffers in pool.run(walked, WORLD, "ring", False):
        assert forward == [*["post kv ring", "block", "wait kv ring"] * 3, "block"]
        # The gradients' ring holds up nothing: what arrives is awaited after this step's own blocks, K/V meanwhile.
        step = ["post kv ring", "block", "wait grad ring", "post grad ring", "wait kv ring"]
        assert backward == [*[word for word in step if word != "wait grad ring"], *step * 2,
                            "block", "wait grad ring", "post grad ring", "wait grad ring"]
        # Two for all hops of each pass; of the gradients one that leaves, one that comes, and the rank's own.
        assert buffers["kv"] <= 4 and buffers["grad"] <= 3


def test_the_outer_transfer_has_a_whole_inner_round(pool):
    for (forward, backward), buffers in pool.run(walked, WORLD, "double_ring", False):
        turn = ["post kv ring_inner", "block", "wait kv ring_inner", "block"]
        assert forward == ["post kv ring_outer", *turn, "wait kv ring_outer", *turn]
        for log in (forward, [word for word in backward if "grad" not in word]):
            assert log.index("post kv ring_outer") == 0 and log.index("wait kv ring_outer") == len(turn) + 1
        assert buffers["kv"] <= 6


@pytest.mark.parametrize("method", ["ring", "double_ring"])
def test_a_ring_that_posts_late_is_found(pool, method):
    for (forward, _), _ in pool.run(walked, WORLD, method, True):
        assert forward[0] == "block"
