"""FP16 weights, of which the optimizer has FP32 masters: small updates add up there, and the weights follow
when they have become large enough to show.

    gradients up        self.copy_gradients()      each master gets its parameter's gradient, as FP32
    step                self.optimizer.step()      on the masters
    weights back        self._round_back()         the nearest 16-bit numbers

A scaler may have copied and unscaled the gradients already: then self.taken is not None, and copying again
would undo that. self._check_gradients(self.taken), self._check_parameters() and
_check_learning_rates(self.param_groups) complain where something was written to in between.
"""

import itertools
from random import Random
from typing import Any, NamedTuple

import torch

from minizero.memory import Ledger
from precision.master import MasterWeights
from precision.scaling import DynamicLossScaler
from tests.exercises.draws import deal
from tests.exercises.kit import AtMost, wrong

PLAN = [
    "Check learning rates and parameters.",
    "With a closure: self.optimizer.step with a function that returns self._evaluate(closure).",
    "Without: copy the gradients, unless that was done (self.taken; then check them); then self.optimizer.step().",
    "Whatever was taken is used up: self.taken = None. Round all weights back. Return what the optimizer's step "
    "returned.",
]
HINTS = [
    "self.taken is None until copy_gradients() has been called since the last step.",
    "self.optimizer.step(lambda: self._evaluate(closure))",
    "Rounding comes last, after the masters have moved.",
]
AFTER = (
    "Before it steps, the package compares each parameter with its master, rounded. If somebody wrote to a parameter, "
    "the masters would undo that in silence, so it is an error. `taken` says that a scaler has copied and "
    "unscaled the gradients: to copy them again would bring back the scaled ones. With a closure every evaluation "
    "first rounds the masters into the weights, because LBFGS moves the masters several times in one step. Read next: "
    "section 1 of notebooks/04b_masters_sums_bytes.ipynb."
)
WRONG = [
    wrong("forgets-to-round-back", "The masters moved, and the weights that the model uses did not: round back.",
          ("    self._round_back()", "    pass")),
    wrong("undoes-the-unscaling", "A scaler had unscaled the gradients, and step copied the scaled ones over them.",
          ("        if self.taken is None:", "        if True:")),
    wrong("never-copies", "A step, and the masters have not moved: they have no gradients. Copy them up first.",
          ("            self.copy_gradients()", "            pass")),
    wrong("uses-old-gradients", "Were the first gradients used again?", ("    self.taken = None\n", "")),
    wrong("masters-in-16-bits", "Eight updates of 2^-12 left no trace: the masters were rounded to 16 bits as well.",
          ("    self._round_back()",
           "    self._round_back()\n    for master in self.masters:\n        master.copy_(master.half())")),
    wrong("ignores-the-closure", "step(closure) never called the closure.",
          ("result: Any = self.optimizer.step(lambda: self._evaluate(closure))", "result = self.optimizer.step()")),
    wrong("returns-nothing", "step(closure) must return what the optimizer's step returned, the loss.",
          ("    return result", "    return None")),
    wrong("steps-twice", "The masters moved by twice the update.",
          ("        result = self.optimizer.step()",
           "        self.optimizer.step()\n        result = self.optimizer.step()")),
]  # fmt: skip


class Telling(torch.optim.SGD):
    """An optimizer whose step returns something without a closure, too, and moves what has no gradient, too."""

    def step(self, closure=None):
        result = super().step(closure) if closure else ("stepped", super().step())
        for group in self.param_groups:
            for master in group["params"]:
                master.mul_(0.9)
        return result


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {}),
    "SGD with momentum": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "SGD that returns something": (Telling, {}),
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "LBFGS": (torch.optim.LBFGS, {"max_iter": 3}),
}


class Case(NamedTuple):
    optimizer: str
    how: str
    dtypes: tuple[torch.dtype, ...]
    lr: float
    spoilt: str
    seed: int


def draw(random: Random) -> list[Case]:
    """how: who copies the gradients. spoilt: what is written to before the last step, which may then be an error."""
    ways = [
        *itertools.product(["SGD", "SGD with momentum", "SGD that returns something", "AdamW"],
                           ["step copies", "copied before", "scaler", "closure", "copied, and a closure"]),
        ("LBFGS", "closure"),
    ]  # fmt: skip
    f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
    dtypes = [(f16, f16, f16), (bf16, bf16, bf16), (f16, f32, bf16)]
    spoilt = ["nothing", "a parameter", "a gradient", "the learning rate", "the last learning rate"]
    plain = Case("SGD", "step copies", dtypes[0], 0.3, "nothing", 1)
    return [plain, plain._replace(lr=2.0**-12)] + [
        Case(*row) for row in deal(random, [*ways] * 2, dtypes, [2.0**-12, 0.3], spoilt)
    ]


def result(case: Case) -> dict[str, Any]:
    """Six steps of three parameters. All bits of parameters and masters after each, and what else it leaves.

    A right answer may hold one parameter's new numbers, before it writes them.
    """
    random = Random(case.seed)
    generator = torch.Generator().manual_seed(case.seed)
    shapes = [(60,), (8, 8), ()] if case.optimizer != "LBFGS" else [(60,)]  # it takes one group, all with gradients
    weights = [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for shape, dtype in zip(shapes, case.dtypes)
    ]
    groups = [{"params": weights[:1]}, {"params": weights[1:]}] if len(weights) > 1 else weights
    optimizer, options = OPTIMIZERS[case.optimizer]
    masters = MasterWeights(groups, optimizer, lr=case.lr, **options)
    scaler = DynamicLossScaler(2.0**8)
    places, seen = [weight.data_ptr() for weight in weights], {}
    for number in range(1, 7):
        masters.zero_grad(set_to_none=random.random() < 0.5)
        if case.how == "scaler":
            scaler.scale(torch.zeros(()))
        factors = [_factors(case, number, random, generator, weight) for weight in weights]
        closure = _Closure(masters, factors)
        if case.how != "closure":  # alone, it brings its own
            for weight, factor in zip(weights, factors):
                weight.grad = None if factor is None else (factor * scaler.get_scale()).to(weight.dtype)
        try:
            if "copied" in case.how:
                masters.copy_gradients()
                torch.nn.utils.clip_grad_norm_(masters.masters, 0.5)
            if number == 6:
                _spoil(case.spoilt, weights, masters)
            with Ledger() as ledger:
                if case.how == "scaler":
                    returned = scaler.step(masters)
                    scaler.update()
                else:
                    returned = masters.step(closure) if "closure" in case.how else masters.step()
        except (RuntimeError, ValueError) as error:
            returned = type(error).__name__
        seen[f"step {number}"] = {
            "what it returns": returned,
            "bytes at the peak": AtMost(ledger.peak["total"] + max(w.nbytes for w in weights), 1.1),
            "the parameters": [weight.detach().clone() for weight in weights],
            "the masters": [master.clone() for master in masters.masters],
            "the gradients": [weight.grad for weight in weights],
            "parameters in another place": [w.data_ptr() for w in weights] != places,
            "the closure's calls, with grad mode": closure.calls,
            "masters.taken is None": masters.taken is None,
        }
    return seen


class _Closure:
    """The loss of the parameters that have a factor. calls: whether grad mode was on."""

    def __init__(self, masters: MasterWeights, factors: list[torch.Tensor | None]) -> None:
        self.masters, self.factors = masters, factors
        self.calls: list[bool] = []

    def __call__(self) -> torch.Tensor:
        self.calls.append(torch.is_grad_enabled())
        self.masters.zero_grad()
        products = [w.float() * f for w, f in zip(self.masters.parameters, self.factors) if f is not None]
        loss = torch.stack([(product + product.square()).sum() for product in products]).sum()
        loss.backward()
        return loss


def _factors(case: Case, number: int, random: Random, generator: torch.Generator, weight: torch.Tensor) -> Any:
    """What the gradient of a parameter comes from: now and then None, or, with a scaler, infinity."""
    factor = torch.randn(weight.shape, generator=generator)
    if weight.dim() != 1 and random.random() < 0.2:
        return None
    return factor * torch.inf if case.how == "scaler" and number in (2, 3) and random.random() < 0.5 else factor


def _spoil(what: str, weights: list[torch.nn.Parameter], masters: MasterWeights) -> None:
    with torch.no_grad():
        if what == "a parameter":
            weights[-1].mul_(2)
        if what == "a gradient" and weights[0].grad is not None:
            weights[0].grad.mul_(2)
    if "learning rate" in what:
        masters.param_groups[-1 if "last" in what else 0]["lr"] = torch.inf
