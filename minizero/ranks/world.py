"""N ranks as threads of this process. They end together if one of them fails.

    World(4).run(train, 100)     a notebook, a laptop, one GPU

The first rank that fails is reported, with what the others were waiting in. The others stop at
their next communication. A rank that only computes is stopped a second later, at its next line of Python.
"""

import atexit
import ctypes
import threading
import time
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from typing import Any

import torch

from minizero.ranks.comm import Comm
from minizero.ranks.errors import RankFailed
from minizero.ranks.random_numbers import THIS_THREAD, as_this_rank, shared_states, states_for, swap_states
from minizero.ranks.threads import Run, ThreadTransport

GRACE_SECONDS = 1.0  # that the other ranks have to stop after a failure
END_SECONDS = 10.0  # that the end of the program waits for ranks that have not


class World:
    """`size` ranks as threads of this process, with real sends and receives between them.

    device: "auto" puts rank r on cuda:(r mod device_count) if there is CUDA, else on the CPU; "cuda"
    spreads the ranks, too; any other torch device holds all ranks. timeout: seconds that a rank waits
    for another. The ranks share `torch.get_num_threads()`. Each draws torch's random numbers for itself: those that the
    caller would draw next, until it calls `torch.manual_seed`. The caller then goes on with those of rank 0. Python's
    `random` and NumPy's belong to all ranks, and torch's to all threads that ranks start: `run` warns if one was used.
    Contexts such as `torch.no_grad` or autocast belong to a thread, too: enter them in the function.
    """

    def __init__(self, size: int, device: str | torch.device = "auto", timeout: float = 60.0) -> None:
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"World: size must be a whole number of at least 1, not {size!r}")
        if not isinstance(timeout, int | float) or not timeout > 0:
            raise ValueError(f"World: timeout must be a positive number of seconds, not {timeout!r}")
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            self.device = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"World: unknown device {device!r}: use 'auto', 'cpu' or 'cuda'") from error
        if self.device.type == "cuda" and (self.device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"World: no device {device!r} here: torch sees {torch.cuda.device_count()} GPUs")
        self.size, self.timeout = size, timeout

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list:
        """Call `fn(comm, *args, **kwargs)` on every rank. Returns their results in rank order.

        `RankFailed` as soon as one rank fails: the others stop at their next communication.
        """
        run = Run(self.size)
        results: list[Any] = [None] * self.size
        states = [states_for(self._device_of(rank)) for rank in range(self.size)]
        shared = shared_states()

        def rank_main(comm: Comm) -> None:
            try:
                THIS_THREAD.states = states[comm.rank]
                if comm.device.type == "cuda":
                    torch.cuda.set_device(comm.device)
                # Otherwise every rank's backward would queue up in one thread for each device.
                with torch.autograd.set_multithreading_enabled(False):
                    try:
                        results[comm.rank] = result = fn(comm, *args, **kwargs)
                    finally:
                        states[comm.rank] = THIS_THREAD.states
                        _forget_failed_backward()
                if isinstance(result, Generator | AsyncGenerator | Awaitable):
                    raise TypeError(
                        f"World.run: the function returned a {type(result).__name__}, which nobody runs: "
                        "hand over a function without yield and async; it may call list(...) or asyncio.run(...)"
                    )
            except BaseException as error:  # also SystemExit: no rank may vanish silently
                run.fail(comm.rank, error)
            finally:
                run.finish(comm.rank)

        everyone = list(range(self.size))
        run.transports = [
            ThreadTransport(rank, everyone, self._device_of(rank), self.timeout, "", run) for rank in everyone
        ]
        threads = [
            threading.Thread(target=rank_main, args=(Comm(transport),), name=f"rank {transport.rank}", daemon=True)
            for transport in run.transports
        ]
        try:
            for thread in threads:
                thread.start()
            while not run.over.wait(1.0):  # until all have finished or one has failed; in slices, to hear Ctrl-C
                pass
        except BaseException as error:  # Ctrl-C, or no more threads to be had
            run.fail(-1, error)
            raise
        finally:
            alive = _alive_after(GRACE_SECONDS, threads)
            # After a failure such a thread only computes, and never sees that the run is over: SystemExit stops it.
            for thread in alive if run.failure is not None else []:
                ident = ctypes.c_ulong(thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))
        if run.failure is not None:
            rank, cause, report = run.failure
            raise RankFailed(rank, report) from cause
        used = [name for name, state in shared_states().items() if state != shared[name]]
        if used and self.size > 1:
            warnings.warn(
                f"World.run: the ranks used {' and '.join(used)}, which threads share. So a rank's numbers depend on "
                "the others, and are not those that a process of its own draws: give each rank a generator of its own, "
                "random.Random(seed), numpy.random.default_rng(seed) or torch.Generator(), or start it with torchrun",
                stacklevel=2,
            )
        with as_this_rank():
            swap_states(states[0])
        return results

    def _device_of(self, rank: int) -> torch.device:
        if self.device.type == "cuda" and self.device.index is None:
            return torch.device("cuda", rank % torch.cuda.device_count())
        return self.device


def _forget_failed_backward() -> None:
    """Let this thread's autograd drop what a backward that raised had still to do: the next backward does.

    Else it is freed after Python's end of the thread, and a program that ends at that moment aborts.
    """
    with torch.inference_mode(False), torch.enable_grad():
        torch.ones((), device="cpu", requires_grad=True).backward()


@atexit.register
def _wait_for_ranks() -> None:
    """The program ends: a rank that comes back to Python from a long operation would now be cut off, and abort it."""
    _alive_after(END_SECONDS, [thread for thread in threading.enumerate() if thread.name.startswith("rank ")])


def _alive_after(seconds: float, threads: list[threading.Thread]) -> list[threading.Thread]:
    """Those threads that are still alive after so many seconds; returns earlier if none is."""
    patience = time.monotonic() + seconds
    for thread in threads:
        if thread.is_alive():
            thread.join(max(0.0, patience - time.monotonic()))
    return [thread for thread in threads if thread.is_alive()]
