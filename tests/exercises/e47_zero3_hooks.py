"""ZeRO stage 3 for any model: no loop calls your code. PyTorch calls it, at four moments, since you put hooks there.
A unit comes with what is to be done: `gather`, `release`, `reduce`. You say when.

    module.register_forward_pre_hook(f)     f(module, inputs) is called before each forward of the module
    module.register_forward_hook(f)         f(module, inputs, output) is called after it
    tensor.register_hook(f)                 f(gradient) is called in backward, before what made the tensor goes
                                            backward; an error if the tensor requires no gradient
    parameter.register_post_accumulate_grad_hook(f)
                                            f(parameter) is called when its .grad is complete: the sum over all uses

    unit.name, unit.parameters      the second one is a list
    unit.gather()       makes them whole, from all ranks' shards; if they are whole, it does nothing
    unit.release()      frees them
    unit.reduce()       sends the parameters' .grad, all of which must be there; takes them off the parameters

The loop around is PyTorch's: forward, backward, optimizer's step. Each `f` returns None: anything else would
take the place of what it was given.
"""

from random import Random
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from minizero import GPT
from minizero.engines import zero3_by_hooks
from minizero.engines.layout import pad
from minizero.memory import Ledger
from tests.exercises import rank_kit
from tests.exercises.draws import deal
from tests.exercises.kit import AtMost, Tolerance, fail, ranks, size, wrong
from tests.support.helpers import SMALL, batch, plain

PLAN = [
    "When a forward of the module begins, the unit is whole, and made of what the shards have at this moment.",
    "When it ends, the unit is released. If it `stays`, it is released only if no backward can follow: the output "
    "requires no gradient.",
    "When backward comes back to the module, the unit is whole again.",
    "In each backward the unit is reduced once, as soon as all its parameters have their gradients. While they are "
    "sent, the unit is released already. In the next step all is the same again.",
    "A unit of which a backward reached some parameters and not all was not reduced: its next forward raises a "
    "RuntimeError.",
]
HINTS = [
    "Write down for each of the four moments which of the three methods belongs there, and in which order if there are "
    "two. One of the moments is only known during forward: that hook is put on in another one.",
    "`gather` does nothing if the unit is whole, even if the optimizer has made a step since. What must you call "
    "before it, at the beginning of a forward, so that it cannot be misled? For the last moment keep a list of the "
    "parameters that have come. Who empties it?",
    "Define four functions in `watch`, and register them at its end; the one for the output is registered by the one "
    "that is given the output. In the last one: append; if the list is as long as unit.parameters, clear it, "
    "release, reduce. At the beginning of a forward the list must be empty.",
]
AFTER = (
    "`shard` in minizero/engines/zero3_by_hooks.py calls your function for each block and for the root. That is all "
    "of stage 3. The engine has the same four moments. Most of its files are there for what yours does not serve, and "
    "the table at the top of the page names them. PyTorch's first FSDP releases and reduces a unit at your moment: its "
    "flat parameter has one gradient, which is complete then. Read next: minizero/engines/core.py, and Zhao et al., "
    '2023, "PyTorch FSDP", section 4.3.'
)
AWAY = "if not (stays and output.requires_grad):\n            unit.release()"
ON_OUTPUT = "output.register_hook(output_has_gradient)"
ALL = "if len(came) == len(unit.parameters):"
LAST = "            unit.release()\n            unit.reduce()\n"
WRONG = [
    wrong("never-gathers", "", ("module.register_forward_pre_hook(forward_begins)", "pass")),
    wrong("stays-after-forward", "", (AWAY, "pass")),
    wrong("stays-without-backward", "", (AWAY, AWAY.replace("(stays and output.requires_grad)", "stays"))),
    wrong("away-in-backward", "", (ON_OUTPUT, "pass")),
    wrong("reduces-too-early", "", (ALL, "if True:")),
    wrong("never-empties", "", ("came.clear()", "pass")),
    wrong("never-reduces", "", ("            unit.reduce()\n", "")),
    wrong("stays-after-backward", "", (LAST, "            unit.reduce()\n")),
]  # fmt: skip


class Times(torch.autograd.Function):
    """x · weight, which tells the unit that it uses its parameters now."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, unit: "Recorder") -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.unit = unit
        unit.use("forward")
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.unit.use("backward")
        return gradients[0] * weight, (gradients[0] * x).sum(0), None


class Recorder:
    """A unit that notes what happens to it. It loses no memory, so that a mistake is no crash."""

    def __init__(self, name: str) -> None:
        self.name, self.parameters = name, [nn.Parameter(torch.ones(3)) for _ in range(3)]
        self.seen: list[str] = []
        self.whole = self.fresh = False

    def use(self, when: str) -> None:
        self.seen.append(f"{when}, {'away' if not self.whole else 'whole' if self.fresh else 'old'}")

    def gather(self) -> None:
        if not self.whole:
            self.whole = self.fresh = True
            self.seen.append("gather")

    def release(self) -> None:
        self.whole = False
        self.seen.append("release")

    def reduce(self) -> None:
        missing = sum(p.grad is None for p in self.parameters)
        self.seen.append(f"reduce, {missing} missing" + ", whole" * self.whole)
        for parameter in self.parameters:
            parameter.grad = None


class Product(nn.Module):
    """x times the unit's parameters, and then perhaps what another module makes of it."""

    def __init__(self, unit: Recorder, then: nn.Module | None = None) -> None:
        super().__init__()
        self.unit, self.then = unit, then
        self.order = [1, 0, 2]  # so neither the first nor the last of the list is the last in backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            x = Times.apply(x, self.unit.parameters[number], self.unit)  # type: ignore[no-untyped-call]
        return x if self.then is None else self.then(x) + x


def check() -> None:
    recorded()
    ranks(4, trained)


def recorded() -> None:
    """A block, and a root around it that stays, in one process: forward, backward, step, three times, and more."""
    units = [Recorder("a block"), Recorder("the root")]
    block = Product(units[0])
    root = Product(units[1], block)
    for unit, module in zip(units, (block, root)):
        zero3_by_hooks.watch(cast(Any, unit), module, module is root)
    for step in range(3):
        output = forward(root, units)
        backward(output, units, step)
    with torch.no_grad():
        forward(root, units)
    if units[1].whole:
        fail(
            "stays-without-backward",
            "After a forward without gradients the root, which stays, is still whole: its output requires no gradient, "
            "so no backward will come to release it.",
        )
    forward(root, units)  # of which no backward follows
    for unit in units:
        unit.fresh = False
    output = forward(root, units)
    backward(output, units, 3)
    block.order = [1, 2]
    forward(root, units).sum().backward()
    try:
        root(torch.ones(2, 3))
    except RuntimeError:
        return
    fail(
        "silent",
        "A backward brought gradients to 2 of a unit's 3 parameters. The unit was not reduced, and its next forward "
        "raised no error: the optimizer has missed a gradient, and nobody hears of it. Raise a RuntimeError.",
    )


def forward(root: Product, units: list[Recorder]) -> torch.Tensor:
    for unit in units:
        unit.seen.clear()
    try:
        output = root(torch.ones(2, 3))
    except RuntimeError as error:
        if "register a hook" in str(error):
            fail(
                "hook-without-gradient",
                "A forward under no_grad raised an error: its output requires no gradient, and takes no hook. No "
                "backward will come: look at output.requires_grad first.",
            )
        fail(
            "never-empties",
            f"A forward raised: {error}. But in the backward before all parameters had got their gradients. When the "
            "unit is reduced, forget which have come.",
        )
    for unit in units:
        if "forward, away" in unit.seen:
            fail("never-gathers", f"In a forward {unit.name} computed with parameters that were away: gather first.")
        if "forward, old" in unit.seen:
            fail(
                "old-parameters",
                f"When a forward began, {unit.name} was whole, and `gather` did nothing. But the optimizer had made a "
                "step since, so the forward computed with old parameters. Release first.",
            )
    if units[0].whole:
        fail(
            "stays-after-forward",
            "After its forward a block is still whole. With each block a rank holds more, in the end all parameters: "
            "release it.",
        )
    if output.requires_grad and not units[1].whole:
        fail(
            "releases-what-stays",
            "After its forward the root is away, though it `stays` and its output requires a gradient. Backward begins "
            "with the root, so it is sent once more.",
        )
    return output


def backward(output: torch.Tensor, units: list[Recorder], step: int) -> None:
    """And an optimizer's step."""
    for unit in units:
        unit.seen.clear()
    output.sum().backward()
    for unit in units:
        look_at_backward(unit, step)
        unit.fresh = False


def look_at_backward(unit: Recorder, step: int) -> None:
    """What happened to the unit in a backward."""
    seen = unit.seen
    reductions = [number for number, event in enumerate(seen) if event.startswith("reduce")]
    before = seen[: reductions[0]] if reductions else seen
    if "backward, away" in before and "gather" in seen:
        fail(
            "comes-too-late",
            f"In backward {unit.name} was gathered when backward had gone through it. The gradient of its *input* is "
            "the end of its backward, and that of its output is the beginning.",
        )
    if "backward, away" in before:
        fail(
            "away-in-backward",
            f"Backward went through {unit.name} while its parameters were away. Gather when the gradient of its output "
            "is there.",
        )
    if not reductions and step:
        fail("reduced-once", f"In step 1 {unit.name} was reduced, and in step {step + 1} not: begin to count anew.")
    if not reductions:
        fail("never-reduces", f"When all gradients of {unit.name} had come, it was not reduced.")
    missing = int(seen[reductions[0]].split()[1])
    if missing and sum(event.startswith("backward") for event in before) == 3:
        fail(
            "gradient-not-there",
            f"When {unit.name} was reduced, the last gradient was computed, and not yet in .grad. register_hook is too "
            "early: use register_post_accumulate_grad_hook.",
        )
    if missing:
        fail(
            "reduces-too-early",
            f"When {unit.name} was reduced, {missing} of its 3 parameters had no gradient yet. They come in any order: "
            "wait until all have come.",
        )
    if len(reductions) > 1:
        fail("reduces-twice", f"In one backward {unit.name} was reduced {len(reductions)} times.")
    if unit.whole:
        fail(
            "stays-after-backward",
            f"After backward {unit.name} is still whole, though nothing needs it any more: release it.",
        )
    if "whole" in seen[reductions[0]]:
        fail(
            "reduces-first",
            f"While the gradients of {unit.name} were sent, it was still whole. Nothing needs it any more, and sending "
            "takes memory: release first.",
        )


def trained(comm) -> None:
    """A GPT, two steps: the parameters are one process's; of bytes, no more than needed are sent and held."""
    model, want = GPT(SMALL), plain(2)[1]
    blocks = [f"blocks.{number}." for number in range(SMALL.layers)]
    names = [[n for n, _ in model.named_parameters() if n.startswith(block)] for block in blocks]
    names.insert(0, [n for n, _ in model.named_parameters() if not n.startswith("blocks.")])
    shards = zero3_by_hooks.shard(model, model.blocks, comm)
    optimizer, before = torch.optim.AdamW(shards, lr=1e-3), comm.bytes_sent
    for step in range(2):
        with Ledger() as ledger:
            model(*(both.chunk(comm.size)[comm.rank] for both in batch(step))).backward()
            held = ledger.current["total"]
        optimizer.step()
        optimizer.zero_grad()
    for mine, its in zip(shards, names, strict=True):
        full = pad(torch.cat([want[name].reshape(-1) for name in its]), comm.size)
        if not torch.allclose(mine, full.chunk(comm.size)[comm.rank], rtol=1e-4, atol=1e-5):
            fail("values", f"After two steps on 4 ranks rank {comm.rank}'s shards are not those of one process.")
    each = [shard.nbytes for shard in shards]
    sent, enough = (comm.bytes_sent - before) // 2, 3 * (2 * each[0] + 3 * sum(each[1:]))
    if sent > enough:
        fail(
            "sends-more",
            f"A rank sent {size(sent)} in a step, where {size(enough)} are enough: the root is gathered once, and a "
            "block twice. What is whole need not be sent again in backward.",
        )
    if held > sum(each) * 1.1:
        fail(
            "holds-more",
            f"After backward {size(held)} are held beside the shards, and their gradients have {size(sum(each))}. Keep "
            "no tensor longer than its moment lasts.",
        )


class Layers(nn.Module):
    """A root of two layers around blocks, each with one parameter, two, or six."""

    def __init__(self, width: int, kinds: tuple[str, ...]) -> None:
        super().__init__()
        make = {
            "one": lambda: nn.Linear(width, width, bias=False),
            "two": lambda: nn.Linear(width, width),
            "six": lambda: nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3), nn.Tanh(), nn.Linear(3, width)),
        }
        self.first, self.last = nn.Linear(3, width), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(make[kind]() for kind in kinds)

    def forward(self, x: torch.Tensor, order: tuple[int, ...], detached: bool = False) -> torch.Tensor:
        x = self.first(x)
        for number in order:
            x = x + self.blocks[number](x)
        loss = self.last(x).square().mean()
        return loss.detach() if detached else loss


class Case(NamedTuple):
    """order: in which the blocks are used, some of them twice. events: one after the other, from one model."""

    ranks: int
    width: int
    kinds: tuple[str, ...]
    order: tuple[int, ...]
    events: tuple[str, ...]
    seed: int


def draw(random: Random) -> list[Case]:
    kinds = [("one", "two", "six"), ("six", "one", "one"), ("two", "six", "two")]
    orders = [(0, 1, 2), (0, 1, 2), (2, 0, 1), (0, 1, 0, 2)]
    events = ["a step", "two backwards", "two forwards", "no gradients", "no graph", "a forgotten loss"]
    rows = deal(random, [(n,) for n in (1, 2, 3, 4, 5, 7)], [5, 6, 9], kinds, orders)
    return [
        Case(n, width, kind, order, ("a step", *random.sample(events, 4)), seed) for n, width, kind, order, seed in rows
    ]


def result(case: Case) -> dict[str, Any]:
    """After each event: the loss, this rank's shards, the bytes sent and held, and what is whole."""
    with torch.random.fork_rng():
        torch.manual_seed(case.seed)
        state = Layers(case.width, case.kinds).state_dict()

    def on_rank(comm) -> dict[str, Any]:
        model, found = Layers(case.width, case.kinds), dict[str, Any]()
        model.load_state_dict(state)
        shards = zero3_by_hooks.shard(model, model.blocks, comm)
        generator = torch.Generator().manual_seed(case.seed + comm.rank)
        for number, event in enumerate(case.events, 1):
            x, y, before = *torch.randn(2, 4, 3, generator=generator), comm.bytes_sent
            with Ledger() as ledger:
                if event == "no gradients":
                    with torch.no_grad():
                        model(y, case.order)
                if event == "no graph":
                    model(y, case.order, detached=True)
                left = [p.untyped_storage().nbytes() for p in model.parameters()]
                loss = model(x, case.order)
                second = model(y, case.order) if event == "two forwards" else None
                loss.backward()
                if event == "two backwards":
                    second = model(y, case.order)
                if second is not None:
                    second.backward()
                if event == "a forgotten loss":
                    model(y, case.order)
                loss = loss.detach()
                del second
            with torch.no_grad():
                for shard in shards:
                    if shard.grad is not None:
                        shard.sub_(shard.grad, alpha=0.1)
                        shard.grad = None
            found[f"event {number}, {event}"] = {
                "loss": loss,
                "shards": [shard.detach().clone() for shard in shards],
                "bytes sent": comm.bytes_sent - before,
                "bytes at the peak": AtMost(ledger.peak["total"], 1.2, 0.02),
                "bytes of each parameter's unit before the step": left,
                "bytes of each parameter's unit": [p.untyped_storage().nbytes() for p in model.parameters()],
                "parameters with a gradient": sum(p.grad is not None for p in model.parameters()),
            }
        return found

    return rank_kit.by_rank(ranks(case.ranks, on_rank))


def tolerance(case: Case) -> Tolerance:
    return 1e-5
