"""Processes that disagree wait for each other; a watch finds out, and ends the wait.

Messages of ranks that disagree never meet, since their tags differ (transport.py). So agreement
costs no message, but ranks that disagree are stuck. In each process a thread looks every
STUCK_SECONDS whether a collective is still the one it was. Only then it publishes what this rank
is about to do, in the store by which the processes met, and reads what the others have published.
Different words are the mismatch.
"""

import contextlib
import threading
import time
from datetime import timedelta
from typing import Any

import torch

from minizero.ranks.transport import Collective, Transport

STUCK_SECONDS = 0.25  # in one collective: longer than most, short for a person
LOOK_SECONDS = 1.0  # for the others' words, once a connection is lost
NEVER = 0x7FFFFFFE  # a tag that nobody sends


class Watch:
    """Looks after the communicators of one process, which share one gloo and one store."""

    def __init__(self, gloo: Any, store: Any, ranks: list[int]) -> None:
        self.gloo, self.store, self.ranks = gloo, store, ranks  # ranks[r] is the world rank of gloo's r
        self.transports: list[Transport] = []  # one of each communicator
        self.told = ""  # the mismatch, once there is one
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """End the thread."""
        self.over.set()
        self.thread.join()

    def _run(self) -> None:
        before: dict[Transport, int] = {}
        while not self.over.wait(STUCK_SECONDS):
            now = {transport: collective.number for transport, collective in self._busy()}
            for transport, number in now.items():
                if before.get(transport) == number:
                    self.compare(transport)
            if self.told:
                self.close()
            before = now

    def _busy(self) -> list[tuple[Transport, Collective]]:
        return [(each, found) for each in list(self.transports) if (found := each.collective) is not None]

    def compare(self, transport: Transport) -> dict[int, str]:
        """Publish this rank's words. Returns the words of each rank that published in the same collective, by rank."""
        found: dict[int, str] = {}
        collective = transport.collective  # read once: its own thread goes on while we look
        if collective is None or self.told:  # what was said about a mismatch stays: others still have to read it
            return found
        with contextlib.suppress(RuntimeError):  # the process that keeps the store is gone
            self.store.set(f"{transport.name} {transport.rank}", f"{collective.number} {collective.words}")
            for rank in range(transport.size):
                if self.store.check([key := f"{transport.name} {rank}"]):
                    number, words = self.store.get(key).decode().split(" ", 1)
                    if int(number) == collective.number:
                        found[rank] = words
        for rank, words in found.items():
            if words != collective.words:
                self.told = self.told or str(transport.mismatch(collective.words, rank, words))
        return found

    def look(self, transport: Transport, seconds: float = LOOK_SECONDS) -> dict[int, str]:
        """`compare` all that is under way until a mismatch is known, all ranks have published, or time is up.

        Returns what was found for `transport`.
        """
        end = time.monotonic() + seconds
        while True:
            found = {busy: self.compare(busy) for busy, _ in self._busy()}.get(transport, {})
            if self.told or len(found) == transport.size or time.monotonic() >= end:
                return found
            time.sleep(0.02)

    def blame(self, rank: int) -> int:
        """The rank to blame for a lost connection. The first report counts: closing connections makes others fail."""
        with contextlib.suppress(RuntimeError):  # the process that keeps the store is gone
            return int(self.store.compare_set("blamed", "", str(rank)))
        return rank

    def close(self) -> None:
        """End every rank's waits, in all communicators: gloo closes its connections if a wait runs out of time."""
        for peer in range(self.gloo.size()):
            if peer != self.gloo.rank():
                with contextlib.suppress(RuntimeError):  # a closed connection refuses, and ends no other
                    self.gloo.recv([torch.empty(1)], peer, NEVER).wait(timedelta(milliseconds=1))
