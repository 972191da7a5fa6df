"""Ranks that are threads keep to one core while they run.

They take turns at Python's lock (the GIL). On several cores each turn wakes another core: with models as small as
those of tests, that took three times the processor's time. (Large models gain by several cores: Python waits little.)
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator


@contextlib.contextmanager
def one_core(core: int | None = None) -> Iterator[None]:
    """This thread, and those that it starts, on a core: the one on which it is now if none is named. On Linux only."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    chosen = ctypes.CDLL(None).sched_getcpu() if core is None else sorted(cores)[core % len(cores)]
    with contextlib.suppress(OSError):  # a container may refuse it: then all is as it was, and slower
        os.sched_setaffinity(0, {chosen})
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores)
