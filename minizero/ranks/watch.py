"""Processes that are stuck find out why: each leaves word of what it is in, and reads the others'.

Messages of ranks that disagree never meet, since their tags differ (processes.py). So agreement costs nothing, and
ranks that disagree wait for each other. A thread that looks at them now and then sees who is stuck. Then, and only
then, what each rank is in goes to the store that the processes met by, where two different words are the mismatch.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch

from minizero.ranks.comm import Comm

STUCK_SECONDS = 0.25  # in one collective: longer than most, short for a person
LOOK_SECONDS = 1.0  # for the others' words, once a connection is lost
NEVER = 0x7FFFFFFE  # a tag that nobody sends


class Watch:
    """Looks after the communicators of one process; `root` is what all of them were split from."""

    def __init__(self, root: Comm, gloo: Any, store: Any) -> None:
        self.root, self.gloo, self.store = root, gloo, store
        self.told = ""  # the mismatch, once there is one
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """The end of the communicators."""
        self.over.set()
        self.thread.join()

    def _run(self) -> None:
        before: dict[Comm, int] = {}
        while not self.over.wait(STUCK_SECONDS):
            now = {comm: comm.sequence for comm in self._busy()}
            stuck = [comm for comm, sequence in now.items() if before.get(comm) == sequence]
            for comm in stuck:
                self.words(comm)
            if self.told:
                self.close()
            before = now

    def _busy(self) -> list[Comm]:
        return [comm for comm in family(self.root) if comm.operation]

    def words(self, comm: Comm) -> dict[int, str]:
        """Leave this rank's words; those of all ranks that are, or were, stuck in the same collective, by rank."""
        found: dict[int, str] = {}
        sequence, mine = comm.sequence, comm.words
        if self.told or f"#{sequence}" not in mine:  # others still have to read what was said; or it has just moved on
            return found
        try:
            self.store.set(f"{comm.name} {comm.rank}", f"{sequence} {mine}")
            for rank in range(comm.size):
                if self.store.check([key := f"{comm.name} {rank}"]):
                    theirs, words = self.store.get(key).decode().split(" ", 1)
                    if int(theirs) == sequence:
                        found[rank] = words
        except RuntimeError:  # the process that keeps the store is gone
            pass
        for rank, words in found.items():
            if words != mine:
                self.told = self.told or str(comm.mismatch(rank, words))
        return found

    def look(self, comm: Comm, seconds: float = LOOK_SECONDS) -> dict[int, str]:
        """`words` of `comm`, when all ranks have left theirs, a mismatch is known, or time is up."""
        end = time.monotonic() + seconds
        while True:
            found = {busy: self.words(busy) for busy in self._busy()}.get(comm, {})
            if self.told or len(found) == comm.size or time.monotonic() >= end:
                return found
            time.sleep(0.02)

    def blame(self, rank: int) -> int:
        """Whom ranks in collectives blame for a lost connection: whom the first did, since its `close` loses others."""
        with contextlib.suppress(RuntimeError):  # the process that keeps the store is gone
            return int(self.store.compare_set("blamed", "", str(rank)))
        return rank

    def close(self) -> None:
        """End every rank's waits, in all communicators: gloo closes its connections where a wait runs out of time."""
        for peer in range(self.root.size):
            if peer != self.root.rank:  # one that is closed already refuses, and ends nothing else
                with contextlib.suppress(RuntimeError):
                    self.gloo.recv([torch.empty(1)], peer, NEVER).wait(timedelta(milliseconds=1))


def family(comm: Comm) -> Iterator[Comm]:
    """A communicator, and all that were split from it."""
    yield comm
    for child in list(comm.children):
        yield from family(child)
