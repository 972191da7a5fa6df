"""Arguments that a collective refuses before anything is sent: each check raises `ValueError`."""

from collections.abc import Collection

import torch
from torch import Tensor


def check_op(name: str, op: str, known: Collection[str], tensor: Tensor) -> None:
    """`op` must be one of `known`, and have a result in the tensor's dtype."""
    if op not in known:
        raise ValueError(f"{name}: unknown op {op!r}: use one of {', '.join(known)}")
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"{name}: the mean of {tensor.dtype} is not one: use op='sum', or a floating dtype")


def check_out(name: str, out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """`out`, if given, must have the shape and the dtype of the result."""
    if out is not None and (out.shape != shape or out.dtype != dtype):
        raise ValueError(f"{name}: out must be {shape} of {dtype}, not {tuple(out.shape)} of {out.dtype}")


def check_dimension(name: str, tensor: Tensor, ranks: int = 1) -> None:
    """The tensor must have a dimension 0, which `ranks` divides."""
    if tensor.dim() == 0:
        raise ValueError(f"{name}: needs a tensor with a dimension 0 to cut along: use tensor.reshape(1)")
    if tensor.shape[0] % ranks:
        raise ValueError(
            f"{name}: {ranks} ranks do not divide dimension 0 of shape {tuple(tensor.shape)}: "
            f"pad it with minizero.engines.layout.pad(tensor, {ranks})"
        )
