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

from minizero.engines import zero3_by_hooks
from minizero.memory import Ledger
from tests.exercises import rank_kit
from tests.exercises.draws import deal
from tests.exercises.kit import AtMost, Tolerance, ranks, wrong

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
    wrong("never-gathers", "A forward computed with parameters that were away: gather first.",
          ("module.register_forward_pre_hook(forward_begins)", "pass")),
    wrong("stays-after-forward", "After its forward a block is still whole. With each block a rank holds more, in the "
          "end all parameters: release it.", (AWAY, "pass")),
    wrong("stays-without-backward", "After a forward without gradients the root, which stays, is still whole: its "
          "output requires no gradient, so no backward will come to release it.",
          (AWAY, AWAY.replace("(stays and output.requires_grad)", "stays"))),
    wrong("away-in-backward", "Backward went through a unit while its parameters were away. Gather when the gradient "
          "of its output is there.", (ON_OUTPUT, "pass")),
    wrong("reduces-too-early", "When a unit was reduced, some of its parameters had no gradient yet. They come in any "
          "order: wait until all have come.", (ALL, "if True:")),
    wrong("never-empties", "In the next step a gradient seems to have come before backward: when a unit is reduced, "
          "forget which have come.", ("came.clear()", "pass")),
    wrong("never-reduces", "When all gradients of a unit had come, it was not reduced.",
          ("            unit.reduce()\n", "")),
    wrong("stays-after-backward", "After backward a unit is still whole, and was so while its gradients were sent. "
          "Nothing needs it any more: release it, then reduce.", (LAST, "            unit.reduce()\n")),
]  # fmt: skip


class Times(torch.autograd.Function):
    """x · weight, which tells the unit that it uses its parameters now."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, unit: "Recorder") -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.unit = unit
        unit.seen.append(f"forward while it is {unit.state()}")
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.unit.seen.append(f"backward while it is {ctx.unit.state()}")
        return gradients[0] * weight, (gradients[0] * x).sum(0), None


class Recorder:
    """A unit that notes what happens to it. It loses no memory, so that a mistake is no crash."""

    def __init__(self, name: str) -> None:
        self.name, self.parameters = name, [nn.Parameter(torch.ones(3)) for _ in range(3)]
        self.seen: list[str] = []
        self.whole = self.fresh = False

    def state(self) -> str:
        return "away" if not self.whole else "whole" if self.fresh else "whole, of a shard before the step"

    def gather(self) -> None:
        self.fresh |= not self.whole
        self.whole = True

    def release(self) -> None:
        self.whole = False

    def reduce(self) -> None:
        here = sum(parameter.grad is not None for parameter in self.parameters)
        self.seen.append(f"reduced with {here} of 3 gradients while it is {self.state()}")
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


def recorded() -> dict[str, Any]:
    """What happens to a block, and to a root around it that stays, in one process."""
    units = Recorder("the block"), Recorder("the root")
    block = Product(units[0])
    root = Product(units[1], block)
    for unit, module in zip(units, (block, root)):
        zero3_by_hooks.watch(cast(Any, unit), module, module is root)
    found: dict[str, Any] = {"a RuntimeError comes after": "nothing"}

    def tell(what: str) -> None:
        for unit in units:
            found[f"{what}, {unit.name}"] = [*unit.seen, f"in the end {unit.state()}"]
            unit.seen.clear()

    def step(what: str, backward: bool = True) -> None:
        output = root(torch.ones(2, 3))
        tell(f"{what}, forward")
        if backward:
            output.sum().backward()
            tell(f"{what}, backward")
        for unit in units:
            unit.fresh = False  # the optimizer has made a step

    try:
        for number in (1, 2, 3):
            step(f"step {number}")
        with torch.no_grad():
            step("without gradients", False)
        step("a loss that is forgotten", False)
        step("step 4")
        block.order = [1, 2]
        root(torch.ones(2, 3)).sum().backward()
        found["a backward that reaches 2 of the block's 3 parameters"] = "is over"
        root(torch.ones(2, 3))
    except RuntimeError:
        found["a RuntimeError comes after"] = [*found][-1]
    return found


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


RECORDED = Case(1, 0, (), (), (), 0)


def draw(random: Random) -> list[Case]:
    kinds = [("one", "two", "six"), ("six", "one", "one"), ("two", "six", "two")]
    orders = [(0, 1, 2), (0, 1, 2), (2, 0, 1), (0, 1, 0, 2)]
    events = ["a step", "two backwards", "two forwards", "no gradients", "no graph", "a forgotten loss"]
    rows = deal(random, [(n,) for n in (1, 2, 3, 4, 5, 7)], [5, 6, 9], kinds, orders)
    return [RECORDED] + [
        Case(n, width, kind, order, ("a step", *random.sample(events, 4)), seed) for n, width, kind, order, seed in rows
    ]


def result(case: Case) -> dict[str, Any]:
    """What is recorded; or after each event the loss, the shards, the bytes sent and held, and what is whole."""
    if case == RECORDED:
        return recorded()
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
