"""Ψ parameters, N ranks, Adam: how many bytes does a rank hold between two steps? Per parameter, in FP32:

    4 for itself, 4 for its gradient, 8 for Adam's two moments
    stage 1 shards the moments, stage 2 the gradients as well, stage 3 all

In 16 bits (what this package holds, convention="minizero"): working copies of 2 bytes (in stage 3 none between
steps); an FP32 gradient for the optimizer, 4 bytes a parameter that its chunk has, and in stages 0 and 1 the
16-bit gradient as well, 2 bytes; 12 bytes of "optimizer": the FP32 master and two moments. "Its chunk": in
stages 1 to 3 Ψ/N, in stage 0 Ψ. The ZeRO paper counts 2 + 2 + 12, sharded from stages 3, 2, 1 on;
convention="paper" is that, whatever the dtype.
"""

import itertools
from random import Random
from typing import Any, NamedTuple

import torch

from minizero.memory import formulas
from tests.exercises.draws import deal
from tests.exercises.kit import value_or_error, wrong

PLAN = [
    "Refuse a number of parameters that is no whole number of at least 0, a world_size that is none of at least 1, a "
    "stage that is none, a sharding_factor that does not divide N, another dtype than the three, an unknown "
    "convention: `ValueError`.",
    "Over how many ranks is sharded: sharding_factor where given, else world_size.",
    "For each of parameters, gradients, optimizer: bytes per parameter, times Ψ, divided where the stage shards "
    'it. Three cases: convention="paper"; FP32; 16 bits.',
    'Return them as a dict with "total", their sum.',
]
HINTS = [
    "FP32: parameters 4Ψ (stage 3: /N), gradients 4Ψ (stage 2 and up: /N), optimizer 8Ψ (stage 1 and up: /N).",
    "16 bits: gradients are 2Ψ in stages 0 and 1, else 0, plus 4Ψ (stage 1 and up: /N).",
    "A small table helps: one_in[k] is what is left of something that stage k is the first to shard: 1/N or 1.",
]
AFTER = (
    "The package computes one factor for each stage first: `one_in[k]` is what stage k shards. The full 16-bit "
    "gradient counts in stages 0 and 1 only, because stage 2 drops it as soon as it is reduced. The FP32 gradient "
    "beside it exists because PyTorch refuses a 16-bit gradient on an FP32 parameter; the paper has none. In 16 bits "
    'stage 3 holds no working copies between steps, so they count as 0. Read next: Rajbhandari et al., 2019, "ZeRO", '
    "section 3.1."
)
WRONG = [
    wrong("shards-everything", "Data parallelism shards nothing.", ("1 / shards if stage >= k else 1", "1 / shards")),
    wrong("parameters-too-early", "Stages 1 and 2 shard no parameters: each rank computes with all of them.",
          ('{"parameters": 4 * psi * one_in[3]', '{"parameters": 4 * psi * one_in[2]')),
    wrong("one-moment", "Adam has two moments, 8 bytes a parameter.", ('"optimizer": 8 * psi', '"optimizer": 4 * psi')),
    wrong("forgets-the-masters", "In 16 bits the optimizer keeps FP32 masters too: 4 + 8 bytes a parameter, not 8.",
          (" 12 * psi * one_in[1],\n", " 8 * psi * one_in[1],\n")),
    wrong("gradients-in-stage-1", "Stage 1 shards the optimizer's states, and no gradients yet.",
          ('4 * psi * one_in[2], "optimizer": 8', '4 * psi * one_in[1], "optimizer": 8')),
    wrong("ignores-the-factor", "With a sharding_factor a rank shares with so many ranks, whatever the world size.",
          ("world_size, sharding_factor)\n", "world_size, None)\n")),
    wrong("total-is-missing", "Expected parameters, gradients, optimizer and their total.",
          (' | {"total": sum(parts.values())}', "")),
    wrong("keeps-16-bit-gradients", "From stage 2 on no full 16-bit gradient is kept: 4Ψ/N for the FP32 shard is all.",
          ("working = 2 * psi if stage < 2 else 0", "working = 2 * psi")),
]  # fmt: skip


class Case(NamedTuple):
    world_size: float
    stage: float
    convention: str
    dtype: torch.dtype
    sharding_factor: int | None
    parameters: float
    seed: int


def draw(random: Random) -> list[Case]:
    """-5 and 1.5 parameters, -1 ranks, 0 ranks, stages 4, 1.5 and -1, other conventions and dtypes, and factors that
    are 0 or do not divide the number of ranks, are errors."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    ways: list[Any] = list(
        itertools.product((1, 2, 3, 8, 64), range(4), ("minizero", "paper"), dtypes, (None, 1, 2, 8))
    )
    ways += [(0, 1, "minizero", torch.float32, None), (-1, 1, "paper", torch.float32, 2), (4, 4, "paper", dtypes[1], 2)]
    ways += [(4, 1.5, "minizero", dtypes[1], None), (4, -1, "minizero", dtypes[0], None)]
    ways += [(2.5, 1, "minizero", dtypes[0], None), *((4, n, "minizero", torch.float64, None) for n in range(4))]
    ways += [(4, 1, "paper", torch.int32, None), *((4, n, "minizero", dtypes[0], 0) for n in range(4))]
    wrong_factors = [
        (4, 3, name, dtype, factor) for name in ("minizero", "paper") for dtype in dtypes for factor in (3, -2)
    ]
    ways += [(4, 1, convention, dtype, 2) for convention in ("zero", "Paper", "") for dtype in dtypes]
    ways = [(n, stage, *rest, factor) for n, stage, *rest, factor in ways if n < 1 or not factor or n % factor == 0]
    ways += wrong_factors
    plain = [
        Case(4, stage, "minizero", dtype, None, n, 0)
        for n in (1000, 1001)
        for dtype in dtypes[:2]
        for stage in range(4)
    ]
    parameters = [0, 1, -5, 1.5, *(random.randint(1, 10**10) for _ in range(20))]
    return plain + [Case(*row) for row in deal(random, ways, parameters)]


def result(case: Case) -> Any:
    options = dict(dtype=case.dtype, sharding_factor=case.sharding_factor, convention=case.convention)
    return value_or_error(_as_floats, case.parameters, case.world_size, case.stage, **options)


def _as_floats(*args: Any, **options: Any) -> dict[str, dict[str, float]]:
    """Twice, and between them the caller empties the first dict. Bytes may be whole numbers, or not."""
    seen = {}
    for name in ("the first time", "after the first dict was emptied"):
        predicted = formulas.predict(*args, **options)
        seen[name] = {part: float(value) for part, value in predicted.items()}
        predicted.clear()
    return seen


def tolerance(_: Case) -> float:
    return 1e-9
