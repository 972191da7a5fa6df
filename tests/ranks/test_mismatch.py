"""Training in which one rank, `odd`, does something else than the others, or all do something wrong.

An error names it, on every rank, and soon. Collectives that do not fit each other: `failures.DISAGREE`.
"""

import contextlib
import random
import re
import time

import pytest
import torch
import torch._dynamo  # noqa: F401  the first optimizer of a process imports it, which takes seconds
from torch import nn

from minizero import DDP, World, Zero1, Zero2, Zero3, all_reduce, checkpoint
from minizero.accumulate import accumulate
from minizero.ranks.errors import CollectiveMismatch, CommTimeout
from tests.support.failures import SOON, failure_of
from tests.support.helpers import STAGES
from tests.support.small_models import Blocks

PATIENCE = 1.0  # where ranks wait for each other in vain; nobody else may take a busy machine's pause for that
MISMATCH, LATE, BAD, OWN = {CollectiveMismatch}, {CommTimeout}, {ValueError}, {ArithmeticError}
SHARDED = (Zero1, Zero2, Zero3)


class Model(Blocks):
    def forward(self, x, order=(0, 1, 2)):
        return super().forward(x, order).square().mean()


def raises(*_):
    raise ArithmeticError("on purpose")


# What the odd rank builds: another model, or one that is changed, or with other options of the engine.
CHANGES = {
    "width": lambda model: setattr(model, "out", nn.Linear(7, 2)),
    "depth": lambda model: model.blocks.append(nn.Sequential(nn.Linear(7, 5))),
    "name": lambda model: setattr(model, "layers", model._modules.pop("blocks")),
    "another layout": lambda model: vars(model.out).update(_parameters=dict(reversed(model.out._parameters.items()))),
    "frozen": lambda model: model.blocks[1].requires_grad_(False),
}
OPTIONS = {"dtype": {"dtype": torch.bfloat16}, "units": {"units": []}, "factor": {"sharding_factor": 1}}
OPTIONS |= {"resharding": {"reshard_after_forward": False}}
ALL_BUILD = {"bad factor": {"sharding_factor": 0}, "bad dtype": {"dtype": torch.float64}}
# What the odd rank does between a backward and its step.
DOES = {
    "raises between": raises,
    "late": lambda *_: time.sleep(3 * PATIENCE),
    "one forward more": lambda model, _: model(torch.ones(2, 7)),
    "clips alone": lambda model, _: model.clip_grad_norm_(1.0),
    "asks for the state alone": lambda model, _: model.gather_state_dict(),
    "saves alone": lambda model, optimizer: checkpoint.save("/dev/null/no-such-folder", model, optimizer, 1),
}
# What all do there, the odd rank (me) with something else.
ALL_DO = {
    "no micro-batch": lambda model, me: accumulate(
        model, [] if me else [(torch.ones(2, 7), torch.zeros(2, dtype=torch.long))]
    ),
    "another state": lambda model, me: model.load_full_state_dict(
        {name: tensor for name, tensor in model.gather_state_dict().items() if not me}
    ),
}
FAULTS = {  # in which stages, and the first error that it may lead to
    **dict.fromkeys(("width", "depth", "name", "another layout", "frozen", "dtype", "stage"), (STAGES, MISMATCH)),
    **dict.fromkeys(("one step more", "one step fewer", "holds back alone", "saves alone"), (STAGES, MISMATCH)),
    **dict.fromkeys(("units", "clips alone", "asks for the state alone"), (SHARDED, MISMATCH)),
    **dict.fromkeys(("resharding", "one forward more", "another order"), ((Zero3,), MISMATCH)),
    **dict.fromkeys(("raises in backward", "raises between"), (STAGES, OWN)),
    **dict.fromkeys(("bad dtype", "no micro-batch", "another state"), (STAGES, BAD)),
    "factor": ((Zero3,), MISMATCH | BAD),
    "bad factor": ((Zero3,), BAD),
    "features": (STAGES, {RuntimeError}),  # torch's own: "mat1 and mat2 shapes cannot be multiplied"
    "returns": (STAGES, {RuntimeError}),  # "rank 1 returned while rank 0 was waiting in …"
    "late": (STAGES, LATE),
}


def train(comm, fault, stage, odd, at, prefetch):
    """Three steps, that go wrong in step `at`, or before the first."""
    me = comm.rank == odd
    built = fault if me else ""
    module, options = Model(CHANGES.get(built)), OPTIONS.get(built, {}) | ALL_BUILD.get(fault, {})
    if fault == "stage" and me:
        stage = {DDP: Zero1, Zero1: Zero3, Zero2: DDP, Zero3: Zero2}[stage]
    model = stage(module, comm, **options, **({"prefetch": prefetch} if stage is Zero3 else {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        wrong = fault if me and step == at else ""
        if wrong == "returns":
            return
        if wrong == "one step fewer":
            continue
        for _ in range(2 if wrong == "one step more" else 1):
            x = torch.ones(2, 5 if wrong == "features" else 7)
            loss = model(x, order=(1, 0, 2) if wrong == "another order" else (0, 1, 2))
            if wrong == "raises in backward":
                loss.register_hook(raises)
            with model.no_sync() if wrong == "holds back alone" else contextlib.nullcontext():
                loss.backward()
        if wrong in DOES:
            DOES[wrong](model, optimizer)
        if fault in ALL_DO and step == at:
            ALL_DO[fault](model, me)
        if wrong != "holds back alone":  # the step would be refused
            optimizer.step()
        optimizer.zero_grad()
    all_reduce(torch.ones(7), comm, label="the end")  # so that all see a mistake in the last step


@pytest.mark.parametrize(
    "count",
    [pytest.param(1, marks=pytest.mark.slow), pytest.param(80, marks=[pytest.mark.soak, pytest.mark.timeout(7200)])],
)
def test_random_mistakes_of_each_kind_end_in_a_named_error(count):
    draw = random.Random(seed := 0 if count == 1 else random.randrange(2**32))
    for fault, (stages, causes) in count * [*FAULTS.items()]:
        size, stage = draw.randint(2, 4), draw.choice(stages)
        # With another order, what is gathered ahead may happen to be what the others gather.
        odd, at, prefetch = draw.randrange(size), draw.randrange(3), draw.randrange(3) * (fault != "another order")
        if causes is MISMATCH and stage is Zero3 and prefetch:  # one may wait for a gather, another for a reduction
            causes = MISMATCH | LATE
        arguments = fault, stage, odd, at, prefetch
        print(seed, size, arguments)  # pytest shows the last one if it fails
        failed = failure_of(World(size, "cpu", PATIENCE if CommTimeout in causes else 2 * SOON), train, *arguments)
        cause = failed.__cause__
        assert type(cause) in causes, repr(cause)
        if type(cause) is RuntimeError:
            assert re.search(r"rank \d returned while rank \d was waiting in|shapes cannot be multiplied", str(cause))
        if type(cause) is not ValueError:  # which may be every rank's
            assert f"rank {odd}" in str(failed), failed
