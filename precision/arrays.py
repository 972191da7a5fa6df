"""NumPy arrays and torch tensors on one path: what they call by different names, and how they are cut into pieces.

Operators, slices, `clip`, `any` and `max` are the same in both. With these few functions one text serves both.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

Array = Any  # a NumPy array or a torch tensor

CPU_PIECE = 2**16  # numbers: the integers of each that are alive at a time fit a processor's second cache, or nearly
GPU_PIECE = 2**18  # with integers of 64 bits, some 40 MiB


def dtype_of(x: Array) -> str:
    """The dtype's name, the same for both."""
    return str(x.dtype).removeprefix("torch.") if isinstance(x, torch.Tensor) else x.dtype.name


def cast(x: Array, dtype: str) -> Array:
    """x converted to `dtype`, given by its name; x itself if it has that dtype."""
    if isinstance(x, torch.Tensor):
        return x.to(getattr(torch, dtype))
    if x.dtype == dtype:
        return x
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one, which needs no warning
        return x.astype(dtype)


def view(x: Array, dtype: str) -> Array:
    """The same bits, read as another type of the same width."""
    return x.view(getattr(torch, dtype) if isinstance(x, torch.Tensor) else dtype)


def empty_like(x: Array, dtype: str) -> Array:
    """Contiguous, of x's shape, on x's device."""
    if isinstance(x, torch.Tensor):
        return torch.empty(x.shape, dtype=getattr(torch, dtype), device=x.device)
    return np.empty(x.shape, dtype)


def where(condition: Array, x: Array | int, y: Array | int) -> Array:
    """x where the condition is true, y elsewhere."""
    return torch.where(condition, x, y) if isinstance(condition, torch.Tensor) else np.where(condition, x, y)


def local(x: Array) -> Array:
    """For a tensor on the CPU a NumPy array in the same memory, since NumPy is faster there; else x itself."""
    on_cpu = isinstance(x, torch.Tensor) and x.device.type == "cpu" and not torch.compiler.is_compiling()
    return x.numpy() if on_cpu else x


def as_array(name: str, x: Any) -> Array:
    """x as a tensor or an array of at least one dimension; `in_shape_of` gives a result x's own shape again.

    `TypeError` for what is no dense array. name: of x, for errors.
    """
    if isinstance(x, torch.Tensor):
        if x.layout != torch.strided or x.is_nested:
            raise TypeError(f"{name} is sparse or nested ({x.layout}): give a dense tensor, such as its to_dense()")
        x = x.detach().resolve_neg()
    else:
        if any(isinstance(part, np.ma.MaskedArray) for part in (x, *(x if isinstance(x, list | tuple) else ()))):
            raise TypeError(f"{name} is a masked array, and its mask would be lost: give its compressed() or filled(…)")
        try:
            x = np.asarray(x)
        except ValueError as error:
            raise TypeError(f"{name} is no array of numbers: {error}") from None
    return x.reshape(1) if x.ndim == 0 else x


def as_numbers(function: str, x: Any) -> Array:
    """As `as_array`. `TypeError` for anything but floating-point numbers."""
    x = as_array(f"{function}: x", x)
    if dtype_of(x) not in ("float64", "float32", "float16", "bfloat16"):
        raise TypeError(
            f"{function}: x must be float32 or float64 (float16 and bfloat16 are widened), not {dtype_of(x)}: cast "
            "integers to float64 if they are numbers, give them to decode if they are bits; of complex numbers take "
            "the real and the imaginary part"
        )
    return x


def as_patterns(name: str, x: Any, width: int) -> Array:
    """As `as_array`. `TypeError` if x holds no integers, `ValueError` if one of them does not fit in `width` bits."""
    x = as_array(name, x)
    dtype = dtype_of(x)
    too_large_for_numpy = dtype == "object" and [type(number) for number in x.flat] == [int]
    if not (dtype.startswith(("int", "uint")) or too_large_for_numpy):
        raise TypeError(f"{name} is {dtype}: expected bit patterns, which are integers: use fmt.encode(x) for numbers")
    has_values = isinstance(x, np.ndarray) or not x.is_meta
    for _, index in pieces(x) if has_values and dtype != f"uint{width}" else ():
        part = local(x[index])
        if isinstance(part, torch.Tensor):  # torch lacks min and max for some of the integers
            part = part.long()
        outside = [int(end) for end in (part.min(), part.max()) if not 0 <= end < 2**width]
        if outside:
            raise ValueError(
                f"{name} holds {outside[0]}: patterns of {width} bits are 0 to {2**width - 1} "
                "(a signed array can be viewed as an unsigned one)"
            )
    return x


def in_shape_of(x: Any, result: Array) -> Array:
    """`result` in x's shape: for a single number a tensor without dimensions, or a NumPy scalar, as in NumPy."""
    if isinstance(result, torch.Tensor):
        return result.reshape(x.shape)
    return result if np.ndim(x) else result[0]


def by_pieces(steps: Callable[..., Sequence[Array]], operands: Sequence[Array], dtypes: Sequence[str]) -> list[Array]:
    """The results of `steps(start, *parts)`, whole: arrays of these dtypes, like the first of the operands.

    The operands have one shape, and go through in pieces that a processor's cache holds. That is faster than sending
    everything through memory at each step, and bounds what is needed beside them, whatever the size. start: a piece's.
    """
    results = [empty_like(operands[0], dtype) for dtype in dtypes]
    for start, index in pieces(operands[0]):
        for result, part in zip(results, steps(start, *[operand[index] for operand in operands])):
            from_local = isinstance(result, torch.Tensor) and isinstance(part, np.ndarray)
            result[index] = torch.from_numpy(part) if from_local else part
    return results


def pieces(x: Array) -> Iterator[tuple[int, Any]]:
    """Cut x, of at least one dimension, into blocks: (position of the first number in row-major order, index).

    x[index] is a view, whatever x's strides are. An empty x has no blocks.
    """
    if isinstance(x, torch.Tensor) and torch.compiler.is_compiling():
        yield 0, ...  # a compiler fuses the steps and keeps nothing between them
    elif math.prod(x.shape):
        limit = CPU_PIECE if isinstance(x, np.ndarray) or x.device.type == "cpu" else GPU_PIECE
        # As many rows at once as `limit` numbers hold; of a dimension whose rows are longer each index by itself.
        depth = next(depth for depth in range(x.ndim) if math.prod(x.shape[depth + 1 :]) <= limit)
        row = math.prod(x.shape[depth + 1 :])
        for number, index in enumerate(np.ndindex(*x.shape[:depth])):
            for i in range(0, x.shape[depth], limit // row):
                yield (number * x.shape[depth] + i) * row, (*index, slice(i, i + limit // row))


def random_bits(like: Array, start: int, seed: int, bits: int) -> Array:
    """A random whole number below 2^bits (bits at most 63) for each number of an array: int64, of its shape.

    It depends on nothing but the seed and the number's position, counted from `start` in row-major order: so the
    device and the size of the pieces change nothing. Neighbouring seeds have keys that have nothing in common.
    Steele et al., 2014, "Fast splittable pseudorandom number generators" (SplitMix64).
    """
    stop = start + math.prod(like.shape)
    position: Array = np.arange(start, stop)
    if isinstance(like, torch.Tensor):
        position = torch.arange(start, stop, device=like.device)
    key = int(_mix(np.array([(seed + 2**63) % 2**64 - 2**63]))[0])  # of 64 bits, with a sign
    mixed = _mix(position.reshape(like.shape) * (0x9E3779B97F4A7C15 - 2**64) + key)
    return (mixed >> (64 - bits)) & (2**bits - 1)


def _mix(z: Array) -> Array:
    """SplitMix64's last step: each bit of z changes about half of the result's bits."""
    # Integers are signed here. Shifting one to the right fills it with copies of the sign; the masks take them away.
    z = (z ^ (z >> 30 & 2**34 - 1)) * (0xBF58476D1CE4E5B9 - 2**64)
    z = (z ^ (z >> 27 & 2**37 - 1)) * (0x94D049BB133111EB - 2**64)
    return z ^ (z >> 31 & 2**33 - 1)
