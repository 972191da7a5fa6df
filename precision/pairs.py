"""Encoding to 16 bits under torch.compile, on a CPU: two numbers at a time.

Two float32 numbers are read as one integer of 64 bits, and their two codes stored as one of 32. For these widths
torch.compile uses the processor's vectors. For integers of 16 bits it uses none, and takes six times as long.
"""

import torch

from precision.fast import Options, encode_integers
from precision.layout import BitLayout


def encode_pairs(x: torch.Tensor, fmt: BitLayout, options: Options) -> torch.Tensor:
    """The codes (n,), uint16, of n float32 numbers of any shape; n is even."""
    even, odd = even_and_odd(x.reshape(-1))
    first, _ = encode_integers(even, 0, fmt, options)
    second, _ = encode_integers(odd, 0, fmt, options)
    return ((second << 16) | first).view(torch.uint16)


@torch.compiler.allow_in_graph  # runs as it is, with the offset known: the compiler has no guard for it
def even_and_odd(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bits of numbers 0, 2, 4, … and of numbers 1, 3, 5, ….

    A tensor can be viewed as pairs if it begins at an even offset in its storage. torch refuses an odd offset if the
    graph was made for an even one: clone such a tensor.
    """
    if x.storage_offset() % 2:
        integers = x.view(torch.int32)
        return integers[::2], integers[1::2]
    pairs = x.view(torch.int64)
    return pairs.to(torch.int32), (pairs >> 32).to(torch.int32)
