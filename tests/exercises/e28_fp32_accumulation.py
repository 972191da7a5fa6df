"""A dot product of FP16 values: the products are added up one after the other, and each partial sum is rounded
to what the accumulator can hold. In FP16 the sum of ones stops at 2048; in FP32 it goes on, and only the result
is rounded to FP16.

    total = round(total + round(a_i · b_i))         round: to the accumulator's format

_values("dot", x) gives x as float64 with FP16 values (the name is for its errors);
rounding_to(accumulator) gives the function `round`;
sequential(terms, zero, round) adds terms (n, …) in order; _as_fp16(result, a) rounds the result and gives it
a's kind.
"""

import itertools
import math
from random import Random
from typing import Any, NamedTuple

import torch

from precision import accumulate
from precision.formats import FORMATS
from tests.exercises.draws import deal
from tests.exercises.kit import value_or_error, wrong

PLAN = [
    "Both operands as values; `ValueError` unless they are (…, n) and (…, n), with at least one dimension. What stands "
    "for … may broadcast, and n may not.",
    "Products, rounded to the accumulator; the dimension that is summed comes first: movedim(-1, 0).",
    "Add them in order from zeros of the shape that is left, rounding each partial sum.",
    "The result in FP16.",
]
HINTS = [
    "Three roundings: each product, each partial sum (both to the accumulator's format), and the result, to FP16.",
    "round_ = rounding_to(accumulator), once; then round_(x * y) and sequential(…, …, round_).",
    "products.new_zeros(products.shape[1:]) is where the sum begins.",
]
AFTER = (
    "The package computes each operation in float64 and rounds it to the accumulator at once. For formats of up to 25 "
    "bits that equals one rounding: float64's 53 bits are more than twice as many. So it needs no arithmetic on bits "
    "here. The dimension that is summed comes first, so one addition serves all dot products of a tensor. In FP32 the "
    "products are exact, since 11 bits times 11 bits make 22. Read next: `kahan` in precision/accumulate.py."
)
WRONG = [
    wrong("always-fp32", "The sum was FP32's, whatever the accumulator: use `accumulator`.",
          ("rounding_to(accumulator)", "rounding_to(FP32)")),
    wrong("always-fp16", "The sum was FP16's, whatever the accumulator: use `accumulator`.",
          ("rounding_to(accumulator)", "rounding_to(FloatFormat(5, 10))")),
    wrong("fp32-is-exact", "FP32 is not exact: round its partial sums, too.",
          ("rounding_to(accumulator)", "rounding_to(accumulator) if accumulator.width < 32 else lambda terms: terms")),
    wrong("products-in-fp16", "A product was rounded to FP16 before it was added: round it to the accumulator.",
          ("round_(x * y)", "round_(x.half() * y.half()).double()")),
    wrong("products-not-rounded", "Round the products before they are added: one may be beyond the format.",
          ("round_(x * y).movedim", "(x * y).movedim")),
    wrong("result-not-rounded", "The result is no number of the operands' format: round it at the end.",
          ("_as_fp16(sequential(products, products.new_zeros(products.shape[1:]), round_), a)",
           "sequential(products, products.new_zeros(products.shape[1:]), round_).float()")),
    wrong("no-error", "Shapes whose last dimensions differ have no dot product: that must be a ValueError.",
          ("x.shape[-1] == y.shape[-1]", "True")),
    wrong("rounds-only-at-the-end", "Round each partial sum.",
          ("sequential(products, products.new_zeros(products.shape[1:]), round_)", "round_(products.sum(0))")),
]  # fmt: skip


class Case(NamedTuple):
    accumulator: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[torch.dtype, torch.dtype]
    exponent: int
    numpy: tuple[bool, bool]
    pair: tuple[float, ...]
    seed: int
    numbers: tuple[tuple[float, ...], ...] = ()


def draw(random: Random) -> list[Case]:
    """The values have about 2^exponent. Shapes may broadcast; those that do not fit are an error. dtypes, numpy, pair:
    of the two operands; the pair is two numbers that are multiplied with each other."""
    n = random.randint(20, 40)
    shapes = [((n,), (n,)), ((3, n), (3, n)), ((2, 1, n), (4, n)), ((2, 3, 1), (2, 3, 1)), ((n,), (n - 1,)), ((), (n,))]
    shapes += [((2, n), (3, n)), ((1,), (n,)), ((3, n), (3, 1)), ((n,), ()), ((), ()), ((0,), (0,)), ((2, 0), (2, 0))]
    ways = [(name, two) for name in FORMATS for two in shapes]
    dtypes = list(itertools.product((torch.float16, torch.bfloat16, torch.float32, torch.float64), repeat=2))
    numpy = [(False, False), (False, False), (True, True), (True, False), (False, True)]
    pairs = [(), (), (0.0, math.inf), (-math.inf, -0.0), (math.nan, 1.0), (0.0, math.nan), (math.inf, -1.0)]
    several = [("FP16", (300.0, 300.0), (300.0, -300.0)), ("FP16", (1.0,) * 2100, (1.0,) * 2100)]
    several += [("FP32", (4096.0, 1.0, 4096.0), (4096.0, 1.0, -4096.0)), ("FP32", (2.0**-14,) * 2, (2.0**-11,) * 2)]
    several += [("FP32", (1.0,) * 2100, (1.0,) * 2100), ("FP32", (0.3333, 0.1), (1.0, 1.0))]
    of_fp32 = torch.float32, torch.float32
    plain = [Case(name, ((len(a),), (len(b),)), of_fp32, 0, numpy[0], (), 0, (a, b)) for name, a, b in several]
    return plain + [Case(*row) for row in deal(random, ways, dtypes, [0, 0, -4, -12, 2, 8], numpy, pairs)]


def result(case: Case) -> Any:
    generator = torch.Generator().manual_seed(case.seed)
    scale = 2.0**case.exponent
    a, b = (torch.randn(shape, generator=generator, dtype=torch.float64) * scale for shape in case.shapes)
    if case.numbers:
        a, b = (torch.tensor(each, dtype=torch.float64) for each in case.numbers)
    for x, value in zip((a, b), case.pair):
        if x.numel() > 1:
            x[..., case.seed % x.shape[-1]] = value
    if case.shapes[0] == (2, 3, 1):  # 0 + -0 is 0
        a[0, 0], b[0, 0] = -0.0, 1.0
    given: list[Any] = [x.to(dtype).requires_grad_(case.seed % 2 == 1) for x, dtype in zip((a, b), case.dtypes)]
    given = [x.detach().float().numpy() if numpy else x for x, numpy in zip(given, case.numpy)]
    got = value_or_error(accumulate.dot, *given, FORMATS[case.accumulator])
    return {
        "the value": got if isinstance(got, str) else torch.as_tensor(got),
        "the kind": type(got).__name__,
        "the operands afterwards": [torch.as_tensor(x) for x in given],
    }
