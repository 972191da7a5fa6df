"""A thread that works for one rank alone: the other ranks have no such thread, and would never answer it."""

import threading

ALONE = "tries an optimizer"  # such a thread's name begins so (engines/elementwise.py starts one)


def not_alone(what: str) -> None:
    """`RuntimeError` if this thread works for one rank alone; `what` is the call that would need the others."""
    if threading.current_thread().name.startswith(ALONE):
        raise RuntimeError(f"its step calls {what}")
