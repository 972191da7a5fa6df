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

import copy
import itertools
from random import Random
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, parameters_to_vector

from minizero.memory import Ledger
from tests.exercises.bug_kit import fell
from tests.exercises.draws import deal
from tests.exercises.kit import fail, lent, recognise, size, wrong
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
    wrong("other-numbers", *BUGGY),
    wrong("keeps-everything", (CALL, "            hidden = block(hidden)\n")),
    wrong("without-dropout", ("    losses = []\n", "    losses = []\n    model.eval()\n"), *BUGGY),
    wrong("looks-for-dropout-layers", (CALL, "            draws = any(isinstance(m, torch.nn.Dropout) for m in "
          "block.modules())\n            hidden = checkpoint(block, hidden, use_reentrant=False, "
          "preserve_rng_state=draws)\n")),
    wrong("one-state-for-all", BUGGY[0], ("        hidden = model.stem(x)\n", "        state = torch.get_rng_state()\n"
          "        hidden = model.stem(x)\n"), ("        loss.backward()\n",
          "        torch.set_rng_state(state)\n        loss.backward()\n")),
    wrong("all-blocks-at-once", (BLOCKS, "        hidden = checkpoint(torch.nn.Sequential(*model.blocks), hidden, "
          "use_reentrant=False)\n")),
    wrong("same-numbers-in-each-step", (BLOCKS, "        for number, block in enumerate(model.blocks):\n"
          "            def seeded(hidden, block=block, number=number):\n"
          "                torch.manual_seed(number)\n                return block(hidden)\n"
          "            hidden = checkpoint(seeded, hidden, use_reentrant=False)\n")),
    wrong("numbers-of-its-own", (BLOCKS, "        step = len(losses)\n"
          "        for number, block in enumerate(model.blocks):\n"
          "            def seeded(hidden, block=block, number=number):\n"
          "                with torch.random.fork_rng():\n                    torch.manual_seed(100 * step + number)\n"
          "                    return block(hidden)\n"
          "            hidden = checkpoint(seeded, hidden, use_reentrant=False)\n")),
]  # fmt: skip
WIDTH, DEPTH, STEPS, CLASSES = 16, 6, 150, 10


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
    def __init__(self, width: int = WIDTH, depth: int = DEPTH, p: float = 0.5, layer: bool = True) -> None:
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


def keeps_everything(model: Any, optimizer: torch.optim.Optimizer, batches: Any) -> list[float]:
    """Plain training."""
    losses = []
    for x, y in batches:
        hidden = model.stem(x)
        for block in model.blocks:
            hidden = block(hidden)
        loss = F.cross_entropy(model.head(hidden), y)
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


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


def check() -> None:
    torch.manual_seed(0)
    model, batches = Model(), data(STEPS, 32, 1)
    run, twin = (Run(way, model, batches[:3]) for way in (bug_recompute.train_recomputed, keeps_everything))
    if not isinstance(run.losses, list) or len(run.losses) != 3:
        fail("no-losses", "Expected the loss of each of three steps.")
    check_memory(model, batches[0], run)
    if mistake := wrong_numbers(run, twin):
        name, words = mistake
        fail(name, f"{how_they_end(model, batches)}. {words}")
    recognise(torch.tensor(run.losses), torch.tensor(twin.losses), {}, "The losses, against plain training", 1e-4)
    recognise(run.parameters, twin.parameters, {}, "The parameters, against plain training", 1e-3)
    torch.manual_seed(0)
    run = Run(bug_recompute.train_recomputed, Model(layer=False), batches[:1])
    if any(not torch.equal(mask, run.first[0][block]) for block, mask in run.again[0]):
        fail(
            "looks-for-dropout-layers",
            "A block without a layer of nn.Dropout drew random numbers, by torch.rand_like, and drew others in "
            "backward. What a block calls is not to be seen from outside.",
        )


def how_they_end(model: Model, batches: Any) -> str:
    """The losses of the whole run, with recompute and without."""
    run, twin = (Run(way, model, batches).losses for way in (bug_recompute.train_recomputed, keeps_everything))
    mean, should = (sum(losses[-20:]) / 20 for losses in (run, twin))
    return (
        f"{fell([run[0], mean])} (the mean of the last 20 of {STEPS} steps). The run that keeps everything, with the "
        f"same seed, has {should:.3f} there"
    )


def check_memory(model: Model, batch: Any, run: Run) -> None:
    """Which blocks ran again in step 1, and in which order; what was kept until backward."""
    order = [block + 1 for block, _ in run.again[0]]
    inputs = (DEPTH + 1) * batch[0].shape[0] * WIDTH * 4
    one, moments = copy.deepcopy(model), []
    for block in one.blocks:
        assert isinstance(block, Block)
        block.log = None  # what it dropped would count
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    ledger = Ledger(one, optimizer)
    one.head.register_forward_pre_hook(lambda *_: moments.append(ledger.current["temporary"]))
    with ledger:
        bug_recompute.train_recomputed(one, optimizer, iter([batch]))
    held = moments[0]
    if not order:
        fail(
            "keeps-everything",
            f"No block ran again in backward. So {size(held)} were kept when forward ended, where the inputs of "
            f"{DEPTH} blocks take {size(inputs)}.",
        )
    if order == list(range(1, DEPTH + 1)):
        fail(
            "all-blocks-at-once",
            f"In backward the blocks ran again in the order {order}: all of them, before the first gradient of a "
            "block. So what lies inside all blocks is there at once. Each block needs a checkpoint of its own.",
        )
    if order != list(range(DEPTH, 0, -1)) or held > 2 * inputs:
        fail(
            "keeps-too-much",
            f"In backward the blocks ran again in the order {order}, and {size(held)} were kept when forward ended, "
            f"where the inputs of {DEPTH} blocks take {size(inputs)}. Expected each block once, the last one first.",
        )


def wrong_numbers(run: Run, twin: Run) -> tuple[str, str] | None:
    """What is wrong with what the blocks drop, in forward and again: the mistake's name, and words."""
    if all(bool(mask.all()) for mask in run.first[0]):
        return "without-dropout", "Here no block drops anything: dropout is a part of the model, so leave it on."
    if not torch.equal(run.first[0][0], twin.first[0][0]) or not torch.equal(run.first[1][0], twin.first[1][0]):
        if torch.equal(run.first[0][0], run.first[1][0]):
            return (
                "same-numbers-in-each-step",
                "Here block 1 drops the same numbers in step 1 and in step 2: each step must draw new ones.",
            )
        if all(torch.equal(mask, run.first[0][block]) for block, mask in run.again[0]):
            return (
                "numbers-of-its-own",
                "Here both forwards of a block draw the same numbers now, but not those of the plain run: do not "
                "seed the generator; and once a block has run again, set it to where it was before.",
            )
    wrongs = [(block, mask) for block, mask in run.again[0] if not torch.equal(mask, run.first[0][block])]
    if not wrongs:
        return None
    block, mask = wrongs[0]
    for other, theirs in enumerate(run.first[0]):
        if torch.equal(mask, theirs):
            return (
                "one-state-for-all",
                f"In step 1 block {block + 1} dropped in backward what block {other + 1} had dropped in forward. In "
                "backward the last block comes first, so one state for the whole step is not enough.",
            )
    equal = ["equal" if a == b else "not equal" for a, b in zip(run.losses, twin.losses)]
    before, after = ~run.first[0][block], ~mask
    return (
        "other-numbers",
        f"The losses of step 1 are {equal[0]}, those of step 2 are {equal[1]}. In forward of step 1 block {block + 1} "
        f"set {int(before.sum())} of {mask.numel()} numbers to zero. When it ran again in backward, it set "
        f"{int(after.sum())} to zero, and only {int((before & after).sum())} of these are the same.",
    )


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
    return [Case(*row) for row in deal(random, ways, [4, 8], [False, True])]


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
