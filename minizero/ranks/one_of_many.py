"""One rank of N, without the others: for a question whose answer is bytes, and no values.

    comm = one_of_many(size=64)
    model = Zero3(GPT(config), comm)     what rank 0 of 64 holds and sends, on a laptop

A ring moves tensors whose shapes this rank knows already. So its peers can be absent: what should have come from them
stays as it is. All sizes, all allocations and all bytes sent are those of a real rank; the values are not. Under fake
tensors, which have no values, nothing is lost.

What a rank could learn only from another one is refused: a guess would be wrong in silence.
"""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, NoReturn

import torch

from minizero.memory.operators import Watcher
from minizero.ranks.comm import Comm
from minizero.ranks.transport import Transport


class AbsentPeers(Transport):
    """The connections of a rank whose peers do not exist."""

    def transfer(self, outgoing: Any, dst: Any, incoming: Any, src: Any) -> None:
        self.settle()

    def settle(self) -> None:
        if self.collective is not None:
            self.collective.agreed = True  # nobody is there to disagree

    def exchange(self, words: str) -> NoReturn:
        raise RuntimeError(
            f"rank {self.world_rank} is alone, and cannot know what the other {self.size - 1} would say to {words!r}: "
            "run all ranks, World(n).run(…)"
        )

    def executor(self) -> Executor:
        return AtOnce()


class AtOnce(Executor):
    """Runs a call when it is handed over. What it took and made stays until somebody waits for the result.

    So the memory of a message that is under way is there while the next block computes, as it is beside real ranks.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        future = UnderWay()
        future.held = []
        with Holding(future.held):
            future.set_result(fn(*args, **kwargs))
        return future


class UnderWay(Future):
    """A result, and the tensors that are there until it is asked for."""

    held: list[Any]

    def result(self, timeout: float | None = None) -> Any:
        self.held.clear()
        return super().result(timeout)


class Holding(Watcher):
    """Keeps what operators take and make."""

    def __init__(self, held: list[Any]) -> None:
        super().__init__()
        self.held = held

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        self.held.append((args, kwargs, result))
        return result


def one_of_many(size: int, rank: int = 0, device: str | torch.device = "cpu") -> Comm:
    """Rank `rank` of `size`, alone. `ValueError` if there is no such rank."""
    if not isinstance(size, int) or not isinstance(rank, int) or not 0 <= rank < size:
        raise ValueError(f"one_of_many: there is no rank {rank!r} of {size!r}: ranks are 0 to size - 1")
    return Comm(AbsentPeers(rank, list(range(size)), torch.device(device), 60.0, ""))
