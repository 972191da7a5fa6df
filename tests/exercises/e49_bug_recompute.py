"""Find the bug. The function below trains a deep network, and keeps only the inputs of its blocks. What lies inside a
block is computed again in backward. That should change memory and time, and no number. It runs, and its loss falls. Yet
it ends higher than the loss of the same run without recompute.

This happened to OLMo-core, the training code of the Allen Institute for AI, in August 2026. Its models had never used
dropout. Then one with a dropout of 0.1 on the residual stream came, and every block of it was recomputed. While the
settings for speed were compared, recompute was switched off, which is "supposed to be mathematically neutral". After
150 steps the loss was 2.195 without recompute, and 2.495 with it.

    the report, and its correction   https://github.com/allenai/OLMo-core/pull/828
    where the dropout came in        https://github.com/allenai/OLMo-core/pull/825

What was made smaller: theirs was a model of 4 billion parameters on two machines. Here are 6 blocks of width 16, and
150 steps as well. So few blocks hardly show a dropout of 0.1, so it is 0.5 here. The fault is the same line.

Predict before you look: two runs begin with the same seed, one with recompute and one without. Which losses are equal:
that of step 1, that of step 2, both, or none?

Run the check first: it says what the numbers are. Then read the function line by line, and mend it.
"""

import itertools
from random import Random
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from tests.exercises.draws import deal
from tests.exercises.kit import fail, lent, wrong
from tests.exercises.rank_kit import metered
from tests.exercises.tasks import bug_recompute

PLAN = [
    "What must hold: losses and parameters are those of a run that keeps everything and begins with the same seed.",
    "Between forward and backward only the input of each block is kept. In backward one block at a time is computed "
    "again, the last one first.",
    "It holds for any block, whatever layers it has and whatever it calls.",
]
HINTS = [
    "A step runs each block twice. What does a block depend on, beside its input and its parameters? In which order do "
    "the blocks run the first time, and the second time?",
    "The loss comes from the first forward, and the gradient from the second one. Section 2 of lesson 05 has a dropout "
    "inside a dozen lines of recompute, and shows the same thing on eight numbers.",
    "Before the second forward of a block the random generator must be set back to where it was before the first one, "
    "and afterwards to where it is now. PyTorch's checkpoint does both, unless it is told not to.",
]
AFTER = (
    "The option was off in OLMo-core, below a note to keep the state only if dropout is active. The correction looks "
    "for dropout: layers of nn.Dropout, and the residual stream's own dropout, which calls torch.rand_like. A review "
    "named a third place that draws, a router's noise. By default PyTorch and this package set the generators back "
    "always. verify=True in minizero.recompute.checkpoint compares the "
    "two forwards, operator by operator. Read next: minizero/recompute/replay.py, which lists what else a second "
    "forward must find as it was."
)
TAKEAWAY = (
    "Recompute trusts that the second forward is the first one: random numbers must be set back, or the gradient "
    "belongs to another network than the loss."
)
BUGGY = (
    (
        "            hidden = checkpoint(block, hidden, use_reentrant=False)\n",
        "            hidden = checkpoint(block, hidden, use_reentrant=False, preserve_rng_state=False)\n",
    ),
)
CALL = BUGGY[0][0]
BLOCKS = f"        for block in model.blocks:\n{CALL}"
WRONG = [
    wrong("other-numbers", "The block drops other numbers when it runs again in backward than it did in forward: the "
          "loss is that of one network, its gradient that of another.", *BUGGY),
    wrong("keeps-everything", "No block ran again in backward: what lies inside all of them is kept when forward "
          "ends.", (CALL, "            hidden = block(hidden)\n")),
    wrong("without-dropout", "No block drops anything: dropout is a part of the model, so leave it on.",
          ("    losses = []\n", "    losses = []\n    model.eval()\n"), *BUGGY),
    wrong("looks-for-dropout-layers", "A block without a layer of nn.Dropout draws random numbers too, by "
          "torch.rand_like, and drew others in backward. What a block calls is not to be seen from outside.",
          (CALL, "            draws = any(isinstance(m, torch.nn.Dropout) for m in block.modules())\n"
           "            hidden = checkpoint(block, hidden, use_reentrant=False, preserve_rng_state=draws)\n")),
    wrong("one-state-for-all", "In backward the last block comes first. With one state for the whole step it drops "
          "what the first block dropped in forward.", BUGGY[0], ("        hidden = model.stem(x)\n",
           "        state = torch.get_rng_state()\n        hidden = model.stem(x)\n"),
          ("        loss.backward()\n", "        torch.set_rng_state(state)\n        loss.backward()\n")),
    wrong("all-blocks-at-once", "In backward all blocks ran again before the first gradient of one, so what lies "
          "inside them is there at once. Each needs a checkpoint of its own.",
          (BLOCKS, "        hidden = checkpoint(torch.nn.Sequential(*model.blocks), hidden, use_reentrant=False)\n")),
    wrong("same-numbers-in-each-step", "A block drops the same numbers in each step: do not seed the generator.",
          (BLOCKS, "        for number, block in enumerate(model.blocks):\n"
           "            def seeded(hidden, block=block, number=number):\n                torch.manual_seed(number)\n"
           "                return block(hidden)\n            hidden = checkpoint(seeded, hidden, "
           "use_reentrant=False)\n")),
    wrong("numbers-of-its-own", "Both forwards of a block draw the same numbers, but not those of plain training: do "
          "not seed the generator; and once a block has run again, set it to where it was before.",
          (BLOCKS, "        step = len(losses)\n        for number, block in enumerate(model.blocks):\n"
           "            def seeded(hidden, block=block, number=number):\n"
           "                with torch.random.fork_rng():\n                    torch.manual_seed(100 * step + number)\n"
           "                    return block(hidden)\n            hidden = checkpoint(seeded, hidden, "
           "use_reentrant=False)\n")),
]  # fmt: skip
CLASSES = 10


class Log(list):
    """What modules write down. Plain lists of modules would be given back by this package's recompute."""


class Block(nn.Module):
    """x + dropout(f(x)), which writes down what it dropped. layer: of nn.Dropout; else it draws by itself."""

    def __init__(self, width: int, p: float, layer: bool, log: Log | None) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(p) if layer else None
        self.p, self.log = p, log

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(F.gelu(self.up(self.norm(x))))
        if self.dropout:
            kept = self.dropout(torch.ones_like(y))
        else:
            kept = (torch.rand_like(y) >= self.p) / (1 - self.p) if self.training else torch.ones_like(y)
        if self.log is not None:
            self.log.append((self, kept != 0))
        return x + y * kept


class Head(nn.Linear):
    """It writes down when it runs: forward ends with it."""

    def __init__(self, width: int, log: Log) -> None:
        super().__init__(width, CLASSES)
        self.log = log

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.log.append((self, None))
        return super().forward(x)


class Model(bug_recompute.Deep):
    def __init__(self, width: int, depth: int, p: float, layer: bool) -> None:
        super().__init__()
        self.log = Log()
        self.stem, self.head = nn.Linear(6, width), Head(width, self.log)
        self.blocks = nn.ModuleList(Block(width, p, layer, self.log) for _ in range(depth))


def data(steps: int, count: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Points, and their classes by a network with random weights."""
    generator = torch.Generator().manual_seed(seed)
    first, second = torch.randn(6, 64, generator=generator), torch.randn(64, CLASSES, generator=generator)
    xs = [torch.randn(count, 6, generator=generator) for _ in range(steps)]
    return [(x, ((x @ first).tanh() @ second).argmax(1)) for x in xs]


class Run:
    """losses, parameters, and for each step the blocks that ran and what they dropped: in forward, and again."""

    def __init__(self, train: Any, model: Model, batches: Any, seed: int = 0) -> None:
        model = lent(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        torch.manual_seed(seed)
        self.losses = train(model, optimizer, iter(batches))
        self.parameters = parameters_to_vector(model.parameters()).detach()
        number: Any = {block: i for i, block in enumerate(model.blocks)}
        ends = [i for i, (who, _) in enumerate(model.log) if who is model.head]
        if len(ends) != len(batches):
            fail("steps-missing", f"For {len(batches)} batches the head ran {len(ends)} times.")
        depth = len(number)
        log = [(number.get(who), dropped) for who, dropped in model.log]
        self.first = [[dropped for _, dropped in log[end - depth : end]] for end in ends]
        self.again = [log[end + 1 : after - depth] for end, after in zip(ends, [*ends[1:], len(log) + depth])]


class Case(NamedTuple):
    blocks: int
    p: float
    layer: bool
    width: int
    frozen: bool
    seed: int


def draw(random: Random) -> list[Case]:
    """layer: the dropout is a layer of nn.Dropout; else the block calls torch.rand_like."""
    ways = itertools.product((1, 2, 5), (0.0, 0.1, 0.5), (False, True))
    return [Case(3, 0.5, True, 8, False, 0), *map(Case._make, deal(random, ways, [4, 8], [False, True]))]


def result(case: Case) -> Any:
    torch.manual_seed(case.seed)
    model = Model(case.width, case.blocks, case.p, case.layer)
    model.stem.requires_grad_(not case.frozen)
    batches = data(12, 12, case.seed)
    (run,), meters = metered(1, lambda _: Run(bug_recompute.train_recomputed, model, batches, case.seed))
    order = [[block + 1 for block, _ in step] for step in run.again]
    return {"losses": run.losses, "parameters": run.parameters, "blocks that ran again": order, **meters}


def tolerance(case: Case) -> float:
    return 1e-4
