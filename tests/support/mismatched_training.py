"""Training in which one rank, `odd`, does something else than the others, or all do something wrong.

A `Case` is such a program: `case.work(comm)` runs it on a rank. Every one of them must end, soon, in an error that says
what was wrong. Collectives that do not fit each other: `failures.DISAGREE`.
"""

import dataclasses
import random
import time
from collections.abc import Callable

import torch
import torch._dynamo  # noqa: F401  the first optimizer of a process imports it, which takes seconds
from torch import nn

from minizero import DDP, CollectiveMismatch, CommTimeout, Zero1, Zero2, Zero3, all_reduce, checkpoint
from minizero.accumulate import accumulate

LATE = 3.0  # seconds that a rank sleeps which comes too late
MISMATCH, TIMEOUT, BAD, OWN = {CollectiveMismatch}, {CommTimeout}, {ValueError}, {ArithmeticError}
RETURNED = {RuntimeError}  # "rank 1 returned while rank 0 was waiting in …"


@dataclasses.dataclass
class Case:
    """work(comm) on each rank; causes: the errors that may be the first; leaves: the odd rank itself just returns."""

    name: str
    size: int
    odd: int
    work: Callable
    causes: set[type]
    leaves: bool = False

    def __repr__(self):
        return f"rank {self.odd} of {self.size}: {self.name}"


def raises(comm):
    raise ArithmeticError("on purpose")


class Model(nn.Module):
    """A root of two layers, and blocks; what can be asked for is what the odd rank builds otherwise."""

    def __init__(self, width=6, depth=3, name="blocks"):
        super().__init__()
        self.down, self.up = nn.Linear(4, width, bias=False), nn.Linear(width, 4, bias=False)
        setattr(self, name, nn.ModuleList(nn.Linear(4, 4) for _ in range(depth)))
        self.name = name

    def forward(self, x, order=None):
        x = self.up(self.down(x))
        blocks = getattr(self, self.name)
        for index in order or range(len(blocks)):
            x = blocks[index](x).tanh()
        return x.square().mean()


STAGES = (DDP, Zero1, Zero2, Zero3)
SHARDED = (Zero1, Zero2, Zero3)
# What the odd rank does, or all do, in which stages, and the first error that it may lead to.
TRAINING_FAULTS = {
    "width": (STAGES, MISMATCH),
    "depth": (STAGES, MISMATCH),
    "another layout": (STAGES, MISMATCH),  # the same sizes, in another order
    "name": (STAGES, MISMATCH),
    "frozen": (STAGES, MISMATCH),
    "dtype": (STAGES, MISMATCH),
    "units": (SHARDED, MISMATCH),
    "stage": (STAGES, MISMATCH),
    "resharding": ((Zero3,), MISMATCH),
    "factor": ((Zero3,), MISMATCH | BAD),
    "bad factor": ((Zero3,), BAD),
    "bad dtype": (STAGES, BAD),
    "one step more": (STAGES, MISMATCH),
    "one step fewer": (STAGES, MISMATCH),
    "one forward more": ((Zero3,), MISMATCH),
    "another order": ((Zero3,), MISMATCH),
    "features": (STAGES, {RuntimeError}),  # torch's own: "mat1 and mat2 shapes cannot be multiplied"
    "raises in forward": (STAGES, OWN),
    "raises in backward": (STAGES, OWN),
    "raises between": (STAGES, OWN),
    "returns": (STAGES, RETURNED),
    "late": (STAGES, TIMEOUT),
    "clips alone": (SHARDED, MISMATCH),
    "asks for the state alone": (SHARDED, MISMATCH),
    "holds back alone": (STAGES, MISMATCH),
    "saves alone": (STAGES, MISMATCH),
    "no micro-batch": (STAGES, BAD),
    "another state": (STAGES, BAD),
}


def train(comm, fault, odd, stage, at, prefetch):
    """Three steps, that go wrong in step `at`, or before the first."""
    me = comm.rank == odd
    model = wrap(comm, fault if me or fault.startswith("bad") else "", stage, at, prefetch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        wrong = fault if me and step == at else ""
        if wrong == "returns":
            return
        if wrong == "one step fewer":
            continue
        if wrong == "late":
            time.sleep(LATE)
        if wrong == "raises in forward":
            model.module.register_forward_hook(lambda *_: raises(comm))
        if wrong == "one forward more":
            model(torch.ones(2, 4))
        if fault == "no micro-batch" and step == at:
            accumulate(model, [] if me else [(torch.ones(2, 4), torch.zeros(2, dtype=torch.long))])
        for _ in range(2 if wrong == "one step more" else 1):
            x = torch.ones(2, 5 if wrong == "features" else 4)
            loss = model(x, order=(1, 0, 2) if wrong == "another order" else None)
            if wrong == "raises in backward":
                loss.register_hook(lambda _: raises(comm))
            if wrong == "holds back alone":
                with model.no_sync():
                    loss.backward()
            else:
                loss.backward()
        if wrong == "clips alone":
            model.clip_grad_norm_(1.0)
        if wrong == "asks for the state alone":
            model.gather_state_dict()
        if wrong == "saves alone":
            checkpoint.save("/dev/null/no-such-folder", model, optimizer, step)
        if wrong == "raises between":
            raises(comm)
        if wrong != "holds back alone":  # the step would be refused
            optimizer.step()
        optimizer.zero_grad()
        if fault == "another state" and step == at:
            state = model.gather_state_dict()
            model.load_full_state_dict({} if me else state)
    all_reduce(torch.ones(7), comm, label="the end")  # so that all see a mistake in the last step


def wrap(comm, fault, stage, at, prefetch):
    """The model, as this rank has it."""
    kinds = {"width": {"width": 7}, "depth": {"depth": 4}, "name": {"name": "layers"}}
    module = Model(**kinds.get(fault, {}))
    if fault == "another layout":
        module._modules = {name: module._modules[name] for name in ("up", "down", "blocks")}
    if fault == "frozen":
        module.blocks[1].requires_grad_(False)
    if fault == "stage":
        stage = {DDP: Zero1, Zero1: Zero3, Zero2: DDP, Zero3: Zero2}[stage]
    options = {
        "dtype": {"dtype": torch.bfloat16},
        "bad dtype": {"dtype": torch.float64},
        "units": {"units": []},
        "resharding": {"reshard_after_forward": False},
        "bad factor": {"sharding_factor": (0, comm.size + 1, 1.5)[at]},
        "factor": {"sharding_factor": 2 if comm.size == 4 else 1},
    }.get(fault, {})
    return stage(module, comm, **options, **({"prefetch": prefetch} if stage is Zero3 else {}))


def some_cases(count, seed=0):
    """So many random cases of each kind; with one seed the same in each process."""
    draw = random.Random(seed)
    return [training_case(draw, fault) for fault in TRAINING_FAULTS for _ in range(count)]


def training_case(draw, fault):
    size = draw.randint(2, 4)
    odd, at, prefetch = draw.randrange(size), draw.randrange(3), draw.randrange(3)
    if fault == "another order":  # what is gathered ahead may happen to be what the others gather
        prefetch = 0
    stages, causes = TRAINING_FAULTS[fault]
    stage = draw.choice(stages)
    if causes is MISMATCH and stage is Zero3 and prefetch:  # one waits for a gather, another for a reduction: two lanes
        causes = MISMATCH | TIMEOUT
    name = f"{fault} in step {at} under {stage.__name__}, prefetch={prefetch}"
    return Case(name, size, odd, lambda comm: train(comm, fault, odd, stage, at, prefetch), causes, fault == "returns")
