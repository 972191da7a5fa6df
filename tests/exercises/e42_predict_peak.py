"""Predict the peak, before it is measured. Exercise 15 asks what a rank holds between two steps. Memory runs out
within a step. At which moment is it fullest, and what is there then?

The check builds small models, trains them with DDP, Zero1, Zero2 and Zero3 (prefetch=0), and lets the ledger measure:
parameters, gradients and optimizer states, added up at every moment of forward and backward. Activations, messages of
the ring and other temporary tensors do not count. You predict the maximum, to the byte. The rules:

    units       The root unit has what lies outside the blocks, here a first and a last layer. Each block is a unit.
    parameters  Stages 0 to 2 hold all of them. In stage 3 a rank always holds its chunk, 1/N of every unit. Beside
                its chunk, the root is gathered as a whole when forward begins, and released when backward ends. A
                block is gathered as a whole for its forward, and then released. In backward it is gathered again,
                and released once its gradient is reduced.
    gradients   There are none when the step begins. A unit's gradient is one buffer, as large as the unit. It begins
                with the first gradient of one of the unit's parameters. The unit is reduced when it has all of them.
                Stage 0: the buffers stay. When the last one is complete, all are copied into one message, which counts
                as a gradient.
                Stage 1: a buffer is reduced in place, and stays.
                Stages 2 and 3: the reduced chunk, 1/N of the unit, is a new tensor. When it is complete, the buffer
                is freed.
    optimizer   It keeps `states` numbers for each parameter; from stage 1 on, for those of this rank's chunk.
"""

from random import Random
from typing import Any, NamedTuple

import torch
from torch import nn

from minizero import DDP, Zero1, Zero2, Zero3
from minizero.memory import Ledger
from tests.exercises.kit import fail, ranks, value_or_error, wrong
from tests.exercises.tasks import peak

PLAN = [
    "What is held at a moment is a sum over parameters, gradients and optimizer states. The peak is the largest sum, "
    "and not the sum of the largest parts.",
    "Follow backward unit by unit, in the order in which the units are complete. Which unit begins first, and ends "
    "last?",
    "Decide for each stage what a unit adds while it is reduced, and what it leaves behind.",
    "Return a whole number of bytes.",
]
HINTS = [
    "Take paper: stage 3, 4 ranks, a root of 400 and blocks of 1000, 3000 and 2000. Write down for each block, the "
    "last one first, what there is of parameters and of gradients just before its buffer is freed. The largest sum is"
    " 9650.",
    "The root's gradient begins with that of the last layer, the first that backward comes to. It is complete after "
    "that of the first layer. So its buffer is there during the whole backward.",
    "One loop over reversed(blocks) with three running numbers does it: what is gathered, the gradients so far, the "
    "peak.",
]
AFTER = (
    "With prefetch=1, the default, our stage 3 gathers ahead, as PyTorch's FSDP does: while a block computes, the "
    "next one is on its way, so the parameters of a second block are there at the peak. PyTorch's DDP can make its "
    "gradients views of its buckets (gradient_as_bucket_view=True), which saves a copy. The largest unit and the "
    "root decide the peak, and not the average unit. What is missing here are the activations, which notebook 00 "
    "adds, and what an allocator keeps and cannot use. Read next: minizero/engines/core.py, where these moments "
    "are."
)
WRONG = [
    wrong("forgets-the-message", "Before they are averaged, the gradients are copied into one message.",
          ("[total, 0, root", "[0, 0, root")),
    wrong("frees-gradients-in-stage-1", "Stage 1 keeps every unit's buffer.",
          ("        if stage >= 2:\n", "        if stage >= 1:\n")),
    wrong("keeps-gradients-in-stage-2", "From stage 2 on a block's whole buffer is freed when its chunk is complete.",
          ("            gradients += shard - block", "            gradients += shard")),
    wrong("forward-order", "Backward comes to the last block first: its chunk is there already when the block before "
          "it is reduced.", ("reversed(blocks)", "blocks")),
    wrong("forgets-the-chunks-of-others", "The chunks of blocks that were reduced before stay.",
          ("gradients += shard - block", "gradients -= block")),
    wrong("forgets-the-root", "The root's replica is there as long as the model computes.",
          ("replicas = root if stage == 3 else 0", "replicas = 0")),
    wrong("gathers-everything", "Only one block is gathered at a time.",
          ("replica = block if stage == 3 else 0", "replica = sum(blocks) if stage == 3 else 0")),
    wrong("adds-the-peaks", "The most parameters and the most gradients are not there at the same moment.",
          ("    peak = 0\n", "    peak = most = 0\n"), (
           "peak = max(peak, parameters + replicas + replica + gradients + shard)",
           "peak, most = max(peak, gradients + shard), max(most, replica)"), (
           "    peak = max(peak, parameters + replicas + gradients + message)\n",
           "    peak = max(peak, gradients + message) + parameters + replicas + most\n")),
]  # fmt: skip
STAGES = (DDP, Zero1, Zero2, Zero3)


class Layer(nn.Module):
    """As many parameters as you like, and hardly an activation."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.sum()


class Model(nn.Module):
    def __init__(self, root: int, blocks: list[int]) -> None:
        super().__init__()
        self.first, self.last = Layer(root // 2), Layer(root - root // 2)
        self.blocks = nn.ModuleList([Layer(size) for size in blocks])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).sum()


class Held(NamedTuple):
    """Numbers at the peak; a number has 4 bytes."""

    parameters: int
    gradients: int
    optimizer: int


def step(comm: Any, stage: int, root: int, blocks: list[int], states: int) -> Held:
    model = Model(root, blocks)
    options: dict[str, Any] = dict(prefetch=0) if stage == 3 else {}
    engine = STAGES[stage](model, comm, units=list(model.blocks), **options)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1, momentum=0.9 * states)
    x = torch.ones(1)
    engine(x).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        engine(x)  # stages 1 and 2 gather what the step has changed
    with Ledger(engine, optimizer) as ledger:
        engine(x).backward()
    parts = ("parameters", "gradients", "optimizer")
    return Held(*max(([sample[part] // 4 for part in parts] for sample in ledger.curve), key=sum))


def measured(stage: int, size: int, root: int, blocks: list[int], states: int = 0) -> Held:
    """On rank 0; all ranks hold as much. states: 0, or 1 with momentum."""
    return ranks(size, step, stage, root, blocks, states)[0]


class Case(NamedTuple):
    stage: int
    ranks: int
    root: int
    blocks: list[int]
    states: int
    bytes_each: int
    measured: int | str


def draw(random: Random) -> list[Case]:
    """Small models with a measurement each, so that a peak lies now here, now there. Then large ones without."""
    cases, plain = [], [(stage, 4, 400, [1000, 3000, 2000]) for stage in range(4)]
    for way in [*plain, (2, 2, 6000, [200, 100]), (3, 2, 6000, [200, 100])]:
        cases.append(Case(*way, 0, 4, 4 * sum(measured(*way))))
    for stage in [0, 1, 2, 2, 2, 3, 3, 3, 3, 3]:
        size, states = random.choice((2, 3, 4)), random.randrange(2)
        root = 2 * size * random.choice((1, 2, random.randint(1, 60)))
        blocks = [size * random.randint(1, 50) for _ in range(random.randint(0, 5))]
        cases.append(Case(stage, size, root, blocks, states, 4, 4 * sum(measured(stage, size, root, blocks, states))))
    for stage in range(40):
        size = random.randint(2, 300)
        root, *blocks = (size * random.randint(1, 10 ** random.randint(1, 17)) for _ in range(random.randint(1, 6)))
        cases.append(Case(stage % 4, size, root, blocks, random.randrange(4), random.choice((1, 2, 4, 8)), "no"))
    return cases


def result(case: Case) -> Any:
    blocks = list(case.blocks)
    given = case.stage, case.ranks, case.root, blocks, case.states, case.bytes_each
    predicted = value_or_error(peak.predict_peak, *given)
    if blocks != case.blocks:
        fail("random", "The list of blocks is another one afterwards: it is the caller's.")
    if isinstance(predicted, float):
        fail("random", f"{predicted} is a float: return a whole number. // divides whole numbers.")
    if case.measured != "no" and predicted != case.measured:
        fail("random", f"Predicted are {predicted} bytes, and the ledger measures {case.measured}.")
    return predicted
