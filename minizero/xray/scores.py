"""Attention that stores no scores, in a model that stores them: how much would it save?

    softmax(q kᵀ / √d) v        autograd keeps the scores, (…, queries, keys), until backward

FlashAttention keeps none. Nobody can put it in the place of a softmax that a user has written. But what autograd keeps
can be changed: here it keeps the scores' shape, and hands backward an empty tensor of that shape. Numbers are then
wrong, and bytes are right: those of an attention that makes all its scores again in backward. FlashAttention makes them
a tile at a time, so it never has a layer's scores at once, as this has for a moment.
"""

import functools
from typing import Any

import torch
from torch import Tensor

SOFTMAX = ("Softmax", "SafeSoftmax")  # the second is in PyTorch's own attention, which stores scores under dropout
# What may lie between a softmax and the product with v: a cast, dropout, another shape.
BETWEEN = ("ToCopy", "NativeDropout", "Mul", "Div", "View", "UnsafeView", "Expand", "Clone", "Transpose")


class WithoutScores(torch.autograd.graph.saved_tensors_hooks):
    """While it is entered, autograd keeps no scores. It learns their shapes in a first step."""

    missing = "its attention stores no scores, or it has none"

    def __init__(self) -> None:
        super().__init__(self.keep, lambda kept: kept if isinstance(kept, Tensor) else kept())
        self.found: set[tuple[int, int]] = set()  # elements, keys

    def keep(self, tensor: Tensor) -> Tensor | functools.partial:
        if tensor.dim() < 3:  # such as the choice of an expert for each token
            return tensor
        kind = tensor.numel(), tensor.shape[-1]
        if comes_from_softmax(tensor.grad_fn):
            self.found.add(kind)
        anew = functools.partial(torch.empty, tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return anew if kind in self.found else tensor


def comes_from_softmax(node: Any, steps: int = 3) -> bool:
    """Is what this node of the graph made a softmax, or a softmax that was cast, dropped out, reshaped?"""
    name = "" if node is None else node.name().removesuffix("Backward0")
    between = name in BETWEEN and steps > 0
    return name in SOFTMAX or (between and any(comes_from_softmax(made, steps - 1) for made, _ in node.next_functions))
