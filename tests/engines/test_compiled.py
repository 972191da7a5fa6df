"""torch.compile before, in and around each stage: the bits without it, or a refusal that says what to do."""

import dataclasses
import functools

import pytest
import torch
from torch import nn

from minizero import DDP, GPT, RankFailed, World, Zero1, Zero2, Zero3
from tests.support.helpers import SMALL, batch, run, soak, steps

TWO = dataclasses.replace(SMALL, layers=2)


def compile_blocks(model, backend):
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend=backend)
    return model


WHOLE = {
    "in place": lambda model, backend: model.compile(backend=backend) or model,
    "around": lambda model, backend: torch.compile(model, backend=backend),
}
LATE = {
    "blocks in place": lambda model, backend: any(block.compile(backend=backend) for block in model.blocks) or model,
    "in place": WHOLE["in place"],
}


def losses(comm, stage, before=None, between=None, after=None, backend="aot_eager"):
    """before, after: of the module, wrapped and not. between: of its parts, once it is wrapped."""
    torch._dynamo.reset()
    module = GPT(TWO)
    engine = stage(before(module, backend) if before else module, comm)
    if between:
        between(module, backend)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    return steps(after(engine, backend) if after else engine, optimizer, range(2), functools.partial(batch, size=2))


def run_one(*args, **kwargs):
    return World(1, device="cpu", timeout=120).run(losses, *args, **kwargs)[0]


REFUSED = "Zero3: a compiled .* contains units.* for each block"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", *soak("eager")])
@pytest.mark.parametrize("stage", [*soak(DDP, Zero1), Zero2, Zero3])
def test_compiled_blocks_and_a_compiled_engine(stage, backend):
    plain = run_one(stage)
    assert run_one(stage, before=compile_blocks, backend=backend) == plain
    for after in WHOLE.values():
        assert run_one(stage, after=after, backend=backend) == plain


@pytest.mark.slow
@pytest.mark.parametrize("how", (LATE | WHOLE).values(), ids=LATE | WHOLE)
def test_what_was_compiled_before_wrapping(how):
    assert run_one(Zero2, before=how) == run_one(Zero2)
    with pytest.raises(RankFailed, match=REFUSED):
        run(1, lambda comm: Zero3(how(GPT(SMALL), "aot_eager"), comm))


@pytest.mark.slow
@pytest.mark.parametrize("how", LATE.values(), ids=LATE)
def test_what_is_compiled_after_wrapping_is_refused_in_the_next_forward(how):
    with pytest.raises(RankFailed, match=REFUSED):
        run_one(Zero3, between=how)


def test_a_compiled_part_of_a_unit_and_a_module_that_is_one_unit_are_let_through():
    def wrap(comm):
        module = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        module[0].compile(backend="eager")
        Zero3(nn.Sequential(module, nn.Tanh()), comm, units=[module])
        Zero3(torch.compile(nn.Linear(2, 2), backend="eager"), comm, units=[])

    run(1, wrap)
