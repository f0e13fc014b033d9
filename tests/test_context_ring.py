"""Ring attention over local ranks against attention over the whole sequence, forward and all gradients."""

from unittest import mock

import pytest
import torch

from megafour.comm.group import Group
from megafour.comm.ledger import Ledger
from megafour.comm.primitives import Pending
from megafour.kernels.attention import select_attention
from megafour.kernels.attention_plain import PlainAttention
from megafour.parallel.context import METHODS
from megafour.parallel.context.layout import Layout
from megafour.parallel.context.ring import Ring
from megafour.parallel.random import AttentionDropout

B, D, SCALE = 2, 8, 0.3


def attend(layout, group, heads, kv_heads, dropout, dtype, name="auto"):
    """(out, dq, dk, dv) of the tokens that the group's rank holds; every rank cuts its part from the same values."""
    gen = torch.Generator().manual_seed(heads)
    q, k, v, grad = (torch.randn(layout.seq_length, B, h, D, generator=gen, dtype=torch.float64).to(dtype)
                     for h in (heads, kv_heads, kv_heads, heads))
    here = layout.positions(group.rank)
    q, k, v, grad = (x[here].transpose(0, 1) for x in (q, k, v, grad))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    bits = AttentionDropout(0.3, key=5, seq_length=layout.seq_length, sample_ids=torch.tensor([2, 9]), first_head=0,
                            num_heads=heads) if dropout else None
    core = METHODS["ring"](layout, group, select_attention(name, "cpu", dtype, dropout))
    out = core(*leaves, scale=SCALE, dropout=bits)
    out.backward(grad)
    return [x.detach() for x in (out, *(leaf.grad for leaf in leaves))]


def deviations(rank, world, seq, cases, name="auto"):
    """Worst deviation of this rank's tokens from one process's, for each (heads, kv_heads, dropout, dtype)."""
    layout, whole, found = Layout(seq, world), Layout(seq, 1), []
    here = layout.positions(rank)
    group = Group("cp", tuple(range(world)), rank, torch.distributed.group.WORLD if world > 1 else None)
    for heads, kv_heads, dropout, dtype in cases:
        got = attend(layout, group, heads, kv_heads, dropout, dtype, name)
        expected = attend(whole, Group("cp", (0,), 0), heads, kv_heads, dropout, torch.float64, "plain")
        found.append(max(((a.double() - b[:, here]).abs().max() / b.abs().max()).item()
                         for a, b in zip(got, expected, strict=True)))
    return found


def with_wrong_chunk(rank, world, seq, cases):
    """As `deviations`, the second half of an earlier rank's keys taken for the first."""
    real = Ring.block

    def wrong(self, step, length):
        rows, keys, causal = real(self, step, length)
        return (rows, slice(length // 2, length), causal) if keys.stop < length else (rows, keys, causal)

    with mock.patch.object(Ring, "block", wrong):
        return deviations(rank, world, seq, cases)


def with_a_hop_short(rank, world, seq, cases):
    """As `deviations`, dK/dV not sent home after the last step."""
    real, hops = Ring.hop, []

    def short(self, sent, received):
        hops.append(1)
        if len(hops) < 3 * world - 2:    # world-1 of K/V forward, as many backward, world of dK/dV
            return real(self, sent, received)
        return Pending(received.copy_(sent))

    with mock.patch.object(Ring, "hop", short):
        return deviations(rank, world, seq, cases)


def ledger_of(rank, world):
    """(axis, primitive, phase, calls, bytes) of what this rank sent in a forward and backward in bf16."""
    ledger = Ledger()
    group = Group("cp", tuple(range(world)), rank, torch.distributed.group.WORLD, ledger)
    attend(Layout(32, world), group, 4, 2, False, torch.bfloat16)
    return ledger.rows()


CASES = [(h, kv, dropout, torch.float64) for h, kv in [(4, 4), (4, 2), (3, 1)] for dropout in (False, True)]


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_ring_equals_one_process(pool, world, deviation):
    for found in pool.run(deviations, world, 32, CASES):
        deviation(max(found))
        assert max(found) < 1e-10, dict(zip(CASES, found, strict=True))


def test_odd_chunks_and_chunks_of_one_token(pool):
    assert max(map(max, pool.run(deviations, 3, 18, CASES[:3]))) < 1e-10
    assert max(map(max, pool.run(deviations, 4, 8, CASES[:3]))) < 1e-10


@pytest.mark.parametrize("name", ["auto", "plain"])
def test_low_precision_accumulates_in_fp32(pool, name):
    cases = [(4, 2, False, torch.float32), (4, 2, False, torch.bfloat16)]
    for fp32, bf16 in pool.run(deviations, 4, 64, cases, name):
        assert fp32 < 2e-6 and bf16 < 0.03


@pytest.mark.parametrize("fault", [with_wrong_chunk, with_a_hop_short])
def test_planted_faults_are_found(pool, fault):
    assert max(map(max, pool.run(fault, 4, 32, [(4, 2, False, torch.float64)]))) > 1e-3


def test_a_group_of_one_moves_nothing_and_calls_the_kernel_once():
    backend = mock.Mock(wraps=PlainAttention())
    core = METHODS["ring"](Layout(16, 1), Group("cp", (0,), 0), backend)
    core(*(torch.randn(1, 16, 2, D) for _ in range(3)), scale=SCALE)
    assert backend.forward.call_count == 1


def test_bytes_are_kv_once_a_hop_and_their_gradients_one_hop_more(pool):
    world, kv = 4, 2 * B * 8 * 2 * D    # K and V of 8 local tokens, 2 heads
    expected = 2 * (world - 1) * kv * 2 + world * kv * 4    # bf16 K/V forward and backward, fp32 gradients
    for rows in pool.run(ledger_of, world):
        assert [(axis, primitive, n) for axis, primitive, _, _, n in rows] == [("cp", "send_recv", expected)]
