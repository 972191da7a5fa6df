"""A flat buffer is cut into N equal chunks, one a rank. Where N does not divide its length, zeros are appended first:
zeros, since they are summed and stepped with the rest and must change nothing.

    pad([1 2 3 4 5], 4) = [1 2 3 4 5 0 0 0]        pad([1 2 3 4], 4) = [1 2 3 4]
"""

import itertools
from random import Random
from typing import Any, NamedTuple

import torch

from minizero.engines import layout
from tests.exercises import rank_kit
from tests.exercises.draws import deal
from tests.exercises.kit import observed, wrong

PLAN = [
    "How many rows are missing until `multiple` divides tensor.shape[0]? From 0 to multiple - 1. Python's % of a "
    "negative number helps.",
    "If none is missing, return the tensor as it is.",
    "Else return it with so many rows of zeros behind it: same dtype, same device, same other dimensions.",
]
HINTS = [
    "7 rows, multiple 4: the next multiple is 8, so 1 is missing. What is -7 % 4 in Python?",
    "tensor.new_zeros(rows, *tensor.shape[1:]) has the tensor's dtype and device.",
    "torch.cat([first, second]) puts two tensors behind each other along dimension 0.",
]
AFTER = (
    "The package counts the missing rows with `-rows % multiple`: in Python the result is never below 0. If nothing "
    "is missing, it returns the tensor itself, so a tensor that fits costs no copy. `new_zeros` takes dtype and "
    "device from the tensor, so nobody has to name them. The engines need no `pad` for their parameters: they know "
    "the padded size before, and make the buffer of that size at once. Read next: `from_rank_0` in "
    "minizero/engines/core.py."
)
WRONG = [
    wrong("pads-a-whole-multiple", "4 rows became 8 with multiple 4, which divides 4 already: append nothing then.",
          ("-tensor.shape[0] % multiple", "multiple - tensor.shape[0] % multiple")),
    wrong("pads-the-remainder", "It adds as many rows as are over. It must add as many as are missing.",
          ("-tensor.shape[0] % multiple", "tensor.shape[0] % multiple")),
    wrong("pads-in-front", "The zeros come before the data: put them behind.",
          ("[tensor, tensor.new_zeros(missing, *tensor.shape[1:])]",
           "[tensor.new_zeros(missing, *tensor.shape[1:]), tensor]")),
    wrong("pads-with-ones", "The padding is 1, and would be added to other ranks' sums: it must be 0.",
          ("new_zeros", "new_ones")),
    wrong("loses-the-dtype", "The zeros have another dtype, or are on another device: make them like the tensor.",
          ("tensor.new_zeros(missing, *tensor.shape[1:])", "torch.zeros(missing, *tensor.shape[1:])")),
    wrong("always-copies", "Nothing is missing, so return the tensor itself. A copy takes as much memory again.",
          (" if missing else tensor", "")),
    wrong("powers-of-two-only", "It works for 1, 2, 4 and 8 ranks only: any number of ranks must divide what comes "
          "out.", ("-tensor.shape[0] % multiple", "-tensor.shape[0] & (multiple - 1)")),
    wrong("overwrites-the-input", "The tensor that was given has another length afterwards: it is the caller's.",
          ("return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor",
           "if missing:\n        tensor.resize_(tensor.shape[0] + missing, *tensor.shape[1:])[-missing:] = 0\n"
           "    return tensor")),
]  # fmt: skip


class Case(NamedTuple):
    rows: int
    multiple: int
    other_dimensions: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    requires_grad: bool
    seed: int


def draw(random: Random) -> list[Case]:
    ways = [*itertools.product(range(21), range(1, 9))]
    ways += [(random.randint(0, 300), random.randint(9, 100)) for _ in range(10)]
    dtypes = [*rank_kit.DTYPES, torch.uint8, torch.bool, torch.complex64]
    rows = deal(random, ways, [(), (3,), (2, 4), (1, 1, 2), (0,)], dtypes, rank_kit.LAYOUTS, [False, True])
    plain = [Case(n, 4, (), torch.float32, "contiguous", False, 1) for n in (5, 4)]
    return plain + [Case(*row) for row in rows]


def result(case: Case) -> dict[str, Any]:
    special = rank_kit.SPECIAL if case.dtype.is_floating_point else ()
    shape = case.rows, *case.other_dimensions
    given = rank_kit.whole(case.seed, shape, case.dtype, case.layout, special=special)
    given.requires_grad_(case.requires_grad and case.dtype.is_floating_point)
    seen = observed(layout.pad, given, case.multiple, most=2.5, meta=case.seed > 1)
    padded = layout.pad(given, case.multiple)
    return seen | {
        "the memory in which the input lies": rank_kit.memory(given),
        "the result is the input itself": padded is given,
        "the result lies in the input's memory": _storage(padded) == _storage(given) != 0,
        "what was given, afterwards": [given.detach().clone()],
    }


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
