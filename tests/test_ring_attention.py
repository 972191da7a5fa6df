"""Ring attention: the values and gradients of one process, in the bytes of a part; bytes sent as predicted."""

import math
import re

import pytest
import torch
from torch.nn import functional as F

from minizero import ring_attention as ring
from minizero import ring_attention_on_a_page
from minizero.memory import Ledger
from notebooks.tools.ring import keys_held
from tests.support.failures import error_of
from tests.support.helpers import run
from tests.support.processes import run as run_processes

# ranks, causal, heads, heads of keys, tokens. In the last two a part has one token: at some hops a row meets one key.
CASES = [(1, True, 2, 2, 16), (2, False, 2, 2, 16), (3, True, 2, 2, 18), (4, False, 4, 2, 16), (4, True, 4, 1, 16)]
CASES += [(3, True, 2, 1, 6), (4, False, 2, 2, 4)]


def numbers(heads, kv_heads, n, dtype=torch.float64):
    """q, k, v, and what the output is weighted with in the loss."""
    generator = torch.Generator().manual_seed(n)
    shapes = [(2, count, n, 8) for count in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def by_one(causal, q, k, v, weights):
    """PyTorch's own attention: the output, and the gradients of q, k and v."""
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*inputs, is_causal=causal, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)]


def by_ring(comm, causal, *tensors):
    """The same from all ranks' parts, and the bytes that this rank sent in forward and in backward."""
    *inputs, weights = (ring.sequence_part(x, comm, causal=causal) for x in tensors)
    out = ring.ring_attention(*(x.requires_grad_() for x in inputs), comm, causal=causal)
    forward = comm.bytes_sent
    gradients = torch.autograd.grad((out * weights).sum(), inputs)
    sent = forward, comm.bytes_sent - forward
    return [ring.gather_sequence(x, comm, causal=causal) for x in (out.detach(), *gradients)], sent


@pytest.mark.parametrize("dtype, off", [(torch.float64, 1e-14), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("case", CASES)
def test_values_gradients_and_bytes(case, dtype, off):
    size, causal, *shape = case
    tensors = numbers(*shape, dtype)
    expected = by_one(causal, *tensors)
    part = sum(x.nbytes for x in tensors[1:3]) // size
    wide = part * max(4, dtype.itemsize) // dtype.itemsize  # gradients travel in at least 32 bits
    backward = (size - 1) * part + size * wide if size > 1 else 0
    for found, sent in run(size, by_ring, causal, *tensors):
        for name, a, b in zip(("out", "dq", "dk", "dv"), found, expected):
            assert a.dtype == dtype and (a - b).abs().max() <= off * b.abs().max(), name
        assert sent == ((size - 1) * part, backward)


def both(comm):
    return [by_ring(comm, causal, *numbers(*shape)) for size, causal, *shape in CASES if size == comm.size]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_processes_give_what_threads_give(size, tmp_path):
    for expected, found in zip(run(size, both), run_processes(both, size, tmp_path)):
        for (a, a_sent), (b, b_sent) in zip(expected, found, strict=True):
            assert a_sent == b_sent and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_the_page_gives_the_same():
    def off(comm):
        parts = [ring.sequence_part(x, comm) for x in numbers(2, 2, 18)[:3]]
        return (ring_attention_on_a_page.ring_attention(*parts, comm) - ring.ring_attention(*parts, comm)).abs().max()

    assert max(run(3, off)) < 1e-15
    assert {round(held, 2) for held in run(3, keys_held, ring_attention_on_a_page.ring_attention)} == {3}


def peak(comm, n, causal):
    """The most bytes of a step: of all tensors, and of what the ring receives into; in parts, like this rank's q."""
    with Ledger() as ledger:
        inputs = [torch.ones(1, 2, n // comm.size, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        ring.ring_attention(*inputs, comm, causal=causal).sum().backward()
    return ledger.peak["total"] / inputs[0].nbytes, ledger.peak["communication"] / inputs[0].nbytes


@pytest.mark.parametrize("causal", [False, True])
def test_memory_is_that_of_a_part_whatever_the_text(causal):
    """Twice the ranks take twice the text: each holds the same bytes. With twice the part it is twice as much."""
    found = {(size, n): run(size, peak, n, causal)[0] for size, n in ((4, 128), (8, 256), (4, 256))}
    assert found[4, 128] == found[8, 256]
    assert math.isclose(found[4, 256][0], found[4, 128][0], rel_tol=1e-3)
    assert found[4, 256][1] == 5, "k, v and their gradients, and one of them is there twice while it travels"


def test_zigzag_gives_every_rank_the_same_work():
    """So many scores at each hop; of those with a mask half."""

    def scores(comm):
        hops, eight = ring.hops([torch.zeros(1)], comm, 8, True), range(8)
        return [len(eight[rows]) * len(eight[keys]) // (1 + masked) for rows, keys, masked in hops]

    assert run(4, scores) == [[32] * 4] * 4


def test_lengths_that_no_cut_gives_are_refused():
    def refused(comm):
        x = torch.zeros(1, 1, 6, 8)
        odd = x[:, :, 1:]
        calls = [lambda: ring.sequence_part(x, comm, causal=True), lambda: ring.ring_attention(x, odd, odd, comm)]
        return [error_of(c)[:2] for c in [*calls, lambda: ring.ring_attention(odd, odd, odd, comm, causal=True)]]

    for kind, message in run(4, refused)[0]:
        assert kind == "ValueError" and re.search("pad it|cut q, k, v by sequence_part", message)
