"""What the random stages of the exercises on ranks draw from, and what they look at beside the values."""

import collections
import math
from random import Random
from typing import Any

import torch

from minizero.memory import Ledger
from tests.exercises.kit import AtMost, compare, ranks

SIZES = [*range(1, 9), 12]
FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
DTYPES = [*FLOATS, torch.int64, torch.int32]
SHAPES = [(), (1,), (2, 3), (5,), (4, 3, 2), (16,), (7, 1)]
LAYOUTS = ["contiguous", "transposed", "every second", "inside another"]
SPECIAL = (-0.0, math.inf, -math.inf, math.nan)


def whole(
    seed: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    layout: str = "contiguous",
    times: int = 1,
    special: tuple[float, ...] = (),
):
    """A tensor of small whole numbers, of which a sum over 8 ranks is exact in any dtype; no rank has another's.

    layout: "transposed": its dimensions lie in memory in reverse order; "every second": with gaps between elements;
    "inside another": a part of a longer tensor.
    special: what every fifth number is, if the dtype is one of floats; but not for seeds below 100, of plain cases.
    A tensor of more than 10,000 elements is contiguous, and has nothing special: it comes without lists.
    """
    numbers = Random(seed)
    if torch.Size(shape).numel() > 10_000:
        return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    values = [float(numbers.randint(-3, 3) * times) for _ in range(torch.Size(shape).numel())]
    if special and dtype.is_floating_point and seed >= 100:
        values = [numbers.choice(special) if numbers.random() < 0.2 else value for value in values]
    tensor = torch.tensor(values, dtype=torch.float64).to(dtype).view(shape)
    if layout == "transposed":
        backwards = tuple(reversed(range(tensor.dim())))
        return tensor.permute(backwards).contiguous().permute(backwards)
    if layout == "every second":
        return torch.stack([tensor, torch.full_like(tensor, 99)], -1)[..., 0]
    if layout == "inside another":
        around = torch.full((10,), 99, dtype=dtype)
        return torch.cat([around[:3], tensor.reshape(-1), around])[3:-10].view(shape)
    return tensor


def smallest(dtype: torch.dtype) -> float:
    """The smallest number above 0. If all ranks have it, it is the mean; divided before it is sent, it is 0.

    In 16 bits a normal one: there a part of the division may come first (ranks/combining.py).
    """
    return torch.finfo(dtype).smallest_normal * (1 if dtype.itemsize == 2 else torch.finfo(dtype).eps)


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of all that lies in the tensor's memory, also between its elements and around them."""
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).clone()


def group(world: Any, groups: int) -> Any:
    """The communicator of every so-manieth rank: a rank's number in it is not its number in the world."""
    return world.split(world.rank % groups) if groups > 1 else world


class Watch:
    """The messages of a rank: to whom it sends, and after how many others, one waiting for the next, each arrives.

    All ranks of a world share `times`, a dict; each makes a Watch of its own.
    """

    def __init__(self, comm: Any, times: "collections.defaultdict[tuple[int, int], collections.deque[int]]") -> None:
        self.comm, self.times = comm, times
        self.world_rank = comm.ranks[comm.rank]
        self.before, self.hops, self.messages = comm.bytes_sent, 0, 0
        self.receivers: set[int] = set()
        self.announced: collections.deque[tuple[int, int]] = collections.deque()  # by `soon`, not yet received
        self.as_announced, self.announced_first = True, 0  # so many before it sent anything
        self.soon, comm.transport.soon = comm.transport.soon, self._soon
        self.move, comm.transport.move = comm.transport.move, self._move
        self.transfer, comm.transport.transfer = comm.transport.transfer, self._transfer

    def _soon(self, tensors: list[torch.Tensor], src: int) -> None:
        self.announced_first += 0 if self.receivers else len(tensors)
        self.announced.extend((tensor.data_ptr(), src) for tensor in tensors)
        self.soon(tensors, src)

    def _move(self, outgoing: Any, dst: Any, incoming: Any, src: Any) -> None:
        if incoming is not None and self.announced:
            self.as_announced &= self.announced.popleft() == (incoming.data_ptr(), src)
        self.move(outgoing, dst, incoming, src)

    def _transfer(self, outgoing: Any, dst: Any, incoming: Any, src: Any) -> None:
        """Each message carries the number of those before it; a rank goes on from the largest that it has seen."""
        done = self.hops + 1
        if outgoing is not None:
            self.receivers.add(dst)
            self.messages += 1
            self.times[self.world_rank, self.comm.ranks[dst]].append(done)
        self.transfer(outgoing, dst, incoming, src)
        if incoming is not None:
            done = max(done, self.times[self.comm.ranks[src], self.world_rank].popleft())
        self.hops = done

    @property
    def kept_its_word(self) -> bool:
        """Did it receive what it told the transport by `soon`? Who tells nothing, did."""
        return self.as_announced and not self.announced

    @property
    def sent(self) -> int:
        return self.comm.bytes_sent - self.before


def metered(
    size: int, run: Any, *args: Any, most: float = 1.3, slack: float = 1500
) -> tuple[list[Any], dict[str, Any]]:
    """What a run gives each rank; and what it holds and what arrives, which a right answer may need `most` times, and
    `slack` bytes more.
    """

    def on_rank(comm: Any) -> Any:
        arrived, transfer = [0], comm.transport.transfer

        def counted(outgoing: Any, dst: Any, incoming: Any, src: Any) -> None:
            transfer(outgoing, dst, incoming, src)
            arrived.append(0 if incoming is None else incoming.nbytes)

        comm.transport.transfer = counted
        with Ledger() as ledger:
            result = run(comm, *args)
        peak = AtMost(ledger.peak["total"] + slack, most, 0.02)
        return result, {"bytes at the peak": peak, "bytes that arrived": AtMost(sum(arrived) + slack / 4, most)}

    results, meters = zip(*ranks(size, on_rank))
    others = sum(bool(compare(result, results[0])) for result in results)
    return list(results), {"ranks that end otherwise than rank 0": others, "the meters": by_rank(list(meters))}


def shared_times() -> "collections.defaultdict[tuple[int, int], collections.deque[int]]":
    return collections.defaultdict(collections.deque)


def by_rank(results: list[Any]) -> dict[str, Any]:
    """The ranks' results, named."""
    return {f"rank {rank}": result for rank, result in enumerate(results)}
