"""The loss was multiplied by the scale s, so that small gradients survive in 16 bits; by the chain rule all
gradients are s times as large. Before anything looks at their size (clipping, the optimizer) they are divided
by s: in FP32, once, and while at it one looks for inf and NaN.

    progress = self._progress.setdefault(optimizer, Progress())
    self._scale        s, a Python number
    progress.stage     "ready", then "unscaled", then "stepped"
    progress.found     0-dim tensor: 1 where a gradient was inf or NaN

self._check_has_scaled("unscale_") complains where nothing was scaled. found_inf(tensors) looks. self.combine,
where it is not None, makes this rank's finding that of all ranks, so that all skip a step or none does.
"""

import itertools
from random import Random
from typing import Any, NamedTuple

import torch

from minizero.memory import Ledger
from precision.master import MasterWeights
from precision.scaling import StaticLossScaler
from tests.exercises.draws import deal
from tests.exercises.kit import AtMost, value_or_error, wrong

PLAN = [
    "Has something been scaled? Was unscale_ called already, or step? `RuntimeError` for both.",
    "Where the optimizer has `copy_gradients` (MasterWeights), call it: its FP16 gradients become the masters' "
    "FP32 ones.",
    "Collect the gradients, of all groups, that are not None. One in float16 is a `ValueError`: it would "
    "underflow again. (Of a sparse gradient take ._values().)",
    "If there are any: found_inf of them, combined over ranks, is progress.found.",
    "Multiply each by 1/s in place, with 1/s in FP32: _float32(1 / s). Note the stage.",
]
HINTS = [
    "step() looks at progress.stage to see whether it must unscale first: what must stand there after this call?",
    'An optimizer has groups: optimizer.param_groups is a list of dicts, each with its parameters under "params".',
    "gradient.mul_(_float32(1 / self._scale)) divides in place.",
]
AFTER = (
    "FP16 gradients, a second `unscale_`, and one after `step` are errors in the package, because nothing later "
    "would show these mistakes. `found_inf` looks at the largest magnitude of each tensor. It is finite exactly if "
    "all values are, and a mask of the values would need memory. The finding stays a tensor, so no GPU is waited "
    "for until `step` asks. 1/s is rounded to FP32 once, as PyTorch's `GradScaler` does it. Read next: Micikevicius "
    'et al., 2018, "Mixed Precision Training", section 3.2.'
)
WRONG = [
    wrong("multiplies", "The gradients grew by the scale once more: divide by it.",
          ("gradient.mul_(inverse)", "gradient.mul_(self._scale)")),
    wrong("unscales-twice", "The gradients were divided twice: note that they are unscaled already.",
          ('progress.stage = "unscaled"', "pass")),
    wrong("never-looks", "A gradient was not finite, and nobody noticed: the weights would be spoilt. Look for inf.",
          ("found = found_inf(gradients)", "found = torch.zeros(())")),
    wrong("looks-at-the-first-only", "What is not finite stood in another tensor than the first: look at all "
          "gradients.", ("found_inf(gradients)", "found_inf(gradients[:1])")),
    wrong("forgets-other-ranks", "Another rank found inf, and this one does not know: ask self.combine.",
          ("found if self.combine is None else self.combine(found)", "found")),
    wrong("forgets-the-masters", "The masters have no gradients: MasterWeights must copy them up first.",
          ("optimizer.copy_gradients()", "pass")),
    wrong("copies-before-it-looks", "A second unscale_ was refused, but the scaled gradients were copied over the "
          "unscaled ones before. Refuse first.",
          ('    if progress.stage == "unscaled"', '    if hasattr(optimizer, "copy_gradients"):\n'
           '        optimizer.copy_gradients()\n    if progress.stage == "unscaled"')),
    wrong("takes-fp16", "FP16 gradients were divided in FP16, where the small ones become 0 again: refuse them.",
          ("any(gradient.dtype == torch.float16 for gradient in gradients)", "False")),
]  # fmt: skip


class Case(NamedTuple):
    spoilt_by: float | str
    masters: bool
    other_rank: str
    scale: float
    groups: int
    sparse: bool
    half: int | None
    no_gradients: bool
    seed: int


def draw(random: Random) -> list[Case]:
    """spoilt_by: what one value of one gradient is; 1.0 does no harm, and the largest numbers do none. other_rank: what
    `combine` brings, if any.

    half: which gradient is in FP16; without masters that is an error. no_gradients: the first optimizer has none.
    """
    halves = [None, None, None, None, 0, 1, 2]
    ways = itertools.product((1.0, "the largest", torch.inf, -torch.inf, torch.nan), (False, True), ("none", "0", "1"))
    rows = deal(random, [*ways] * 2, [2.0**10, 3.0, 2.0**20], [1, 2, 3], [False, True], halves, [False] * 5 + [True])
    plain = Case(1.0, False, "none", 1024.0, 2, False, None, False, 46)
    first = [plain, plain._replace(spoilt_by=torch.inf), plain._replace(masters=True), plain._replace(scale=3.0)]
    surely = [plain._replace(spoilt_by="the largest", scale=3.0, seed=random.randrange(10**6)) for _ in range(3)]
    return [*first, *map(Case._make, rows), *surely]


def result(case: Case) -> dict[str, Any]:
    """Three gradients, of which one may be sparse, one may be None, and one may be spoilt; then another optimizer's.

    A right answer may hold something of the size of one gradient, such as a mask, beside what the package holds.
    """
    random, calls = Random(case.seed), []
    dtypes = (
        [torch.float16] * 3 if case.masters else random.choices((torch.float32, torch.bfloat16, torch.float64), k=3)
    )
    if case.half is not None:
        dtypes[case.half] = torch.float16
    weights = [torch.nn.Parameter(torch.ones(40, 2, dtype=dtype)) for dtype in dtypes]
    spoilt, missing = random.randrange(3), random.randrange(6)
    for number, weight in enumerate(weights):
        gradient = torch.tensor([random.randint(-9, 9) for _ in range(80)]).view(40, 2).to(weight.dtype)
        if number == spoilt:
            if isinstance(case.spoilt_by, str):  # the largest: their sum would be infinite
                gradient.fill_(torch.finfo(weight.dtype).max)
            else:
                gradient[random.randrange(1, 3), 0] = case.spoilt_by
        if case.sparse and number == 1 and not case.masters:
            places = torch.tensor([[1, random.randint(1, 2)]])  # one may come twice: these numbers are added up
            gradient = torch.sparse_coo_tensor(places, gradient[1:3], (40, 2), check_invariants=False)
        weight.grad = None if number == missing or case.no_gradients else gradient
    groups = [{"params": weights[start :: case.groups]} for start in range(case.groups)]
    optimizer: Any = (
        MasterWeights(weights, torch.optim.SGD, lr=1.0) if case.masters else torch.optim.SGD(groups, lr=1.0)
    )

    def combine(found: torch.Tensor) -> torch.Tensor:
        calls.append(found)
        return torch.maximum(found, torch.tensor(float(case.other_rank)))

    scaler = StaticLossScaler(case.scale, None if case.other_rank == "none" else combine)
    scaler.scale(torch.ones(()))
    before = [None if p.grad is None else p.grad.data_ptr() if not p.grad.is_sparse else 0 for p in weights]
    with Ledger() as ledger:
        error, again = value_or_error(scaler.unscale_, optimizer), "no error"
    try:
        scaler.unscale_(optimizer)
    except (RuntimeError, ValueError) as refused:
        again = type(refused).__name__
    after = [None if p.grad is None else p.grad.data_ptr() if not p.grad.is_sparse else 0 for p in weights]
    owners = optimizer.masters if case.masters else weights
    progress = scaler._progress[optimizer]
    other = torch.nn.Parameter(torch.ones(2))
    other.grad = torch.tensor([0.0, -6.0])
    others = torch.optim.SGD([other], lr=1.0)
    scaler.unscale_(others)
    return {
        "bytes at the peak": AtMost(ledger.peak["total"] + max(w.nbytes for w in weights), 1.3),
        "another optimizer's gradient": other.grad,
        "another optimizer's finding": float(scaler._progress[others].found),  # type: ignore[arg-type]
        "an error": error,
        "an error if it is called again before update()": again,
        "the gradients": [None if p.grad is None else p.grad.to_dense() for p in owners],
        "the gradients are the same tensors": before == after,
        "found": None if progress.found is None else bool(progress.found),
        "calls of combine": len(calls),
        "stage": progress.stage,
    }
