"""Bit patterns as users bring them, made ready for the steps of `arithmetic`, and the results given back in kind.

The steps know integer tensors of one shape, and nothing else. Users bring NumPy arrays, torch tensors on any device
and whole numbers, of any integer type: these are checked and broadcast here. Large arrays go through the steps in
pieces that stay in the processor's cache, which is faster and needs little memory.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from precision.arrays import as_patterns, by_pieces, cast
from precision.formats import Flags, FloatFormat
from precision.one_number import ROUNDINGS


def on_bits(operation: Callable[..., tuple[Tensor, Flags]]) -> Any:
    """A decorator: `operation(*tensors, fmt, rounding) -> (bits, flags)` for all kinds of operands.

    What users call has one more argument, return_flags=False. The operation itself is its `__wrapped__`, of whose
    steps torch.compile makes a single loop.
    """
    signature = inspect.signature(operation)
    return_flags = inspect.Parameter("return_flags", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=False)
    signature = signature.replace(parameters=[*signature.parameters.values(), return_flags])
    name = operation.__name__

    @functools.wraps(operation)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        *operands, fmt, rounding, return_flags = given.arguments.values()
        if rounding not in ROUNDINGS or rounding == "stochastic":
            raise ValueError(f"{name}: unknown rounding {rounding!r}: use one of {', '.join(ROUNDINGS[:-1])}")

        def steps(*tensors: Tensor) -> list[Tensor]:
            bits, flags = operation(*tensors, fmt, rounding)
            if fmt.nan_bits is None and bool(flags.invalid.any()):
                raise ValueError(f"{name}: some results have no value, such as 0 / 0 or ∞ - ∞, and {fmt} has no NaN")
            return [bits, *vars(flags).values()] if return_flags else [bits]

        bits, *flags = run(name, steps, operands, fmt, [""] + ["bool"] * 5 * return_flags)
        return (bits, Flags(*flags)) if return_flags else bits

    checked.__signature__ = signature  # type: ignore[attr-defined]
    return checked


def run(
    name: str,
    steps: Callable[..., Sequence[Tensor]],
    operands: Sequence[Any],
    fmt: FloatFormat,
    dtypes: Sequence[str],
) -> list[Any]:
    """The results of `steps` on the operands, piece by piece. dtypes: theirs, "" for that of `fmt`'s patterns.

    The results are torch tensors if an operand is one, whole numbers if all operands are, else NumPy arrays.
    """
    if not isinstance(fmt, FloatFormat):
        raise TypeError(f"{name}: fmt must be a FloatFormat such as FP16, not {fmt!r}")
    if fmt.width > 16:
        raise ValueError(f"{name}: {fmt} has {fmt.width} bits: arithmetic is for formats of at most 16")
    own_dtype = "uint8" if fmt.width <= 8 else "uint16"
    # All steps fit in 32 bits up to 11 bits of mantissa: the largest number is a square root's, 2·11 + 8 bits.
    working_dtype = torch.int32 if fmt.mantissa_bits <= 11 else torch.int64
    device = next((x.device for x in operands if isinstance(x, Tensor)), None)
    tensors = []
    for i, x in enumerate(operands, 1):
        patterns = as_patterns(f"{name}: operand {i}", x, fmt.width)
        patterns = patterns if isinstance(x, Tensor) else torch.from_numpy(patterns.astype(own_dtype))
        tensors.append(cast(patterns, own_dtype).reshape(np.shape(x)))
    try:
        shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    except RuntimeError:
        shapes = " and ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ValueError(f"{name}: shapes {shapes} do not broadcast") from None
    tensors = [torch.atleast_1d(tensor.to(device).expand(shape)) for tensor in tensors]

    def work(_: int, *parts: Tensor) -> Sequence[Tensor]:
        return steps(*(part.to(working_dtype) for part in parts))

    results = by_pieces(work, tensors, [dtype or own_dtype for dtype in dtypes])
    results = [result.reshape(shape) for result in results]
    if device is not None:
        return results
    if all(isinstance(x, int) for x in operands):
        return [result.item() for result in results]
    return [result.numpy()[()] for result in results]  # [()]: a scalar where there is no dimension, as NumPy does
