"""The loss in chunks, in a model that makes all logits: how much would it save?

    logits = hidden @ weight.T; loss = cross_entropy(logits, targets)       in the user's code
    loss = cross_entropy_in_chunks(hidden, weight, targets, chunk=…)        in its place

The head is the linear layer whose result goes into the cross-entropy. A first step finds it. From then on its product
is not made. A stand-in of the logits' shape goes on: one number, expanded, that remembers hidden and weight. What only
changes its shape or its dtype is done to `hidden` instead. When the stand-in comes to the cross-entropy, the loss is
computed in chunks, with the right value and gradients. Whatever else the code does with its logits is refused by name.
"""

from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from minizero.chunked_loss import cross_entropy_in_chunks

CHUNKS = 8  # so many chunks: the logits of one are an eighth of all
SAME_ROWS = {"__getitem__", "view", "reshape", "flatten", "squeeze", "unsqueeze", "float", "to", "contiguous", "clone"}
QUESTIONS = {"size", "dim", "numel", "stride", "__get__", "is_floating_point", "detach", "untyped_storage"}


class Head(NamedTuple):
    """What makes the logits that a stand-in stands for. input: hidden (…, width); weight: (words, width)."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None = None


class LossInChunks(TorchFunctionMode):
    """While it is entered, losses are computed in chunks, once a first step has found the head."""

    missing = "no linear layer leads straight to a cross-entropy"

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()  # id() of each head's weight

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        first = args[0] if args else kwargs.get("input")
        known = vars(first) if isinstance(first, Tensor) else {}
        if func is F.linear and id((head := Head(*args, **kwargs)).weight) in self.found:
            return stand_in(head, (*head.input.shape[:-1], head.weight.shape[0]))
        if "head" in known and name not in QUESTIONS:
            return self.go_on(known["head"], func, name, first, args, kwargs)
        result = func(*args, **kwargs)
        if func is F.linear:  # is it a head?
            result.made_by = id(head.weight)
        elif "made_by" in known and func is F.cross_entropy:
            self.found.add(known["made_by"])
        elif "made_by" in known and name in SAME_ROWS:
            result.made_by = known["made_by"]
        return result

    def go_on(self, head: Head, func: Any, name: str, logits: Any, args: Any, kwargs: Any) -> Tensor:
        """What the code does with logits, done to a stand-in."""
        if func is F.cross_entropy:
            return loss(head, *args[1:], **{key: value for key, value in kwargs.items() if key != "input"})
        shape = func(*args, **kwargs).shape if name in SAME_ROWS else ()
        if shape[-1:] != logits.shape[-1:]:
            raise ValueError(f"its logits go through {name}() before the loss")
        hidden = head.input[args[1]] if name == "__getitem__" else head.input.reshape(*shape[:-1], -1)
        return stand_in(head._replace(input=hidden), shape)


def stand_in(head: Head, shape: Any) -> Tensor:
    """A tensor in the place of logits: one number, expanded."""
    made = head.input.new_zeros(()).expand(shape)
    made.head = head  # type: ignore[attr-defined]
    return made


def loss(head: Head, target: Tensor, **options: Any) -> Tensor:
    """The cross-entropy of what a stand-in stands for."""
    known = {name: options.pop(name) for name in ("ignore_index", "reduction") if name in options}
    if given := [name for name, value in options.items() if value not in (None, 0.0)]:
        raise ValueError(f"its cross-entropy has {', '.join(given)}")
    chunk = -(-target.numel() // CHUNKS)
    return cross_entropy_in_chunks(*head[:2], target, bias=head.bias, chunk=chunk, **known)
