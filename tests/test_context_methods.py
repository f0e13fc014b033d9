"""Every context-parallel method and layout over local ranks against dense attention, forward and all gradients."""

from unittest import mock

import pytest
import torch

from megafour.comm.ledger import Ledger
from megafour.comm.primitives import Pending
from megafour.kernels.attention import select_attention
from megafour.kernels.attention_plain import PlainAttention
from megafour.mesh import Mesh
from megafour.parallel.context import METHODS, Places
from megafour.parallel.context.blocks import Kernel
from megafour.parallel.context.layout import LAYOUTS, Layout, document_starts
from megafour.parallel.context.mask import Mask
from megafour.parallel.context.ring import Ring
from megafour.parallel.random import AttentionDropout
from megafour.verify.reference import dense_attention

B, D, SCALE = 2, 8, 0.3
DEGREES = {"ulysses": lambda cp: {"ulysses": cp}, "usp": lambda cp: {"ulysses": 2},
           "double_ring": lambda cp: {"inner_ring": 2}}
DOCUMENTS = {
    "none": None,
    "uneven": [[3, 7, 1, 5, 16], [1] * 8 + [24]],
    "long": [[25, 1, 1, 1, 4], [32]],    # a document longer than any rank's share, documents of one token
}


def mask_of(window, documents, seq):
    if DOCUMENTS[documents] is None:
        return Mask(window)
    ids = torch.stack([torch.repeat_interleave(torch.arange(len(n)), torch.tensor(n)) for n in DOCUMENTS[documents]])
    return Mask(window, document_starts(ids.repeat_interleave(seq // 32, 1)))


def inputs(seq, heads, kv_heads, dtype):
    """q, k, v and the output's gradient of the whole sequence, `[b, seq, heads, d]`."""
    gen = torch.Generator().manual_seed(heads)
    return [torch.randn(B, seq, h, D, generator=gen, dtype=torch.float64).to(dtype)
            for h in (heads, kv_heads, kv_heads, heads)]


def run(core, tensors, here, mask, bits):
    """(out, dq, dk, dv) of `core` on the positions `here`."""
    q, k, v, grad = (x[:, here] for x in tensors)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = core(*leaves, mask=mask, scale=SCALE, dropout=bits)
    out.backward(grad)
    return [x.detach() for x in (out, *(leaf.grad for leaf in leaves))]


def core_of(method, layout, mesh, dtype, dropout=False, fp32_blocks=False, name="auto"):
    return METHODS[method](layout, mesh, Kernel(select_attention(name, "cpu", dtype, dropout), fp32_blocks))


def deviations(rank, world, method, layouts, cases, seq=32, name="auto", fp32_blocks=False):
    """Worst deviation of this rank's tokens from dense attention in fp64, for each layout and case."""
    mesh = Mesh.build(cp=world, **DEGREES.get(method, lambda cp: {})(world))
    found = {}
    for kind in layouts:
        layout = Layout(seq, world, kind)
        here = layout.positions(mesh.cp_rank)
        for case in cases:
            heads, kv_heads, window, documents, dropout, dtype = case
            bits = AttentionDropout(0.3, key=5, seq_length=seq, sample_ids=torch.tensor([2, 9]), first_head=0,
                                    num_heads=heads) if dropout else None
            mask, tensors = mask_of(window, documents, seq), inputs(seq, heads, kv_heads, dtype)
            core = core_of(method, layout, mesh, dtype, dropout, fp32_blocks, name)
            got = run(core, tensors, here, mask, bits)
            whole = [x.double() for x in tensors]
            want = run(dense_attention, whole, slice(None), mask, bits)
            found[kind, case] = max(((a.double() - b[:, here]).abs().max() / b.abs().max()).item()
                                    for a, b in zip(got, want, strict=True))
    return found


F64 = torch.float64
PLAIN = [(8, kv, None, "none", dropout, F64) for kv in (8, 2, 1) for dropout in (False, True)]
MASKED = [(8, 2, window, documents, False, F64) for window in (None, 3, 11) for documents in DOCUMENTS]
MASKED += [(8, 4, 11, "uneven", True, F64)]


@pytest.mark.parametrize(("method", "world"), [(method, world) for method in METHODS for world in (1, 2, 4, 8)
                                               if world > 1 or method not in ("usp", "double_ring")])
def test_every_method_and_layout_equals_dense_attention(pool, method, world, deviation):
    cases = PLAIN + MASKED if world < 8 else [*PLAIN[2:4], *MASKED[1::3]]
    for found in pool.run(deviations, world, method, LAYOUTS, cases):
        deviation(max(found.values()))
        assert max(found.values()) < 1e-10, {case: x for case, x in found.items() if not x < 1e-10}


@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_three_ranks_odd_chunks_and_chunks_of_one_token(pool, method):
    assert max(max(f.values()) for f in pool.run(deviations, 3, method, LAYOUTS, PLAIN[:3], 18)) < 1e-10
    assert max(max(f.values()) for f in pool.run(deviations, 4, method, LAYOUTS, PLAIN[:3], 8)) < 1e-10


@pytest.mark.parametrize("method", METHODS)
def test_long_pieces_run_maskless_and_short_ones_in_tiles(pool, method):
    cases = [(4, 1, 200, "uneven", False, F64), (4, 1, 40, "none", False, F64)]
    for found in pool.run(deviations, 2, method, LAYOUTS, cases, 768):
        assert max(found.values()) < 1e-10


@pytest.mark.parametrize("name", ["auto", "plain"])
def test_low_precision_accumulates_in_fp32(pool, name):
    cases = [(4, 2, None, "none", False, torch.float32), (4, 2, None, "none", False, torch.bfloat16)]
    for found in pool.run(deviations, 4, "ring", ["zigzag"], cases, 64, name):
        fp32, bf16 = found.values()
        assert fp32 < 2e-6 and bf16 < 0.03


@pytest.mark.parametrize("method", METHODS)
def test_blocks_in_fp32_are_rounded_once_at_the_end(pool, method):
    """bf16 keeps 8 bits: half a unit of the last is 2^-9 of a value, and of the largest one at most."""
    for found in pool.run(deviations, 4, method, LAYOUTS, [(8, 2, 11, "uneven", False, torch.bfloat16)], 32, "auto",
                          True):
        assert max(found.values()) < 0.01, found


# --- one document does not touch another ---------------------------------------------------------------------------


def with_another_document(rank, world, method):
    """Whether a change in the second of three documents leaves the others' outputs and gradients alone, to the bit."""
    mesh = Mesh.build(cp=world, **DEGREES.get(method, lambda cp: {})(world))
    unchanged = []
    for kind in LAYOUTS:
        layout, seq = Layout(512, world, kind), 512
        ids = torch.repeat_interleave(torch.arange(3), torch.tensor([101, 203, 208]))
        starts = document_starts(ids.expand(B, -1))
        here = layout.positions(mesh.cp_rank)
        results = []
        for change in (0.0, 5.0):
            tensors = inputs(seq, 8, 2, torch.float32)
            for x in tensors:
                x[:, ids == 1] += change
            results.append(run(core_of(method, layout, mesh, torch.float32), tensors, here, Mask(100, starts), None))
        others = ids[here] != 1
        unchanged.append(all(a[:, others].equal(b[:, others]) for a, b in zip(*results, strict=True)))
        assert not all(a.equal(b) for a, b in zip(*results, strict=True)) or others.all()
    return unchanged


@pytest.mark.parametrize("method", METHODS)
def test_a_change_in_one_document_changes_no_bit_of_another(pool, method):
    assert all(map(all, pool.run(with_another_document, 4, method)))


# --- faults are found ----------------------------------------------------------------------------------------------


def with_wrong_half(rank, world):
    """As `deviations`, the second half of an earlier rank's keys taken for the first."""
    real = Places.blocks

    def wrong(self, mask, queries, keys):
        blocks = real(self, mask, queries, keys)
        half = len(self.positions[keys]) // 2
        return [block if keys >= queries else mock.Mock(wraps=block, samples=block.samples, rows=block.rows,
                                                        keys=slice(half, 2 * half), kind=block.kind)
                for block in blocks]

    with mock.patch.object(Places, "blocks", wrong):
        return deviations(rank, world, "ring", ["zigzag"], PLAIN[:1])


def with_a_hop_short(rank, world):
    """As `deviations`, dK/dV not sent home by their last rank."""
    real = Ring.hop_home

    def short(self, step, sent, received, home):
        if step < self.steps:
            return real(self, step, sent, received, home)
        return Pending(home.copy_(sent))

    with mock.patch.object(Ring, "hop_home", short):
        return deviations(rank, world, "ring", ["zigzag"], PLAIN[:1])


@pytest.mark.parametrize("fault", [with_wrong_half, with_a_hop_short])
def test_planted_faults_are_found(pool, fault):
    assert max(max(found.values()) for found in pool.run(fault, 4)) > 1e-3


# --- what is moved -------------------------------------------------------------------------------------------------


def test_a_group_of_one_moves_nothing_and_calls_the_kernel_once():
    backend = mock.Mock(wraps=PlainAttention())
    core = METHODS["ring"](Layout(16, 1), Mesh.single(), Kernel(backend))
    core(*(torch.randn(1, 16, 2, D) for _ in range(3)), mask=Mask(), scale=SCALE)
    assert backend.forward.call_count == 1


def ledger_of(rank, world, method, kind, window):
    """(axis, primitive, bytes) of what this rank sent in a forward and backward in bf16."""
    ledger = Ledger()
    mesh = Mesh.build(cp=world, ledger=ledger, **DEGREES.get(method, lambda cp: {})(world))
    layout = Layout(32, world, kind)
    run(core_of(method, layout, mesh, torch.bfloat16), inputs(32, 4, 2, torch.bfloat16),
        layout.positions(mesh.cp_rank), Mask(window), None)
    return [(axis, primitive, n) for axis, primitive, _, _, n in ledger.rows()]


def test_zigzag_sends_kv_once_a_hop_and_their_gradients_one_hop_more(pool):
    world, kv = 4, 2 * B * 8 * 2 * D    # K and V of 8 local tokens, 2 heads
    expected = 2 * (world - 1) * kv * 2 + world * kv * 4    # bf16 K/V forward and backward, fp32 gradients
    assert pool.run(ledger_of, world, "ring", "zigzag", None) == [[("ring", "send_recv", expected)]] * world


def test_contiguous_sends_nothing_backwards_and_a_window_ends_the_way(pool):
    world, kv = 4, 2 * B * 8 * 2 * D
    # Rank r passes on the keys of ranks 0 to r, forward and backward; their gradients too, and sends home at the end.
    sent = [[("ring", "send_recv", (r + 1) * kv * (2 + 2 + 4) if r < 3 else 3 * kv * 4)] for r in range(world)]
    assert pool.run(ledger_of, world, "ring", "contiguous", None) == sent
    # A window of 4 reaches into the neighbour's keys alone: one hop there, and the gradients' one hop home.
    hop, home = kv * (2 + 2 + 4), kv * 4
    near = [[("ring", "send_recv", hop * (r < 3) + home * (r > 0))] for r in range(world)]
    assert pool.run(ledger_of, world, "ring", "contiguous", 4) == near


@pytest.mark.parametrize("method", ["ulysses", "usp", "all_gather"])
def test_rows_are_put_in_order_on_the_device_of_the_mesh(method):
    """The meta device stands for a GPU: an index of the CPU's would fail there."""
    mesh = Mesh.build(cp=4, rank=1, device=torch.device("meta"), **DEGREES.get(method, lambda cp: {})(4))
    core = core_of(method, Layout(32, 4, "zigzag"), mesh, torch.bfloat16)
    orders = core.gathering if method == "all_gather" else core
    assert {orders.order.device.type, orders.back.device.type} == {"meta"}
