"""What a rank sees of the others: who it is, and how it reaches them.

A rank is one of N workers that run the same program, each on its own data. What one rank knows,
another learns only from a message, and a `Comm` sends and receives the messages:

    World(4).run(fn)                    4 ranks, threads of this process, each call fn(comm)
    comm = Comm.from_process_group()    this process is one rank of torchrun

`send` returns when the matching `recv` has copied the data (a rendezvous, as in MPI). Two ranks that both `send` first
deadlock; use `send_recv`. The collectives are made of these three calls, DDP and ZeRO of the collectives.
"""

import atexit
import contextlib
from collections.abc import Callable
from typing import Any

import torch

from minizero.ranks.agreement import Observer, agreement, words_of_all
from minizero.ranks.processes.torchrun import process_transport
from minizero.ranks.transport import Transport


class Comm(contextlib.AbstractContextManager):
    """One rank's view of the others.

    rank: this rank, 0 … size-1. size: how many ranks there are, N. device: where this rank computes.
    A part made by `split` numbers its ranks anew: `ranks[r]` is its rank r in the world. Errors name world ranks.
    """

    def __init__(self, transport: Transport, observers: list[Observer] | None = None) -> None:
        self.transport = transport  # carries the messages: threads.py or processes/
        self.rank = transport.rank
        self.size = transport.size
        self.device = transport.device
        self.ranks = transport.ranks
        self.observers = [] if observers is None else observers  # called after each collective, also of the parts
        self.leaving = contextlib.ExitStack()  # what there is to be done at its end

    @staticmethod
    def from_process_group(group: Any = None) -> "Comm":
        """This process as one rank of `torch.distributed`, on a GPU if each rank has one, else on the CPU.

        If there is no process group yet, it makes one from torchrun's variables, `ValueError` outside torchrun.
        `close()`, the end of a `with` block, or the end of the program destroys only what was made here.
        """
        leaving = contextlib.ExitStack()
        comm = Comm(leaving.enter_context(process_transport(group)))
        comm.leaving = leaving
        atexit.register(comm.close)
        return comm

    def close(self) -> None:
        """Leave the other ranks. What is closed already, or a thread's, stays as it is."""
        self.leaving.close()

    def __exit__(self, *error: Any) -> None:
        self.leaving.__exit__(*error)  # after an error the others are told

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Send `tensor` to rank `dst`. Returns when it has been received."""
        self.transport.move(tensor, dst, None, None)

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        """Fill `tensor` with what rank `src` sends: as many elements, of the same dtype."""
        self.transport.move(None, None, tensor, src)

    def send_recv(self, outgoing: torch.Tensor, dst: int, incoming: torch.Tensor, src: int) -> None:
        """Send `outgoing` to rank `dst`, and at the same time fill `incoming` from rank `src`."""
        self.transport.move(outgoing, dst, incoming, src)

    def split(self, color: int | Callable[[int], int]) -> "Comm":
        """A communicator of the ranks that gave the same color, in the order of their ranks. Collective.

        color: this rank's, which the others must be told; or the rule that gives each rank its color. With a rule a
        rank knows all colors, and the ranks only agree that they have one rule.
        """
        if callable(color):
            colors = [f"{color(rank)}" for rank in range(self.size)]
            with agreement(self, "split", colors=",".join(colors)):
                pass
        else:
            colors = words_of_all(self, "split", f"{color}")
        mine = [rank for rank, other in enumerate(colors) if other == colors[self.rank]]
        # `sequence` counts the collectives: no two splits have one name.
        name = f"{self.transport.sequence}:{colors[self.rank]}"
        return Comm(self.transport.subgroup(mine, name), self.observers)

    @property
    def bytes_sent(self) -> int:
        """Bytes of the tensors that this rank has sent, also through what `split` made."""
        return self.transport.sent

    @property
    def bytes_received(self) -> int:
        """Bytes of the tensors that this rank has received, also through what `split` made."""
        return self.transport.received

    @property
    def timeout(self) -> float:
        """Seconds that this rank waits for another."""
        return self.transport.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self.transport.timeout = seconds
