"""The logits, tokens × vocabulary, are the largest tensor of a language model's step. Backward makes their gradient,
which is as large. But the loss is a sum over tokens. What one token adds to it, and to the gradients, follows from its
own row of logits:

    z = W h + b                          h: the token's row of `hidden`
    L = log Σ exp(z) - z_y               y: its target
    ∂L/∂z = p - e_y                      p = softmax(z); e_y: 1 at y, 0 elsewhere
    ∂L/∂h = Wᵀ ∂L/∂z       ∂L/∂W = Σ ∂L/∂z hᵀ       ∂L/∂b = Σ ∂L/∂z       Σ over tokens

Take `chunk` tokens at a time, and make the gradients while their logits are there. At no moment are there two matrices
of chunk × vocabulary numbers in FP32. Autograd is switched off: it would keep the logits.

hidden: (tokens, width). weight: (vocabulary, width). bias: (vocabulary,), or None. targets: (tokens,); one that is
`ignore_index` is no target, and its token adds nothing. needed: for hidden, weight and bias, whether its gradient is.
"""

import itertools
from random import Random
from typing import Any, NamedTuple

import torch

from minizero import chunked_loss as module
from tests.exercises.draws import deal
from tests.exercises.kit import fail, observed, wrong

PLAN = [
    "Zeros: the loss; of the needed gradients hidden's in its dtype, the weight's and the bias's in FP32 (in FP64 if "
    "hidden has that): they are sums over all tokens.",
    "For each chunk (the last may be shorter): its logits, in FP32 or FP64. The logits of the chunk before are gone.",
    "Add the losses of its tokens that have a target. The largest logit may be 1000, and exp(1000) is infinite.",
    "If any gradient is needed: turn the logits into ∂L/∂z, in place. It is 0 in the row of a token without target.",
    "Write the rows of hidden's gradient. Add to the weight's and the bias's. Products have the dtype of F.linear's.",
    "Return the loss, and a list of the three gradients, None for those that are not needed.",
]
HINTS = [
    "Subtract from each row of logits its largest one: neither L nor p changes, and no exp is above 1.",
    "A target of -100 cannot be an index. Put 0 in its place, and remember where: masked_fill(~counts, 0).",
    "z.exp_() and z.mul_(…) write into z: one matrix. z.scatter_add_(1, y, …) reaches one place in each row.",
    "A name keeps its tensor until it gets another: z = F.linear(…) makes the new logits first, and lets go of the old "
    "ones then. z = None before it lets go first.",
]
AFTER = (
    "`LossInChunks` calls your function in its forward, and keeps the gradients. Its backward multiplies them by the "
    "gradient of the loss. The mean's 1/n comes only there, in FP32: in FP16 small gradients would become 0. Liger's "
    "kernel does what you did. Cut Cross-Entropy needs no logits even of a chunk: its softmax is online, as in "
    "FlashAttention. Read next: `forward` in minizero/chunked_loss.py."
)
BY_Z = "by_z = z.mul_(counts / total).scatter_add_(1, y, -counts.to(wide))"
FREED = "        z = by_z = None  # the last chunk's logits go before the next come\n"
CUT = "range(0, len(hidden), chunk)"
WRONG = [
    wrong("all-at-once", "The logits of all tokens are there at once: only one chunk's may be there.",
          (CUT, "range(0, len(hidden), len(hidden))"), ("start + chunk)", "start + len(hidden))")),
    wrong("two-chunks", "There are two matrices as large as a chunk's logits. Does a name still hold those of the "
          "chunk before, when the next come? Does an operation write into a new matrix, and not in place?",
          (FREED, "")),
    wrong("overflows", "exp of large logits is infinite. What may be subtracted from all logits of a row, so that "
          "neither L nor p changes?", ("        z -= z.amax(1, keepdim=True)", "        z -= 0")),
    wrong("loses-the-last-chunk", "The last tokens are missing. The last chunk may be shorter.",
          (CUT, "range(0, len(hidden) - chunk + 1, chunk)")),
    wrong("forgets-the-target", "∂L/∂z is p - e_y: the 1 at the target is not subtracted.",
          (BY_Z, "by_z = z.mul_(counts / total)")),
    wrong("wrong-sign", "The gradients have the wrong sign: ∂L/∂z is p - e_y, and not e_y - p.",
          (BY_Z, "by_z = z.mul_(counts / -total).scatter_add_(1, y, counts.to(wide))")),
    wrong("ignored-in-the-loss", "Tokens without a target are in the loss, as if word 0 were theirs.",
          ("torch.where(counts, total.log() - z_y, 0)", "(total.log() - z_y)")),
    wrong("mean", "It was divided by the number of targets: sums are asked for.",
          ("    return loss, [by_hidden", "    return loss / (targets != ignore_index).sum(), [by_hidden")),
]  # fmt: skip


def given(tokens: int, width: int, words: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[torch.Tensor]:
    """hidden, weight, bias, targets. Every fourth token has no target, and the last token has one."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((tokens, width), (words, width), (words,))
    numbers = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    targets = torch.randint(1, words, (tokens,), generator=generator)
    targets[::4] = -100
    targets[-1:] = 1
    return [*numbers, targets]


def call(needed: tuple[bool, bool, bool], *arguments: Any) -> list[Any]:
    """The loss and the three gradients, by the answer."""
    with torch.no_grad():
        answer = module.loss_and_gradients(needed, *arguments)
    if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[1], list) or len(answer[1]) != 3:
        fail("no-result", "Expected two things, the loss and a list of three gradients. Is there a return?")
    return [answer[0], *answer[1]]


class Case(NamedTuple):
    tokens: int
    chunk: int
    dtype: torch.dtype
    needed: tuple[bool, bool, bool]
    width: int
    words: int
    bias: bool
    ignored: float
    mark: int
    largest: float
    of_nan: bool
    seed: int


def draw(random: Random) -> list[Case]:
    """ignored: the share of tokens whose target is `mark`. of_nan: in a row of hidden that has a target."""
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    needed = list(itertools.product((False, True), repeat=3))
    ways = [*itertools.product((1, 12, 31), (1, 3, 40), dtypes), *((0, 3, dtype) for dtype in dtypes)]
    columns = [0.0, 0.3, 1.0], [-100, -1, 1], [1.0, 1.0, 1e3], [False, False, False, True]
    rows = deal(random, ways, needed, [1, 3, 8], [2, 9, 40], [False, True], *columns)
    plain = Case(11, 4, dtypes[0], (True, True, True), 3, 5, True, 0.3, -100, 1.0, False, 1)
    large = plain._replace(tokens=64, chunk=8, dtype=dtypes[1], width=2, words=2048, bias=False)
    many = plain._replace(tokens=400, chunk=1, dtype=dtypes[2], width=1, words=2, ignored=0.0)
    wide = plain._replace(tokens=64, chunk=16, dtype=dtypes[2], width=8, words=500)
    exact = wide._replace(words=3, largest=0.0)  # the logits are the bias
    return [plain, plain._replace(largest=1e3), wide, large, many, exact, *map(Case._make, rows)]


def result(case: Case) -> Any:
    hidden, weight, bias, targets = given(case.tokens, case.width, case.words, case.dtype, case.seed)
    hidden *= case.largest if case.dtype.itemsize > 2 or not case.largest else 1.0
    ignored = torch.rand(case.tokens, generator=torch.Generator().manual_seed(case.seed)) < case.ignored
    targets = targets.masked_fill(targets < 0, 0).masked_fill(ignored, case.mark)
    if case.of_nan and case.tokens and targets[0] != case.mark:
        hidden[0, 0] = torch.nan
    needed = (*case.needed[:2], case.needed[2] and case.bias)
    # On tensors as small as these another way may need more.
    small = (min(case.tokens, case.chunk) * (case.words + 4 * case.width) + case.words * case.width) * 8 + 2000
    arguments = needed, hidden, weight, bias if case.bias else None, targets, case.chunk, case.mark
    seen = observed(call, *arguments, most=1.3, slack=0 if case.words > 1000 else small, meta=case.seed > 1)
    return seen | ({"the loss, as a number": float(seen["the result"][0])} if case.words == 500 else {})


def tolerance(case: Case) -> dict[torch.dtype, float]:
    """A right answer may add the bias to logits that BF16 has rounded, and 1 - p is off by as much as they are."""
    if case.dtype.itemsize == 2 and case.largest:
        return {torch.float32: 0.2, case.dtype: 0.2, torch.float64: 1e-4}
    return {torch.float64: 1e-9, torch.float32: 1e-4}
