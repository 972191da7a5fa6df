"""The hand-written collectives on threads: values, bytes, bits, and what happens when ranks disagree."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from minizero import CollectiveMismatch, World
from minizero.engines.layout import pad
from minizero.memory import Ledger
from minizero.ranks.collectives import all_gather, all_reduce, barrier, broadcast, reduce_scatter
from minizero.ranks.processes.transport import ProcessTransport
from tests.support.failures import DISAGREE

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
WRAPPING = [torch.bool, torch.uint8, torch.int8, torch.int16]  # a sum of these is int64
OPS = ["sum", "mean", "max", "min"]
SIZES = (1, 2, 3, 5)


def make(rank, shape, dtype=torch.float32):
    """Small whole numbers, so that every sum of them is exact; no two ranks bring the same."""
    values = torch.randint(0, 12, shape, generator=torch.Generator().manual_seed(rank))
    return (values + rank % 3).to(dtype)


def combined(tensors, op):
    """What all ranks should get, in the plainest way."""
    stack = torch.stack([tensor.double() for tensor in tensors])
    result = {"sum": stack.sum, "mean": stack.mean, "max": stack.amax, "min": stack.amin}[op](0)
    return result.long() if op == "sum" and tensors[0].dtype in WRAPPING else result.to(tensors[0].dtype)


def run(size, fn, *args):
    return World(size).run(fn, *args)


# Values.


SHAPES = [(30, 2), (), (1,), (7,), (2, 3), (3, 1, 5), (0,), (0, 4), (6, 0)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_op_and_shape_and_of_the_first_every_dtype(size, shape):
    cut = bool(shape) and shape[0] % size == 0

    def fn(comm, dtype, ops):
        mine = make(comm.rank, shape, dtype)
        found = {op: (all_reduce(mine, comm, op), reduce_scatter(mine, comm, op) if cut else None) for op in ops}
        return all_gather(mine, comm) if shape else None, broadcast(mine, comm, root=size - 1), found, comm.bytes_sent

    for dtype in FLOATS + INTEGERS if shape == SHAPES[0] else [torch.float32]:
        tensors = [make(rank, shape, dtype) for rank in range(size)]
        ops = OPS if dtype.is_floating_point else ["sum", "max", "min"]
        for rank, (gathered, sent, found, n_bytes) in enumerate(run(size, fn, dtype, ops)):
            assert torch.equal(sent, tensors[-1]) and sent.dtype == dtype and (n_bytes == 0) >= (0 in shape)
            assert not shape or torch.equal(gathered, torch.cat(tensors)) and gathered.dtype == dtype
            for op, (reduced, chunk) in found.items():
                expected, rounding = combined(tensors, op), torch.finfo(dtype).eps if op == "mean" else 0.0
                torch.testing.assert_close(reduced, expected, rtol=rounding, atol=0)
                if cut:
                    torch.testing.assert_close(chunk, expected.chunk(size)[rank], rtol=rounding, atol=0)


def in_its_own_chunk(comm):
    full = torch.full((comm.size * 2,), -1.0)
    shard = full.chunk(comm.size)[comm.rank].fill_(comm.rank)
    assert all_gather(shard, comm, out=full) is full
    return full


NAN, TURNED = float("nan"), torch.tensor([1 + 2j, 3j])
VALUES = {  # a call on three ranks, and what each gets
    "NaN, max": (lambda c: all_reduce(torch.tensor([NAN if c.rank == 1 else 1.0, c.rank]), c, "max"), [NAN, 2.0]),
    "NaN, min": (lambda c: all_reduce(torch.tensor([NAN if c.rank == 1 else 1.0, c.rank]), c, "min"), [NAN, 0.0]),
    "or": (lambda c: all_reduce(torch.tensor([c.rank == 1, False]), c, "max"), [True, False]),
    "complex": (lambda c: broadcast((TURNED * c.rank).conj(), c, 1), [1 - 2j, -3j]),
    "complex, mean": (lambda c: all_reduce((TURNED * c.rank).conj(), c, "mean"), [1 - 2j, -3j]),
    "float8 gathered": (lambda c: all_gather(torch.ones(1).to(torch.float8_e5m2), c).float(), [1.0] * 3),
    "in its own chunk": (in_its_own_chunk, [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]),
}


@pytest.mark.parametrize("name", VALUES)
def test_values(name):
    call, expected = VALUES[name]
    for result in run(3, call):
        torch.testing.assert_close(result, torch.tensor(expected), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("dtype", "largest"), [*zip(WRAPPING, (1, 255, 127, 2**15 - 1)), (torch.int32, 2**29)])
def test_a_sum_of_small_integers_does_not_wrap(dtype, largest):
    def fn(comm):
        most = torch.full((4, 2), largest).to(dtype)
        return all_reduce(most, comm), reduce_scatter(most, comm), all_reduce(most, comm, "max")

    for total, chunk, most in run(2, fn):
        assert total.unique().tolist() == chunk.unique().tolist() == [2 * largest] and chunk.shape == (2, 2)
        assert most.dtype == dtype and most.unique().tolist() == [largest]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_mean_in_16_bits_that_fits_is_finite_and_small_numbers_stay(dtype, size):
    """Both ways to it give the same bits, whole chunks or not."""
    limits = torch.finfo(dtype)
    largest, smallest = limits.max / size**0.5 * (1 - limits.eps * 8), limits.smallest_normal * 2 * size
    values = torch.tensor([largest, -largest, smallest, 2.0**-24, 3 * 2.0**-20, 1.0, 0.3], dtype=torch.float64)
    tensors = [torch.cat([values.to(dtype), values.to(dtype) / 64 * (rank + 1)]) for rank in range(size)]

    def fn(comm):
        every, rows = all_reduce(tensors[comm.rank], comm, "mean"), pad(tensors[comm.rank], comm.size)
        mine = rows.clone().chunk(comm.size)[comm.rank]
        for chunk in (reduce_scatter(rows, comm, "mean"), reduce_scatter(rows.clone(), comm, "mean", out=mine)):
            assert torch.equal(chunk, pad(every, comm.size).chunk(comm.size)[comm.rank])
        assert torch.equal(rows, pad(tensors[comm.rank], comm.size))
        return every

    results = run(size, fn)
    assert all(torch.equal(every, results[0]) for every in results), "all ranks get the same bits"
    lost = 2 * size**0.5 * limits.smallest_normal * limits.eps  # two of √N of the smallest numbers
    torch.testing.assert_close(results[0], combined(tensors, "mean"), rtol=limits.eps * size, atol=lost)


@pytest.mark.parametrize("size", [1, 3])
def test_tensors_need_not_be_contiguous(size):
    parts = [make(rank, (5, size * 2, 3)).permute(1, 2, 0)[:, ::2] for rank in range(size)]

    def fn(comm):
        part, out = parts[comm.rank], torch.zeros(size * 4 * size, 10)[::2, ::2].view(size * 2 * size, 5)
        assert all_gather(part[:, 0], comm, out=out) is out and not (part.is_contiguous() or out.is_contiguous())
        return all_gather(part, comm), reduce_scatter(part, comm), all_reduce(part, comm), broadcast(part, comm), out

    gathered, total = torch.cat(parts), combined(parts, "sum")
    for rank, results in enumerate(run(size, fn)):
        assert all(map(torch.equal, results, (gathered, total.chunk(size)[rank], total, parts[0], gathered[:, 0])))


@pytest.mark.parametrize("size", [1, 3])
def test_the_input_is_left_alone_and_the_result_is_new(size):
    def fn(comm):
        mine = make(comm.rank, (size * 2,)).requires_grad_()
        before = mine.detach().clone()
        results = [all_gather(mine, comm), broadcast(mine, comm)]
        results += [reduce_scatter(mine, comm, "mean"), all_reduce(mine, comm, "mean")]
        barrier(comm)
        assert not any(result.requires_grad for result in results)
        for result in results:
            result.fill_(-1)  # nobody else's tensor
        barrier(comm)
        assert torch.equal(mine, before)

    run(size, fn)


def test_the_order_of_summation():
    """Chunk r starts at rank r+1 and ends at rank r: with numbers that absorb each other it shows."""
    values = torch.tensor([1e8, 1.0, -1e8])
    found = run(3, lambda comm: reduce_scatter(values[comm.rank].repeat(3), comm).item())
    assert found == [(values[i] + values[j] + values[k]).item() for i, j, k in ((1, 2, 0), (2, 0, 1), (0, 1, 2))]
    assert len(set(found)) > 1  # the numbers do tell


# Bytes.


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_bytes_are_the_least_possible(size, dtype):
    """(N-1)/N of the padded tensor for each half; a broadcast sends N-1 copies in all, and its root log2 N of them."""

    def fn(comm):
        tensor, counts = make(comm.rank, (101,), dtype), []
        padded = pad(tensor, size)
        calls = [partial(reduce_scatter, padded, comm, "mean" if dtype.is_floating_point else "min")]
        calls += [partial(all_gather, padded.chunk(size)[comm.rank], comm), partial(all_reduce, tensor, comm, "max")]
        for call in (*calls, partial(broadcast, tensor, comm, root=size - 1), partial(barrier, comm)):
            before = comm.bytes_sent, comm.bytes_received
            call()
            counts.append((comm.bytes_sent - before[0], comm.bytes_received - before[1]))
        return counts

    half, whole = (size - 1) * -(-101 // size) * dtype.itemsize, 101 * dtype.itemsize
    results = run(size, fn)
    for counts in results:
        assert counts[:3] == [(half, half), (half, half), (2 * half, 2 * half)] and counts[4] == (0, 0)
    sent, received = zip(*(counts[3] for counts in results))
    assert sum(sent) == sum(received) == (size - 1) * whole
    assert max(sent) == sent[-1] == math.ceil(math.log2(size)) * whole


@pytest.mark.parametrize("ahead", [2, 3, 9])
def test_the_buffers_of_a_ring_take_turns(ahead):
    """Two, or as many as the transport likes, but no more than there are steps."""

    def fn(comm):
        comm.transport.ring_buffers = lambda tensor: ahead
        tensor = torch.arange(50.0) + comm.rank
        with Ledger() as ledger:
            return reduce_scatter(tensor, comm).tolist(), ledger.peak["communication"]

    for rank, (result, held) in enumerate(run(5, fn)):
        assert result == [5 * (10 * rank + i) + 10 for i in range(10)]
        assert held == min(ahead, 4) * 40


def test_processes_receive_ahead_what_is_small():
    cpu, gpu = (SimpleNamespace(device=torch.device(name)) for name in ("cpu", "cuda"))
    quarter = torch.empty(2**16)  # of a MiB
    assert ProcessTransport.ring_buffers(cpu, quarter) == 4
    assert ProcessTransport.ring_buffers(cpu, torch.empty(2**20)) == ProcessTransport.ring_buffers(gpu, quarter) == 2


# What is refused.


REFUSED = [  # before it reaches the others: each rank can go on
    (lambda c: all_reduce(torch.ones(3), c, "or"), "unknown op 'or': use one of sum, mean, max, min"),
    (lambda c: reduce_scatter(torch.ones(3), c, "avg"), "unknown op 'avg'"),
    (lambda c: broadcast(torch.ones(3), c, root=3), "root 3 does not exist: ranks are 0 to 2"),
    (lambda c: broadcast(torch.ones(3), c, root=-1), "root -1 does not exist"),
    (lambda c: reduce_scatter(torch.ones(4, 3), c), r"minizero\.engines\.layout\.pad\(tensor, 3\)"),
    (lambda c: all_gather(torch.tensor(1.0), c), "dimension 0"),
    (lambda c: reduce_scatter(torch.tensor(1.0), c), "dimension 0"),
    (lambda c: all_gather(torch.ones(2), c, out=torch.ones(5)), r"out must be \(6,\)"),
    (lambda c: all_gather(torch.ones(2), c, out=torch.ones(6).double()), "out must be .*float32"),
    (lambda c: all_reduce(torch.ones(6), c, out=torch.ones(6).double()), "out must be .*float32"),
    (lambda c: all_reduce(torch.ones(5), c, out=torch.ones(5)), "3 ranks do not divide the 5 elements"),
]
for dtype in (*INTEGERS, torch.bool):
    for call in (all_reduce, reduce_scatter):
        REFUSED.append((partial(call, torch.ones(3, dtype=dtype), op="mean"), f"the mean of {dtype}"))
for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32):  # which PyTorch cannot add
    for op in ("sum", "max"):
        REFUSED.append((partial(all_reduce, torch.ones(3).to(dtype), op=op), f"no {op} of {dtype}: convert it"))


def test_bad_arguments():
    def fn(comm):
        for call, words in REFUSED:
            with pytest.raises(ValueError, match=words):
                call(comm=comm) if isinstance(call, partial) else call(comm)
        barrier(comm)
        return comm.transport.sequence

    assert run(3, fn) == [1] * 3


@pytest.mark.parametrize("odd_one", [0, 2])
@pytest.mark.parametrize("case", DISAGREE)
def test_a_mismatch_is_raised_on_every_rank_and_names_both_sides(case, odd_one):
    call, *says = DISAGREE[case]

    def fn(comm):
        barrier(comm)
        with pytest.raises(CollectiveMismatch) as caught:
            call(comm, comm.rank == odd_one)
        assert comm.transport.collective is None
        assert (comm.bytes_sent, comm.bytes_received) == (0, 0)  # before data moves
        return str(caught.value), all_reduce(torch.ones(2), comm).tolist()  # and nothing is left in the way

    for rank, (message, total) in enumerate(run(3, fn)):
        assert all(words in message for words in (*says, "#2"))
        assert message.startswith(f"rank {rank} called ") and f"rank {odd_one} called" in message
        assert total == [3.0, 3.0]


def test_one_collective_ahead_is_a_mismatch():
    def fn(comm):
        comm.transport.sequence += comm.rank == 1  # it has left one out before
        with pytest.raises(CollectiveMismatch, match="all_reduce #1.*all_reduce #2|all_reduce #2.*all_reduce #1"):
            all_reduce(torch.ones(4), comm)

    run(3, fn)
