"""Each byte has its category, its phase and its holder."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from minizero import GPT
from minizero.memory import CATEGORIES, Ledger, tag
from tests.support.by_module import by_module
from tests.support.ledger_gpt import CONFIG, TOKENS

# As what, and when.


def test_what_was_born_before_forward_is_no_activation():
    module = nn.Linear(10, 10)
    with Ledger(module) as ledger:
        x = torch.ones(1000, 10)
        module(x).sum().backward()
        assert ledger.current["temporary"] >= x.nbytes and ledger.peak["activations"] < x.nbytes + 100


def test_a_gradient_from_before_is_a_gradient_and_what_is_tagged_stays_what_it_is():
    """Such as the FP32 master weights of an engine, which are parameters to the optimizer and states to the formula."""
    module = nn.Linear(10, 10, bias=False)
    module.weight.grad = torch.ones(10, 10)
    tag(module.weight, "optimizer")
    with Ledger(module) as ledger:
        held = {category: held for category, held in ledger.current.items() if held}
        assert held == {"gradients": 400, "optimizer": 400, "total": 800}


def test_states_in_lists_are_the_optimizers():
    module = nn.Linear(40, 40)
    optimizer = torch.optim.LBFGS(module.parameters(), max_iter=5)

    def loss():
        optimizer.zero_grad()
        loss = module(torch.ones(4, 40)).square().sum()
        loss.backward()
        return loss

    with Ledger(module, optimizer) as ledger:
        for _ in range(2):
            optimizer.step(loss)
    (state,) = optimizer.state.values()
    assert {row["phase"] for row in ledger.holders if row["category"] == "optimizer"} == {"optimizer"}
    assert state["old_dirs"] and ledger.current["optimizer"] >= len(state["old_dirs"]) * 40 * 41 * 4
    assert ledger.current["temporary"] == 0


def test_each_phase_has_its_own_peak():
    module = nn.Linear(100, 100, bias=False)
    optimizer = torch.optim.Adam(module.parameters(), foreach=False)
    with Ledger(module, optimizer) as ledger:
        module(torch.ones(50, 100)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    phases, weight = ledger.peak_by_phase, 40_000
    assert list(phases) == ["between", "forward", "backward", "optimizer"]
    assert phases["forward"]["gradients"] == phases["forward"]["optimizer"] == 0
    assert phases["backward"]["gradients"] == weight and phases["backward"]["optimizer"] == 0
    assert phases["optimizer"]["optimizer"] == 2 * weight + 4
    # The denominator of Adam's update, and its square root before the division.
    assert phases["optimizer"]["temporary"] == 2 * weight
    assert phases["optimizer"]["total"] == 6 * weight + 4 == ledger.peak["total"]
    assert phases["between"]["total"] == 3 * weight + 4
    for category in CATEGORIES:
        assert ledger.peak[category] == max(phase[category] for phase in phases.values())


def test_a_gradient_inside_forward_does_not_end_it():
    class Penalty(nn.Linear):
        def forward(self, x):
            (slope,) = torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)
            return (slope * 2).square().sum()

    model = Penalty(10, 10)
    with Ledger(model) as ledger:
        loss = model(torch.ones(1000, 10, requires_grad=True))
        assert ledger.recorder.position.phase == "forward"
        loss.backward()
    assert ledger.peak["activations"] >= 40_000  # slope · 2, which square's backward needs


# For whom.


def test_every_byte_of_the_peak_has_a_holder():
    model = GPT(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters())
    with Ledger(model, optimizer) as ledger:
        for _ in range(2):
            model(TOKENS, TOKENS).backward()
            optimizer.step()
            optimizer.zero_grad()
    rows = ledger.holders
    assert sum(row["bytes"] for row in rows) == ledger.peak["total"]
    modules = by_module(rows)
    assert sum(held["total"] for held in modules.values()) == ledger.peak["total"]
    up = model.blocks[0].up.weight.nbytes
    assert modules["blocks.0.up"]["parameters"] == up and modules["blocks.0.up"]["optimizer"] == 2 * up + 4
    assert modules["embedding"]["parameters"] == model.embedding.weight.nbytes  # tied to the head: once
    names = {name for name, _ in model.named_modules()} | {"GPT"}
    assert {name for name in modules if not name.startswith("(")} <= names
    assert list(modules) == sorted(modules, key=lambda name: -modules[name]["total"])


def test_an_activation_belongs_to_the_module_and_the_operator_that_made_it():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(10, 20), nn.Sequential(nn.Linear(20, 30), nn.Tanh())

        def forward(self, x):
            return self.second(torch.relu(self.first(x)))

    model = Outer()
    with Ledger(model) as ledger:
        out = model(torch.ones(100, 10))
        loss = out.exp().sum()
        loss.backward()
    rows = [row for row in ledger.holders if row["category"] == "activations" and row["bytes"] > 100]
    made = {(row["module"], row["operator"]): row["bytes"] for row in rows}
    # At the peak exp's output, which its backward needs, is in nobody's forward; Linear's is not kept by Tanh.
    expected = {("Outer", "relu"): 8000, ("second.1", "tanh"): 12_000, ("", "exp"): 12_000}
    assert made == {(module, f"aten.{name}.default"): held for (module, name), held in expected.items()}


def test_recompute_and_failures_leave_no_module_behind():
    """Recompute stops a forward from inside, by an exception, once it has what it needs."""
    model = nn.Sequential(nn.Linear(10, 10), nn.Sequential(nn.Tanh(), nn.Linear(10, 10), nn.Dropout(0.5)), nn.ReLU())
    with Ledger(model) as ledger:
        x = torch.ones(5, 10, requires_grad=True)
        checkpoint(model, x, use_reentrant=False).sum().backward()
        position = ledger.recorder.position
        assert position.running == [""] and position.phase == "backward"
        torch.ones(1)
        assert position.phase == "between"
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.ones(5, 11))
        assert position.running == [""]
        model(x)
    assert any("addmm" in sample.operator for sample in ledger.curve if sample.phase == "backward")
    phases = [entry for entry in ledger.tape if isinstance(entry, str)]
    assert phases == ["between", "forward", "backward", "between", "forward", "forward"]


def test_lazy_modules_count_from_their_first_forward_on():
    """Until then their parameters and buffers have no shape."""
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyBatchNorm1d(), nn.LazyLinear(2))
    with Ledger(model) as ledger:
        assert ledger.current["total"] == 8  # the batch norm's counter of batches
        for _ in range(2):
            model(torch.ones(3, 5)).sum().backward()
    held = sum(parameter.nbytes for parameter in model.parameters())
    assert ledger.current["parameters"] == ledger.current["gradients"] == held == 4 * (5 * 8 + 8 + 8 + 8 + 8 * 2 + 2)
    assert ledger.current["buffers"] == 8 * 4 * 2 + 8 and by_module(ledger.holders)["3"]["parameters"] == 4 * 18
