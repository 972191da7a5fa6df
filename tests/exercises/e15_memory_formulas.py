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

from minizero import DDP, Zero1, Zero2, Zero3
from minizero.memory import formulas
from tests.exercises.draws import deal
from tests.exercises.kit import fail, ranks, size, value_or_error, wrong
from tests.exercises.training import PSI, one_step

PLAN = [
    "Refuse a world_size that is no whole number of at least 1, a stage that is none, an unknown convention: "
    "`ValueError`.",
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
    wrong("shards-nothing", ("1 / shards if stage >= k else 1", "1")),
    wrong("shards-everything", ("1 / shards if stage >= k else 1", "1 / shards")),
    wrong("parameters-too-early", ('{"parameters": 4 * psi * one_in[3]', '{"parameters": 4 * psi * one_in[2]')),
    wrong("one-moment", ('"optimizer": 8 * psi', '"optimizer": 4 * psi')),
    wrong("forgets-the-masters", (' 12 * psi * one_in[1],\n', " 8 * psi * one_in[1],\n")),
    wrong("gradients-in-stage-1", ('4 * psi * one_in[2], "optimizer": 8', '4 * psi * one_in[1], "optimizer": 8')),
    wrong("ignores-the-factor", ("world_size, sharding_factor)\n", "world_size, None)\n")),
    wrong("total-is-missing", (' | {"total": sum(parts.values())}', "")),
    wrong("ignores-the-factor-in-16-bits", ("    else:\n        working", "    else:\n        one_in = [1 / world_size "
          "if stage >= k else 1 for k in range(4)]\n        working"), says="ignores-the-factor"),
    wrong("paper-in-fp32-only", ('if convention == "paper":', 'if convention == "paper" and dtype == torch.float32:')),
    wrong("whole-numbers", ("4 * psi * one_in[3]", "4 * (psi // shards if stage == 3 else psi)")),
    wrong("gives-one-dict-twice", ("    return parts |", "    given = n_parameters, world_size, stage, dtype, "
          "sharding_factor, convention\n    return predict.__dict__.setdefault(given, parts |"),
          ("parts.values())}", "parts.values())})"), says="random"),
    wrong("half-a-rank", ("stage, world_size, sharding", "stage, int(world_size), sharding")),
    wrong("keeps-16-bit-gradients", ("working = 2 * psi if stage < 2 else 0", "working = 2 * psi")),
]  # fmt: skip
STAGES = (DDP, Zero1, Zero2, Zero3)
SAY = {
    (1, "gradients"): ("gradients-in-stage-1", "stage 1 keeps all gradients, and shards the optimizer only"),
    (2, "parameters"): ("parameters-too-early", "stage 2 still keeps all parameters"),
}


def check() -> None:
    for stage in range(4):
        measured = ranks(4, one_step, STAGES[stage], torch.optim.AdamW, **{})[0].after
        got = formulas.predict(PSI, 4, stage)
        if not {"parameters", "gradients", "optimizer", "total"} <= set(got):
            fail(
                "total-is-missing", f"Expected parameters, gradients, optimizer and their total; got {', '.join(got)}."
            )
        for part in ("optimizer", "gradients", "parameters"):
            ratio = got[part] / measured[part]
            if abs(ratio - 1) < 0.02:
                continue
            words = f"Stage {stage} on 4 ranks: predicted {size(got[part])} of {part}, the ledger measures "
            words += f"{size(measured[part])}"
            if (stage, part) in SAY and ratio < 0.3:
                name, why = SAY[stage, part]
                fail(name, f"{words}: {why}.")
            if stage == 0 and ratio < 0.3:
                fail("shards-everything", f"{words}: data parallelism shards nothing.")
            if ratio > 3:
                fail("shards-nothing", f"{words}: this stage shards it, divide by the number of ranks.")
            if part == "optimizer" and abs(ratio - 0.5) < 0.02:
                fail("one-moment", f"{words}: Adam has two moments, 8 bytes a parameter.")
            fail("values", f"{words}.")
        if abs(got["total"] / sum(got[p] for p in ("optimizer", "gradients", "parameters")) - 1) > 1e-9:
            fail("values", "total is not the sum of the three.")
    half = formulas.predict(1000, 4, 2, dtype=torch.float16)
    if half["optimizer"] == 2000:
        fail("forgets-the-masters", "In 16 bits the optimizer keeps FP32 masters too: 4 + 8 bytes a parameter, not 8.")
    if half["gradients"] == 3000:
        fail(
            "keeps-16-bit-gradients", "From stage 2 on no full 16-bit gradient is kept: 4Ψ/N for the FP32 shard is all."
        )
    for stage, want in enumerate(((2000, 6000, 12000), (2000, 3000, 3000), (2000, 1000, 3000), (0, 1000, 3000))):
        got = formulas.predict(1000, 4, stage, dtype=torch.bfloat16)
        if (got["parameters"], got["gradients"], got["optimizer"]) != want:
            fail("values", f"16 bits, 1000 parameters, 4 ranks, stage {stage}: expected {want}, got {got}.")
    if formulas.predict(1000, 8, 3, sharding_factor=2)["total"] != 8000:
        fail(
            "ignores-the-factor",
            "With sharding_factor=2 a rank holds half of 16 bytes a parameter, whatever the world size.",
        )
    for options in (dict(dtype=torch.float16), dict(convention="paper")):
        whole = formulas.predict(1000, 2, 3, **options)["total"]
        share = formulas.predict(1000, 8, 3, sharding_factor=2, **options)["total"]
        if share != whole:
            fail(
                "ignores-the-factor",
                f"With {options} and sharding_factor=2 a rank of 8 holds {share:g} bytes for 1000 parameters, where 2 "
                f"ranks hold {whole:g} each.",
            )
    if formulas.predict(1001, 4, 3)["parameters"] != 1001:
        fail("whole-numbers", "1001 parameters on 4 ranks are 1001 bytes each: divide as the formula does, unrounded.")
    wide, narrow = (formulas.predict(1000, 4, 1, convention="paper", dtype=d) for d in (torch.float32, torch.float16))
    if wide != narrow:
        fail("paper-in-fp32-only", f'convention="paper" counts 2 + 2 + 12 in any dtype; in float16 it gave {narrow}.')
    if formulas.predict(1000, 1, 3)["total"] != 16000:
        fail("values", "Alone, a rank holds 16 bytes a parameter in every stage.")
    paper = [formulas.predict(7_500_000_000, 64, stage, convention="paper")["total"] / 1e9 for stage in range(4)]
    if [round(x, 1) for x in paper] != [120.0, 31.4, 16.6, 1.9]:
        fail("values", f"The paper's example, 7.5 billion on 64 ranks, is 120, 31.4, 16.6, 1.9 GB; got {paper}.")
    no_integer: Any = 2.5
    try:
        formulas.predict(1000, no_integer, 1)
    except ValueError:
        pass
    else:
        fail("half-a-rank", "A world_size of 2.5 must be a ValueError: it is a whole number of ranks.")
    for bad in (dict(world_size=0, stage=1), dict(world_size=4, stage=4), dict(world_size=4, stage=1, convention="x")):
        try:
            formulas.predict(1000, **bad)
        except ValueError:
            continue
        fail("no-error", f"{bad} must be a ValueError.")


class Case(NamedTuple):
    world_size: int
    stage: float
    convention: str
    dtype: torch.dtype
    sharding_factor: int | None
    parameters: int
    seed: int


def draw(random: Random) -> list[Case]:
    """Whole numbers of ranks, which a factor divides; -1 ranks, 0 ranks, stages 4, 1.5 and -1, other
    conventions are errors."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    ways: list[Any] = list(
        itertools.product((1, 2, 3, 8, 64), range(4), ("minizero", "paper"), dtypes, (None, 1, 2, 8))
    )
    ways += [(0, 1, "minizero", torch.float32, None), (-1, 1, "paper", torch.float32, 2), (4, 4, "paper", dtypes[1], 2)]
    ways += [(4, 1.5, "minizero", dtypes[1], None), (4, -1, "minizero", dtypes[0], None)]
    ways += [(4, 1, convention, dtype, 2) for convention in ("zero", "Paper", "") for dtype in dtypes]
    ways = [(n, stage, *rest, factor) for n, stage, *rest, factor in ways if n < 1 or not factor or n % factor == 0]
    return [Case(*row) for row in deal(random, ways, [0, 1, *(random.randint(1, 10**10) for _ in range(20))])]


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
