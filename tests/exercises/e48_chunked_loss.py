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
from torch.nn import functional as F

from minizero import chunked_loss as module
from minizero.memory import Ledger
from tests.exercises.draws import deal
from tests.exercises.kit import AtMost, fail, recognise, size, wrong

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
Z_Y = "        z_y = z.gather(1, y)\n"
BY_Z = "by_z = z.mul_(counts / total).scatter_add_(1, y, -counts.to(wide))"
ADD_W = "by_weight.addmm_(by_z.T, h)"
FREED = "        z = by_z = None  # the last chunk's logits go before the next come\n"
CUT = "range(0, len(hidden), chunk)"
WRONG = [
    wrong("all-at-once", (CUT, "range(0, len(hidden), len(hidden))"), ("start + chunk)", "start + len(hidden))")),
    wrong("keeps-the-logits", (FREED, "        kept = [*kept, z] if start else []\n" + FREED), says="all-at-once"),
    wrong("two-chunks", (FREED, "")),
    wrong("not-in-place", ("total = z.exp_()", "before, z = z, z.exp()  # noqa: F841\n        total = z"),
          says="two-chunks"),
    wrong("overflows", ("        z -= z.amax(1, keepdim=True)", "        z -= 0")),
    wrong("largest-in-one-term", (Z_Y, ""), ("        z -= z.amax(1", Z_Y + "        z -= z.amax(1")),
    wrong("gathers-after-exp", (Z_Y, ""), ("        loss +=", Z_Y + "        loss +=")),
    wrong("loses-the-last-chunk", (CUT, "range(0, len(hidden) - chunk + 1, chunk)")),
    wrong("last-chunk-only", (ADD_W, "by_weight.copy_(by_z.T @ h)")),
    wrong("forgets-the-target", (BY_Z, "by_z = z.mul_(counts / total)")),
    wrong("wrong-sign", (BY_Z, "by_z = z.mul_(counts / -total).scatter_add_(1, y, counts.to(wide))")),
    wrong("ignored-in-the-loss", ("torch.where(counts, total.log() - z_y, 0)", "(total.log() - z_y)")),
    wrong("ignored-in-the-gradients", (BY_Z, "by_z = z.div_(total).scatter_add_(1, y, -counts.to(wide))")),
    wrong("ignored-is-word-0", (BY_Z, "by_z = z.mul_(counts / total).scatter_add_(1, y, -torch.ones_like(z_y))")),
    wrong("mean", ("    return loss, [by_hidden", "    return loss / (targets != ignore_index).sum(), [by_hidden")),
    wrong("forgets-the-bias", ("F.linear(h, weight, bias)", "F.linear(h, weight)")),
    wrong("sums-in-16-bits", ("torch.zeros_like(weight, dtype=wide)", "torch.zeros_like(weight)")),
    wrong("softmax-in-16-bits", ("narrow, z = z.dtype, z.to(wide)", "narrow = z.dtype"),
          ("-counts.to(wide)", "-counts.to(z.dtype)")),
    wrong("not-needed", ("torch.zeros_like(weight, dtype=wide) if needed[1] else None",
                         "torch.zeros_like(weight, dtype=wide)")),
    wrong("hides-nan", ("    return loss, [", "    return loss.nan_to_num(), ["), says="random"),
]  # fmt: skip


def given(tokens: int, width: int, words: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[torch.Tensor]:
    """hidden, weight, bias, targets. Every fourth token has no target, and the last token has one."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((tokens, width), (words, width), (words,))
    numbers = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    targets = torch.randint(1, words, (tokens,), generator=generator)
    targets[::4] = -100
    targets[-1] = 1
    return [*numbers, targets]


def at_once(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, targets: torch.Tensor
) -> list[torch.Tensor]:
    """The loss and the three gradients, by autograd, from all logits."""
    leaves = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    loss = F.cross_entropy(F.linear(*leaves), targets, reduction="sum")
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def call(needed: tuple[bool, bool, bool], *arguments: Any) -> list[Any]:
    """The loss and the three gradients, by the answer."""
    with torch.no_grad():
        answer = module.loss_and_gradients(needed, *arguments)
    if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[1], list) or len(answer[1]) != 3:
        fail("no-result", "Expected two things, the loss and a list of three gradients. Is there a return?")
    return [answer[0], *answer[1]]


def check() -> None:
    hidden, weight, bias, targets = given(11, 4, 7)
    loss, by_hidden, by_weight, by_bias = call((True, True, True), hidden, weight, bias, targets, 4, -100)
    want = at_once(hidden, weight, bias, targets)
    check_loss(loss, want[0], hidden, weight, bias, targets)
    p = F.linear(hidden, weight, bias).softmax(1)
    counts = (targets != -100)[:, None]
    e_0 = F.one_hot(torch.zeros_like(targets), 7)
    all_p = p - F.one_hot(targets.clamp(min=0), 7) * counts
    mistakes = {
        "forgets-the-target": (p * counts @ weight, "∂L/∂z is p - e_y: the 1 at the target is not subtracted."),
        "wrong-sign": (-want[1], "The gradients have the wrong sign: ∂L/∂z is p - e_y, and not e_y - p."),
        "ignored-in-the-gradients": (all_p @ weight, "A token without target has a gradient: its row of ∂L/∂z is 0."),
        "ignored-is-word-0": (
            (all_p * counts - e_0 * ~counts) @ weight,
            "A token without target learns word 0, which only stood in: its row of ∂L/∂z is 0.",
        ),
        "mean": (want[1] / counts.sum(), "Hidden's gradient was divided by the number of targets: sums are asked for."),
    }
    recognise(by_hidden, want[1], mistakes, "Hidden's gradient", tolerance=1e-9)
    last = (all_p * counts)[8:].T @ hidden[8:]
    mistakes = {"last-chunk-only": (last, "The weight's gradient is that of the last chunk alone: add up all chunks.")}
    recognise(by_weight, want[2], mistakes, "The weight's gradient", tolerance=1e-9)
    recognise(by_bias, want[3], {}, "The bias's gradient", tolerance=1e-9)
    check_large()
    check_needed()
    check_sixteen_bits()
    check_memory()


def check_loss(loss: Any, want: torch.Tensor, *arguments: torch.Tensor) -> None:
    hidden, weight, bias, targets = arguments
    z = F.linear(hidden, weight, bias)
    counts = targets != -100
    index = targets.clamp(min=0)[:, None]
    small = z - z.amax(1, keepdim=True)

    def total(parts: torch.Tensor) -> torch.Tensor:
        return parts[:, 0][counts].sum()

    log = small.logsumexp(1, keepdim=True)
    mistakes = {
        "ignored-in-the-loss": (
            (log - small.gather(1, index)).sum(),
            "Tokens without a target are in the loss, as if word 0 were theirs.",
        ),
        "forgets-the-bias": (
            at_once(hidden, weight, 0 * bias, targets)[0],
            "The loss is that of hidden @ weight.T alone: the bias is missing.",
        ),
        "largest-in-one-term": (
            total(log - z.gather(1, index)),
            "Both terms of log Σ exp(z) - z_y must be of the same z: the largest logit is subtracted in one only.",
        ),
        "gathers-after-exp": (
            total(log - small.exp().gather(1, index)),
            "log Σ exp(z) - z_y: what was subtracted is exp(z_y). Take z_y out before z is overwritten.",
        ),
        "loses-the-last-chunk": (
            at_once(hidden[:8], weight, bias, targets[:8])[0],
            "11 tokens in chunks of 4: the last three are missing. The last chunk may be shorter.",
        ),
        "mean": (want / counts.sum(), "The loss is a mean: the sum of the tokens' losses is asked for."),
    }
    recognise(loss, want, mistakes, "The loss", tolerance=1e-9)


def check_large() -> None:
    hidden, weight, bias, targets = given(11, 4, 7)
    loss, by_hidden, *_ = call((True, True, True), 1000 * hidden, weight, bias, targets, 4, -100)
    want = at_once(1000 * hidden, weight, bias, targets)
    if not bool(loss.isfinite()) or bool(by_hidden.isnan().any()):
        fail(
            "overflows",
            f"With logits of some 1000 the loss is {float(loss)}: exp of them is infinite. What may be subtracted from "
            "all logits of a row, so that neither L nor p changes?",
        )
    recognise(loss, want[0], {}, "With logits of some 1000, the loss", tolerance=1e-9)


def check_needed() -> None:
    hidden, weight, bias, targets = given(11, 4, 7)
    for needed in itertools.product((False, True), repeat=3):
        given_bias = bias if needed[2] else None
        for name, needs, gradient in zip(
            ("hidden", "the weight", "the bias"),
            needed,
            call(needed, hidden, weight, given_bias, targets, 4, -100)[1:],  # type: ignore[arg-type]
        ):
            if needs != (gradient is not None):
                fail(
                    "not-needed",
                    f"needed is {needed}, for hidden, weight and bias. The gradient of {name} should "
                    f"{'be there' if needs else 'be None: it costs memory and time'}.",
                )


def check_sixteen_bits() -> None:
    """So many equal tokens: a sum in BF16 stands still. And logits that BF16 rounds: a softmax of them is another."""
    many = 600
    hidden, weight = torch.ones(many, 1, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.bfloat16)
    zeros = torch.zeros(many, dtype=torch.long)
    by_weight = call((True, True, False), hidden, weight, None, zeros, 1, -100)[2]
    if by_weight.dtype != torch.float32 or float(by_weight[1]) != many / 2:
        fail(
            "sums-in-16-bits",
            f"{many} chunks of one token each add 0.5 to the weight's gradient in BF16. The sum is "
            f"{float(by_weight[1]):g} in {by_weight.dtype}, and should be {many / 2:g} in torch.float32.",
        )
    hidden, weight, bias, targets = given(64, 8, 500, torch.bfloat16)
    loss, *_ = call((True, True, True), hidden, weight, bias, targets, 16, -100)
    want = F.cross_entropy(F.linear(hidden, weight, bias).float(), targets, reduction="sum")
    if loss.dtype != torch.float32 or abs(float(loss) / float(want) - 1) > 1e-4:
        fail(
            "softmax-in-16-bits",
            f"With hidden in BF16 the loss is {float(loss):.4f}, and {float(want):.4f} if the softmax is FP32: convert "
            "the logits before exp and the sum.",
        )


def check_memory() -> None:
    tokens, width, words, chunk = 64, 2, 2048, 8
    hidden, weight, _, targets = given(tokens, width, words, torch.float32)
    with Ledger() as ledger:
        call((True, True, False), hidden, weight, None, targets, chunk, -100)
    one, made = chunk * words * 4, (tokens + words) * width * 4
    held = ledger.peak["total"] - made
    if held > 4 * one:
        fail(
            "all-at-once",
            f"At the peak there are {size(held)} beside the gradients. The logits of one chunk are {size(one)}, those "
            f"of all {tokens} tokens {size(tokens * words * 4)}: only one chunk's may be there.",
        )
    if held > 1.6 * one:
        fail(
            "two-chunks",
            f"At the peak there are {size(held)} beside the gradients: two matrices as the {size(one)} of logits of a "
            "chunk. Does a name still hold those of the chunk before, when the next come? Does an operation write "
            "into a new matrix, and not in place?",
        )


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
    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    needed = list(itertools.product((False, True), repeat=3))
    ways = itertools.product((1, 5, 12, 31), (1, 3, 12, 40), dtypes)
    columns = (
        needed,
        [1, 3, 8],
        [2, 9, 40],
        [False, True],
        [0.0, 0.3, 1.0],
        [-100, -1, 1],
        [1.0, 1.0, 1e3],
        [False, False, False, True],
    )
    return [Case(*row) for row in deal(random, ways, *columns)]


def result(case: Case) -> Any:
    hidden, weight, bias, targets = given(case.tokens, case.width, case.words, case.dtype, case.seed)
    hidden *= case.largest if case.dtype != torch.bfloat16 else 1.0
    ignored = torch.rand(case.tokens, generator=torch.Generator().manual_seed(case.seed)) < case.ignored
    targets = targets.masked_fill(targets < 0, 0).masked_fill(ignored, case.mark)
    if case.of_nan and targets[0] != case.mark:
        hidden[0, 0] = torch.nan
    needed = (*case.needed[:2], case.needed[2] and case.bias)
    with Ledger() as ledger:
        given_bias = bias if case.bias else None
        loss, *gradients = call(needed, hidden, weight, given_bias, targets, case.chunk, case.mark)
    # How few bytes are enough, check_memory asks. On tensors as small as these another way may need more.
    small = (min(case.tokens, case.chunk) * (case.words + 4 * case.width) + case.words * case.width) * 8 + 2000
    return {
        "the loss": loss,
        "the gradients": gradients,
        "bytes at the peak": AtMost(ledger.peak["total"] + small),
    }


def tolerance(case: Case) -> dict[torch.dtype, float]:
    """A right answer may add the bias to logits that BF16 has rounded, and 1 - p is off by as much as they are."""
    if case.dtype == torch.bfloat16:
        return {torch.float32: 0.2, torch.bfloat16: 0.2}
    return {torch.float64: 1e-9, torch.float32: 1e-4}
