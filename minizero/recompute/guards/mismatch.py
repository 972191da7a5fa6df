"""The error for a second forward that differs from the first, and words that messages share."""

from typing import Any

ADVICE = (
    "let it depend on its arguments and on torch's generators only (a cache that grows with each forward is a common "
    "cause: switch it off, in Hugging Face's models by use_cache=False)"
)

TRANSFORMS = (
    "checkpoint: torch.func's transforms (grad, vmap, jacrev, …) can neither go through it nor be called inside of it: "
    "call the function without checkpoint there, or inside set_enabled(False)"
)


class RecomputeMismatch(RuntimeError):
    """The second forward did not compute, or could not compute, what the first one did."""


def name_of(function: Any) -> str:
    """How errors call a function, a module, or what already has a name."""
    if isinstance(function, str):
        return function
    return getattr(function, "__qualname__", type(function).__name__)
