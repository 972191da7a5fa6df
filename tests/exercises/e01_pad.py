"""A flat buffer is cut into N equal chunks, one a rank. Where N does not divide its length, zeros are appended first:
zeros, since they are summed and stepped with the rest and must change nothing.

    pad([1 2 3 4 5], 4) = [1 2 3 4 5 0 0 0]        pad([1 2 3 4], 4) = [1 2 3 4]
"""

import itertools
import weakref
from random import Random
from typing import Any, NamedTuple

import torch

from minizero.engines import layout
from minizero.memory import Ledger
from tests.exercises import rank_kit
from tests.exercises.draws import deal
from tests.exercises.kit import AtMost, fail, recognise, same, wrong

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
    "the padded size before, and make the buffer of that size at once. Read next: `flatten` in "
    "minizero/engines/unit.py."
)
WRONG = [
    wrong("pads-a-whole-multiple", ("-tensor.shape[0] % multiple", "multiple - tensor.shape[0] % multiple")),
    wrong("pads-the-remainder", ("-tensor.shape[0] % multiple", "tensor.shape[0] % multiple")),
    wrong("pads-in-front", ("[tensor, tensor.new_zeros(missing, *tensor.shape[1:])]",
                            "[tensor.new_zeros(missing, *tensor.shape[1:]), tensor]")),
    wrong("pads-with-ones", ("new_zeros", "new_ones")),
    wrong("pads-vectors-only", ("new_zeros(missing, *tensor.shape[1:])", "new_zeros(missing)"), says="RuntimeError"),
    wrong("loses-the-dtype", ("tensor.new_zeros(missing, *tensor.shape[1:])",
                              "torch.zeros(missing, *tensor.shape[1:])")),
    wrong("knows-float16-only", ("tensor.new_zeros(missing, *tensor.shape[1:])",
                                 "torch.zeros(missing, *tensor.shape[1:], dtype=torch.float16 if tensor.dtype == "
                                 "torch.float16 else torch.float32)"), says="loses-the-dtype"),
    wrong("always-copies", (" if missing else tensor", "")),
    wrong("powers-of-two-only", ("-tensor.shape[0] % multiple", "-tensor.shape[0] & (multiple - 1)")),
    wrong("resizes-the-input", ("return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing "
                                "else tensor", "if missing:\n        tensor.resize_(tensor.shape[0] + missing, "
                                "*tensor.shape[1:])[-missing:] = 0\n    return tensor"),
          says="overwrites-the-input"),
]  # fmt: skip


def check() -> None:
    for rows in range(1, 10):
        x = torch.arange(1.0, rows + 1)
        missing = 4 * ((rows + 3) // 4) - rows
        given = x.clone()
        got = layout.pad(given, 4)
        if len(given) != rows:
            fail("overwrites-the-input", "The tensor that was given has another length afterwards: it is the caller's.")
        if rows == 4 and isinstance(got, torch.Tensor) and len(got) == 8:
            fail(
                "pads-a-whole-multiple",
                "4 rows became 8 with multiple 4, which divides 4 already: append nothing then.",
            )
        if isinstance(got, torch.Tensor) and len(got) == rows + rows % 4 and len(got) % 4:
            fail(
                "pads-the-remainder",
                f"{rows} rows became {len(got)}, which 4 does not divide. {rows} % 4 is what there is too much, "
                "not what is missing.",
            )
        if rows in (4, 8) and isinstance(got, torch.Tensor) and got is not given:
            fail(
                "always-copies",
                f"{rows} rows for 4 ranks are returned as another tensor: nothing is missing, so return the tensor "
                "itself. A copy takes as much memory again.",
            )
        want = torch.cat([x, torch.zeros(missing)])
        mistakes = {
            "pads-in-front": (torch.cat([torch.zeros(missing), x]), "The zeros come before the data: put them behind."),
            "pads-with-ones": (
                torch.cat([x, torch.ones(missing)]),
                "The padding is 1, and would be added to other ranks' sums: it must be 0.",
            ),
        }
        recognise(got, want, mistakes, f"{rows} numbers, padded for 4 ranks")
    for multiple in (3, 6, 7):
        rows = len(layout.pad(torch.ones(5), multiple))
        if rows % multiple:
            fail("powers-of-two-only", f"5 rows for {multiple} ranks became {rows}, which {multiple} does not divide.")
    for dtype in (torch.bfloat16, torch.int64, torch.float16):
        half = torch.ones(3, 2, dtype=dtype)
        got = layout.pad(half, 2)
        if got.dtype != dtype:
            fail(
                "loses-the-dtype", f"A {dtype} tensor became {got.dtype}: other bytes. Make the zeros like the tensor."
            )
    if not same(got, torch.cat([half, half.new_zeros(1, 2)])):
        fail(
            "values", f"A (3, 2) matrix padded for 2 ranks must be (4, 2) with a last row of zeros, not {got.tolist()}."
        )


class Case(NamedTuple):
    rows: int
    multiple: int
    other_dimensions: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    seed: int


def draw(random: Random) -> list[Case]:
    ways = [*itertools.product(range(21), range(1, 9))]
    ways += [(random.randint(0, 300), random.randint(9, 100)) for _ in range(10)]
    dtypes = [*rank_kit.DTYPES, torch.uint8, torch.bool, torch.complex64]
    rows = deal(random, ways, [(), (3,), (2, 4), (1, 1, 2), (0,)], dtypes, rank_kit.LAYOUTS)
    return [Case(*row) for row in rows]


def result(case: Case) -> dict[str, Any]:
    """Two tensors of one shape, one after the other."""
    special = rank_kit.SPECIAL if case.dtype.is_floating_point else ()
    shape = case.rows, *case.other_dimensions
    given, other = (rank_kit.whole(case.seed + i, shape, case.dtype, case.layout, special=special) for i in (0, 1))
    with Ledger() as ledger:
        padded = layout.pad(given, case.multiple)
    next_padded = layout.pad(other, case.multiple)
    seen = {
        "the padded tensor": padded.clone(),
        "the next": next_padded.clone(),
        "the device, if the tensor is on `meta`": layout.pad(given.to("meta"), case.multiple).device.type,
        "the input afterwards": given.clone(),
        "the memory in which the input lies": rank_kit.memory(given),
        "the result is the input itself": padded is given,
        "the result lies in the input's memory": _storage(padded) == _storage(given) != 0,
        "the bytes that it took": AtMost(ledger.peak["total"], 2.5),
    }
    memories = [weakref.ref(tensor.untyped_storage()) for tensor in (given, padded)]
    del given, padded, other
    return seen | {"tensors that nobody needs any more and that live": sum(m() is not None for m in memories)}


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
