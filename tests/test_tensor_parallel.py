"""Layers of parallel/tensor against one process, and the chunked loss: its values, its padding, its memory (F4)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megafour.architecture.ends import vocabulary
from megafour.comm.group import Group
from megafour.mesh import Mesh
from megafour.parallel.pieces import tensor_parallel
from megafour.parallel.tensor.cross_entropy import head_loss

SEQ, BATCH, HIDDEN = 8, 2, 16


def inputs(vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x `[s, b, h]`, weight `[v, h]`, labels `[s, b]` with two that are not trained."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(SEQ, BATCH, HIDDEN, dtype=torch.float64, generator=g)
    weight = torch.randn(vocab, HIDDEN, dtype=torch.float64, generator=g)
    labels = torch.randint(vocab, (SEQ, BATCH), generator=g)
    labels[2, 0] = labels[7, 1] = -100
    return x, weight, labels


def words_of(vocab: int, hidden: int, group: Group) -> tuple[int, int, int]:
    """(first word, words, rows with padding) of this rank."""
    weight, at = vocabulary("head.weight", vocab, hidden, 0.02), tensor_parallel(group, False)
    piece = weight.piece(at)
    return piece.offset[0], piece.size[0], weight.local_shape(at)[0]


def loss_on_mesh(rank: int, world: int, vocab: int, sp: bool) -> list:
    """Loss and gradients of this rank's shard."""
    group = Mesh.build(tp=world).group("tp")
    x, weight, labels = inputs(vocab)
    first, valid, rows = words_of(vocab, HIDDEN, group)
    local = torch.full((rows, HIDDEN), 7.0, dtype=torch.float64)  # padding that would take probability if it could
    local[:valid] = weight[first : first + valid]
    local = torch.nn.Parameter(local)
    x = (x.chunk(world)[rank] if sp else x).clone().requires_grad_()
    loss, losses = head_loss(x, local, labels, torch.tensor(0.5, dtype=torch.float64), first=first, valid=valid,
                             group=group, sequence_parallel=sp)
    loss.backward()
    return [float(loss.detach()), losses.tolist(), x.grad.tolist(), local.grad[:valid].tolist(),
            float(local.grad[valid:].abs().sum())]


@pytest.mark.parametrize("vocab", [64, 67, 9])
@pytest.mark.parametrize(("world", "sp"), [(1, False), (2, True), (2, False), (4, True)])
def test_loss_equals_plain_cross_entropy(pool, world: int, sp: bool, vocab: int) -> None:
    """9 words over 4 ranks leave one rank with none."""
    x, weight, labels = inputs(vocab)
    x.requires_grad_(), weight.requires_grad_()
    each = F.cross_entropy((x @ weight.t()).flatten(0, 1), labels.flatten(), reduction="none")
    (each.sum() * 0.5).backward()
    results = pool.run(loss_on_mesh, world, vocab, sp)
    assert all(abs(r[0] - float(each.detach().sum()) * 0.5) < 1e-12 * abs(r[0]) for r in results)
    per_token = [torch.tensor(r[1], dtype=torch.float64) for r in results]
    assert all(torch.allclose(got, each.detach(), rtol=1e-12, atol=0) for got in per_token)
    grads = [torch.tensor(r[2], dtype=torch.float64) for r in results]
    for grad in [torch.cat(grads)] if sp else grads:
        assert torch.allclose(grad, x.grad, rtol=1e-10, atol=1e-14)
    rows = [torch.tensor(r[3], dtype=torch.float64).view(-1, HIDDEN) for r in results]
    assert torch.allclose(torch.cat(rows), weight.grad, rtol=1e-10, atol=1e-14)
    assert all(r[4] == 0.0 for r in results)


def peak_memory() -> int:
    """KiB of resident memory that this process has had at most."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def growth(rank: int, world: int) -> list[float]:
    """GiB of peak resident memory that the loss of F4 adds, and the loss."""
    vocab, seq = 131072, 2048
    group = Mesh.build(tp=world).group("tp")
    g = torch.Generator().manual_seed(0)
    x = torch.randn(seq, 1, 16, generator=g).requires_grad_()
    weight = torch.randn(vocab, 16, generator=g)
    labels = torch.randint(vocab, (seq, 1), generator=g)
    first, _, rows = words_of(vocab, 16, group)
    local = torch.nn.Parameter(weight[first : first + rows].clone())
    Path("/proc/self/clear_refs").write_text("5")     # the peak of this rank's earlier calls would hide this one's
    before = peak_memory()
    loss, _ = head_loss(x, local, labels, torch.tensor(1 / seq), first=first, valid=rows, group=group,
                        sequence_parallel=False)
    loss.backward()
    return [(peak_memory() - before) / 2**20, float(loss.detach())]


def test_loss_memory_is_bounded(pool) -> None:
    """F4: full logits would be 1 GiB, forward and backward at least 2."""
    (one,), two = pool.run(growth, 1), pool.run(growth, 2)
    assert one[0] < 0.8 and all(r[0] < 0.8 for r in two)
    assert all(abs(r[1] - one[1]) <= 1e-5 * one[1] for r in two)
