"""FP16 weights, of which the optimizer has FP32 masters: small updates add up there, and the weights follow
when they have become large enough to show.

    gradients up        self.copy_gradients()      each master gets its parameter's gradient, as FP32
    step                self.optimizer.step()      on the masters
    weights back        self._round_back()         the nearest 16-bit numbers

A scaler may have copied and unscaled the gradients already: then self.taken is not None, and copying again
would undo that. self._check_gradients(self.taken), self._check_parameters() and
_check_learning_rates(self.param_groups) complain where something was written to in between.
"""

import torch

from precision.master import MasterWeights
from precision.scaling import StaticLossScaler
from tests.exercises.kit import fail, wrong

PLAN = [
    "Check learning rates and parameters.",
    "With a closure: self.optimizer.step with a function that returns self._evaluate(closure).",
    "Without: copy the gradients, unless that was done (self.taken; then check them); then self.optimizer.step().",
    "Whatever was taken is used up: self.taken = None. Round back. Return what the optimizer's step returned.",
]
HINTS = [
    "self.taken is None until copy_gradients() has been called since the last step.",
    "self.optimizer.step(lambda: self._evaluate(closure))",
    "Rounding comes last, after the masters have moved.",
]
AFTER = (
    "Before it steps, the package looks at PyTorch's counts of in-place writes. If somebody wrote to a 16-bit "
    "parameter, the masters would undo that in silence, so it is an error. `taken` says that a scaler has copied and "
    "unscaled the gradients: to copy them again would bring back the scaled ones. With a closure every evaluation "
    "first rounds the masters into the weights, because LBFGS moves the masters several times in one step. Read next: "
    "section 6 of notebooks/04_mixed_precision.ipynb."
)
WRONG = [
    wrong("forgets-to-round-back", ("    self._round_back()", "    pass")),
    wrong("undoes-the-unscaling", ("        if self.taken is None:", "        if True:")),
    wrong("never-copies", ("            self.copy_gradients()", "            pass")),
    wrong("uses-old-gradients", ("    self.taken = None\n", "")),
    wrong("masters-in-16-bits", ("    self._round_back()", "    self._round_back()\n    for master in self.masters:\n"
                                                           "        master.copy_(master.half())")),
    wrong("ignores-the-closure", ("result: Any = self.optimizer.step(lambda: self._evaluate(closure))",
                                  "result = self.optimizer.step()")),
    wrong("returns-nothing", ("    return result", "    return None")),
    wrong("steps-twice", ("        result = self.optimizer.step()",
                          "        self.optimizer.step()\n        result = self.optimizer.step()")),
]  # fmt: skip


def made(value: float = 1.0, lr: float = 1.0):
    weight = torch.nn.Parameter(torch.full((2,), value, dtype=torch.float16))
    return weight, MasterWeights([weight], torch.optim.SGD, lr=lr)


def check() -> None:
    weight, masters = made()
    weight.grad = torch.full_like(weight, 0.5)
    masters.step()
    if masters.masters[0][0] == 1:
        fail("never-copies", "A step, and the masters have not moved: they have no gradients. Copy them up first.")
    if masters.masters[0][0] == 0:
        fail("steps-twice", "The masters moved by twice the update.")
    if weight[0] == 1:
        fail("forgets-to-round-back", "The masters moved, and the weights that the model uses did not: round back.")
    if weight[0] != 0.5:
        fail("values", f"1 - 0.5 gave {weight[0].item():g}.")
    weight, masters = made()
    weight.grad = torch.full_like(weight, 0.25)
    masters.step()
    weight.grad = torch.full_like(weight, 0.5)
    try:
        masters.step()
    except RuntimeError:
        fail(
            "uses-old-gradients",
            "A second step with new gradients fails: after a step none are taken, self.taken = None.",
        )
    if weight[0] != 0.25:
        fail("uses-old-gradients", f"1 - 0.25 - 0.5 gave {weight[0].item():g}: were the first gradients used again?")
    weight, masters = made(lr=2.0**-12)
    for _ in range(8):
        weight.grad = torch.ones_like(weight)
        masters.step()
    if masters.masters[0][0] == 1 and weight[0] == 1:
        fail("masters-in-16-bits", "Eight updates of 2^-12 left no trace: the masters were rounded to 16 bits as well.")
    if weight[0] != 1 - 2.0**-9:
        fail("values", f"Eight updates of 2^-12 from 1 gave {weight[0].item()!r}, expected {1 - 2.0**-9!r}.")
    weight, masters = made()
    scaler = StaticLossScaler(4.0)
    scaler.scale((weight.float() * 0.5).sum()).backward()
    scaler.unscale_(masters)
    scaler.step(masters)
    if weight[0] == -1:
        fail("undoes-the-unscaling", "A scaler had unscaled the gradients, and step copied the scaled ones over them.")
    if weight[0] != 0.5:
        fail("values", f"With a scaler, 1 - 0.5 gave {weight[0].item():g}.")
    weight, masters = made()
    calls = []

    def closure():
        calls.append(1)
        masters.zero_grad()
        loss = (weight.float() * 0.5).sum()
        loss.backward()
        return loss

    loss = masters.step(closure)
    for spoil, what in ((_spoil_weight, "parameter"), (_spoil_gradient, "gradient")):
        try:
            spoil()
        except RuntimeError:
            continue
        fail("no-error", f"A {what} was written to behind the masters' back, and nothing complained: call the checks.")
    if not calls:
        fail("ignores-the-closure", "step(closure) never called the closure.")
    if loss is None:
        fail("returns-nothing", "step(closure) must return what the optimizer's step returned, the loss.")
    if weight[0] != 0.5:
        fail("values", "A step with a closure gave another weight.")


def _spoil_weight() -> None:
    weight, masters = made()
    weight.grad = torch.ones_like(weight)
    with torch.no_grad():
        weight.mul_(2)
    masters.step()


def _spoil_gradient() -> None:
    weight, masters = made()
    weight.grad = torch.ones_like(weight)
    masters.copy_gradients()
    weight.grad.mul_(2)
    masters.step()
