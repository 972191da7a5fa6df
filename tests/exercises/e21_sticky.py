"""Before two numbers are added, the smaller one moves right until both have one exponent. What falls off would
be needed to round right, but not all of it: one bit tells whether it was anything but zeros, the sticky bit.

    shift_right(1011 0100, 3) = 0001 0110 | 1     a 1 fell off, so the last bit becomes 1
    shift_right(1011 0000, 3) = 0001 0110         nothing fell off

Tensors of int32 or int64, none negative. `places` is a tensor, or one whole number from 0 to 31. In a tensor, places
below 0 count as 0. A processor cannot shift an int32 by 32 or more: the result of that is anything.
"""

import itertools
from random import Random
from typing import Any, NamedTuple

import torch

from precision import arithmetic
from tests.exercises.draws import deal
from tests.exercises.kit import wrong

PLAN = [
    "If `places` is a tensor, clamp it: from 0 to the number of bits of the dtype, less 1.",
    "Shift. Shift back: is that what it was? If not, a 1 fell off.",
    "Return what was kept, with its last bit set where a 1 fell off.",
]
HINTS = [
    "torch.iinfo(significand.dtype).bits is 32 or 64.",
    "(kept << places) != significand is True where something was lost, and | with a boolean tensor works.",
]
AFTER = (
    "The package needs no mask of the bits that fall off: it shifts back and compares. The comparison is a tensor of "
    "0 and 1, so `|` sets the last bit. Negative places are clamped to 0, which saves the callers a case: `round` "
    "passes 1 - exponent, and that is positive only below the normal numbers. The upper clamp is there because a "
    "processor cannot shift by as many bits as it has. Read next: `round` in precision/arithmetic.py."
)
LAST = "kept | ((kept << places) != significand)"
WRONG = [
    wrong("forgets-sticky", "A 1 fell off at the right and left no trace: the last bit must become 1.", (LAST, "kept")),
    wrong("always-sticky", "The last bit is 1 even where only zeros fell off.", (LAST, "kept | 1")),
    wrong("looks-at-one-bit", "It looks at the highest of the lost bits only: any of them counts.",
          (LAST, "kept | ((significand >> (places - 1)) & 1 if not isinstance(places, Tensor) else (significand >> "
           "(places - 1).clamp(min=0)) & 1)")),
    wrong("adds-the-sticky", "The sticky bit was added, and carried where the last bit was 1: use |.",
          (LAST, "kept + ((kept << places) != significand)")),
    wrong("forgets-negative", "Shifting by -2 places must change nothing: clamp `places` at 0.",
          ("places.clamp(0,", "places.clamp(-31,")),
    wrong("rounds", "It rounds: that comes later, and once. Here only note that something was lost.",
          (LAST, "(significand + (1 << places >> 1)) >> places")),
]  # fmt: skip


class Case(NamedTuple):
    dtype: torch.dtype
    places: int | str
    shape: tuple[int, ...]
    seed: int


def draw(random: Random) -> list[Case]:
    """places: a whole number, or in words for a tensor of them, from -70 to 100."""
    ways: list[Any] = [(dtype, n) for dtype in (torch.int32, torch.int64) for n in range(32)]
    ways += itertools.product((torch.int8, torch.int16, torch.int32, torch.int64), ["each its own"] * 8)
    ways += [(torch.int64, "each its own, in 32 bits")] * 8
    return [Case(torch.int32, 3, (4,), 1)] + [
        Case(*row) for row in deal(random, ways, [(40,), (6, 7), (2, 3, 4), (0,), ()])
    ]


def result(case: Case) -> dict[str, Any]:
    """One bit falls off in half of the significands: the highest or the lowest of those that may."""
    random, most = Random(case.seed), torch.iinfo(case.dtype).bits - 1
    edges = (-70, -1, 0, most, most + 1, 100)
    places = [random.choice((random.choice(edges), random.randint(0, most))) for _ in range(42)]
    values = []
    for own in places:
        last = min(max(own if isinstance(case.places, str) else case.places, 0), most)
        kept = random.randrange(2**most) >> last << last
        values.append(kept | random.choice((0, 0, random.randrange(2**last), 2**last >> 1, min(1, 2**last - 1))))
    shape, count = case.shape[::-1], torch.Size(case.shape).numel()
    turned = tuple(range(len(shape)))[::-1]  # in memory the last dimension is the first one
    significand = torch.tensor(values[:count], dtype=case.dtype).view(shape).permute(turned)
    narrow = torch.int32 if case.places == "each its own, in 32 bits" else case.dtype
    each = torch.tensor(places[:count], dtype=narrow).view(shape).permute(turned)
    shifted = arithmetic.shift_right(significand, each if isinstance(case.places, str) else case.places)
    row = arithmetic.shift_right(significand, each[..., :1] if shape else each)
    operands = significand, each
    return {"the shifted significands": shifted, "each row by one number": row, "the operands afterwards": operands}
