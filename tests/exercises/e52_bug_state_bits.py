"""Find the bug. The function below trains with Adam on several ranks. The two moments of a small parameter are FP32, 8
bytes an element. Those of a large one have 8 bits each, so 2 bytes. Each rank keeps the moments of its chunk only. The
function runs, its loss falls, and all ranks hold the same parameters. Yet with more ranks it is another optimizer.

torchao's AdamW8bit was reported for this in September 2026: a parameter of (6, 1024) elements had other states on two
ranks than on one, "so changing only the device mesh changes the optimizer's approximation". A week before,
the same had been reported for bitsandbytes under FSDP: there several small parameters, put end to end in one flat
buffer, became large.

    torchao's issue         https://github.com/pytorch/ao/issues/4912
    a correction            https://github.com/pytorch/ao/pull/4913
    bitsandbytes            https://github.com/bitsandbytes-foundation/bitsandbytes/issues/2080

What was made smaller: nothing of the parameter, which has 6,144 elements here as well, nor of the border, 4,096. But
the 8 bits are plain: equal steps up to the largest of a block of 256. Both libraries have tables of 256 values, which
are denser near 0. And ZeRO-1 stands for FSDP, since the moments are sharded alike.

Predict before you look: one rank alone keeps 12.2 KiB for the moments of that parameter. What does each of two ranks
keep, and each of four?

Run the check first: it says what the numbers are. Then read the function line by line, and mend it.
"""

import itertools
from random import Random
from typing import Any, NamedTuple

import torch
from torch import nn

from minizero.memory import Ledger
from tests.exercises.draws import deal
from tests.exercises.kit import AtMost, fail, lent, ranks, wrong
from tests.exercises.rank_kit import metered
from tests.exercises.tasks import bug_state_bits

PLAN = [
    "What must hold: how many ranks there are changes what a rank keeps, and nothing else. The parameters after a run "
    "are those of one rank with the whole batch, but for rounding.",
    "A parameter of 4,096 elements or more has moments of 8 bits, and a smaller one has FP32. Padding does not count.",
    "Two parameters never count as one. Each rank keeps 1/N of the moments of every parameter.",
]
HINTS = [
    "On which number does the choice between 8 bits and 32 depend? Take a parameter of 6,144 elements, and write that "
    "number down for 1 rank, 2 ranks and 4.",
    "A rule for a parameter must be asked with numbers that all runs share. What is the same on any number of ranks?",
    "`mine` is a chunk, with padding. `parameter` is the whole one.",
]
AFTER = (
    "The correction that was proposed for torchao is yours: the size of the whole parameter decides. It must also "
    "refuse shards that would cut a block of 256 in two; here the padding sees to that. In the report on bitsandbytes "
    "the updates differed by 0.00006 at most, so no loss shows it. But a checkpoint from 64 cards has states that 8 "
    "cards do not expect, and a plan of the memory is wrong by a factor of 4. Read next: the homework on "
    "ZeRO of notebooks/04b_masters_sums_bytes.ipynb, and minizero/engines/layout.py, which says what a shard is."
)
TAKEAWAY = (
    "A rule about a parameter must ask the whole parameter: what asks the shard gives another answer on another number "
    "of ranks."
)
BUGGY = (("Numbers8 if parameter.numel() >= LARGE", "Numbers8 if len(mine) >= LARGE"),)
KIND = "Numbers8 if parameter.numel() >= LARGE else Numbers32"
WRONG = [
    wrong("size-of-the-shard", "A rank's shard decides, so on more ranks a large parameter has moments of FP32, and "
          "two ranks keep more together than one alone. The parameter's size decides.", *BUGGY),
    wrong("counts-padding", "A parameter of fewer elements than the border has moments of 8 bits: its padding was "
          "counted, which depends on the number of ranks.",
          (KIND, KIND.replace("parameter.numel()", "len(mine) * comm.size"))),
    wrong("eight-for-all", "Small parameters have moments of 8 bits as well. They save nothing there, and keep FP32.",
          (KIND, "Numbers8")),
    wrong("fp32-for-all", "The moments of a large parameter are FP32: 8 bytes an element, and not 2.",
          (KIND, "Numbers32")),
    wrong("beyond-the-border", "A parameter of exactly as many elements as the border is large enough.",
          (KIND, KIND.replace(">=", ">"))),
    wrong("first-moment-fp32", "Only one of the two moments has 8 bits: both have.",
          ("moments.append((kind(len(mine)), ", "moments.append((Numbers32(len(mine)), ")),
    wrong("whole-moments", "A rank keeps the moments of all elements: it needs those of its chunk only.",
          ("moments.append((kind(len(mine)), kind(len(mine))))",
           "length = len(mine) * comm.size\n        moments.append((kind(length), kind(length)))"),
          ("first.read() * 0.9", "first.read().chunk(comm.size)[comm.rank] * 0.9"),
          ("root.read() ** 2", "root.read().chunk(comm.size)[comm.rank] ** 2"),
          ("first.write(mean)", "first.write(all_gather(mean, comm))"),
          ("root.write(square.sqrt())", "root.write(all_gather(square.sqrt(), comm))")),
]  # fmt: skip
RATE = 0.01
WORDS = {(8, 8): "8 bits", (32, 32): "FP32", (32, 8): "one FP32, one 8 bits", (8, 32): "one 8 bits, one FP32"}


class Sums(nn.Module):
    """Of each parameter, the gradient is what the batch has for it. 6,144 elements are (6, 1024), as in the report."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        shapes = [(size // 1024, 1024) if size % 1024 == 0 else (size,) for size in sizes]
        self.each = nn.ParameterList(torch.zeros(shape) for shape in shapes)

    def forward(self, x: list[torch.Tensor], _: Any) -> torch.Tensor:
        return sum(((weight.view(-1) * part).sum() for weight, part in zip(self.each, x)), torch.zeros(()))


def gradients(sizes: tuple[int, ...], size: int, steps: int, seed: int, scale: float = 1.0) -> list[list[Any]]:
    """Of each rank its batches for `Sums`: a few numbers are much larger than the others."""
    generator = torch.Generator().manual_seed(seed)
    each = [[scale * torch.exp2(torch.randn(n, generator=generator) * 2) for n in sizes] for _ in range(steps)]
    return [
        [([(1 + (2 * rank + 1 - size) / 8) * part for part in whole], None) for whole in each] for rank in range(size)
    ]


def train(comm, model, batches, rate):
    """Losses; parameters; and the bytes of the moments of this rank, before the first step."""
    model, held = lent(model), [0]

    def watched():
        held[0] = ledger.current["total"]
        yield from ()

    with Ledger() as ledger:  # of no steps, since a ledger takes time
        bug_state_bits.train_8bit(model, watched(), rate, comm)
    losses = bug_state_bits.train_8bit(model, iter(batches[comm.rank]), rate, comm)
    return losses, [p.detach().view(-1) for p in model.parameters()], held[0]


def by_hand(batches: list[Any], place: int, bits: tuple[int, int]) -> torch.Tensor:
    """A parameter of `Sums` after Adam, on one process, whose two moments have so many bits."""
    first = root = weight = torch.zeros_like(batches[0][0][0][place], dtype=torch.float64)
    for step, parts in enumerate(zip(*batches), 1):
        gradient = torch.stack([x[place].double() for x, _ in parts]).mean(0)
        mean, square = 0.9 * first + 0.1 * gradient, 0.999 * root**2 + 0.001 * gradient**2
        weight = weight - RATE * (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
        first, root = (
            torch.cat(
                [
                    (block * (127 / block.max())).round().clamp(min=1) * (block.max() / 127)
                    for block in numbers.split(256)
                ]
            )
            if count == 8
            else numbers
            for count, numbers in zip(bits, (mean, square.sqrt()))
        )
    return weight


def kinds(size: int, sizes: tuple[int, ...], steps: int, seed: int, scale: float) -> tuple[list[str], int]:
    """Of each parameter of these sizes, in words, which moments it has on so many ranks; the bytes of rank 0's."""
    batches = gradients(sizes, size, steps, seed, scale)
    runs = ranks(size, train, Sums(sizes), batches, RATE)
    found = []
    for place in range(len(sizes)):
        got = runs[0][1][place].double()
        for rank, (_, parameters, _) in enumerate(runs):
            if not parameters[place].equal(runs[0][1][place]):
                fail("ranks-differ", f"Rank {rank} ends with other parameters than rank 0: all must end with the same.")
        wanted = {words: by_hand(batches, place, bits) for bits, words in WORDS.items()}
        far = {words: float((got - want).abs().mean() / want.abs().mean()) for words, want in wanted.items()}
        nearest = min(far, key=lambda words: far[words])
        found.append(nearest if far[nearest] < 1e-3 else "no Adam")
    return found, runs[0][2]


class Case(NamedTuple):
    ranks: int
    sizes: tuple[int, ...]
    steps: int
    scale: float
    seed: int


def draw(random: Random) -> list[Case]:
    """Sizes near 4,096, and near what a rank's chunk of it would be."""
    near = [4095, 4096, 4097, 2048, 8192, 12_288, 16_384, 300, 1]
    plain = [Case(n, (600, 4000, 4096, 6144), 2, 1.0, 0) for n in (2, 4)]
    return plain + [
        Case(n, tuple(random.sample(near, 3)), steps, scale, seed)
        for n, steps, scale, seed in deal(random, itertools.product((1, 2, 3, 4, 6)), [1, 2, 3], [1.0, 1e-7])
    ]


def result(case: Case) -> Any:
    """Not the parameters: where two ways to add round otherwise, one of many moments may be another step of 127."""
    moments, held = kinds(case.ranks, case.sizes, case.steps + 1, case.seed, case.scale)
    batches = gradients(case.sizes, case.ranks, case.steps, case.seed)

    def run(comm: Any) -> None:
        bug_state_bits.train_8bit(Sums(case.sizes), iter(batches[comm.rank]), RATE, comm)

    words = {f"moments of {n} elements": kind for n, kind in zip(case.sizes, moments)}
    return words | {"bytes of the moments of rank 0": AtMost(held, 1.2)} | metered(case.ranks, run)[1]
