"""The same training under PyTorch's DistributedDataParallel and `fully_shard`: the same losses and parameters.

Five steps of AdamW, losses relative and each parameter by ‖Δ‖/‖p‖, to 1e-6: FP32, where only the order of sums
differs. Adam's eps is 1e-4, or it would blow up gradients that are nothing but rounding.
"""

import functools
import itertools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from minizero import DDP, GPT, Zero3
from tests.support.helpers import SMALL, batch, steps
from tests.support.processes import run
from tests.support.small_models import Blocks, vectors

STEPS, LEARNING_RATE, WEIGHT_DECAY = 5, 1e-3, 0.1


class ConvNet(nn.Module):
    """Batch norm after every convolution, which therefore has no bias: its gradient would be zero but for rounding.

    Two more things would measure luck: a ReLU, at whose kink a last bit decides about a whole gradient, and norms
    whose biases start at zero, where a difference relative to the parameter says little.
    """

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.GELU())
            for a, b in ((3, 9), (9, 10), (10, 11))
        )
        self.out = nn.Linear(11, 3)
        for block in self.blocks:
            nn.init.normal_(block[1].bias, std=0.5)

    def forward(self, x, y):
        return F.mse_loss(self.out(nn.Sequential(*self.blocks)(x).mean((-1, -2))), y)


class Partial(Blocks):
    """A frozen block, one frozen in part, a block and a parameter that are never used."""

    def __init__(self):
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.blocks[2][0].weight.requires_grad_(False)
        self.blocks[2].spare = nn.Parameter(torch.ones(17))
        self.blocks.append(nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7)))

    def forward(self, x, y):
        return F.mse_loss(super().forward(x), y)


UNUSED = ("blocks.2.spare", "blocks.3.")


def rows(step):
    return vectors(step), vectors(-1 - step)[:, :1]


def images(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, 3, 8, 8, generator=generator), torch.randn(12, 3, generator=generator)


CASES = {  # model, batches, weight decay
    "GPT": (lambda: GPT(SMALL), batch, WEIGHT_DECAY),
    "conv net": (ConvNet, images, WEIGHT_DECAY),
    "frozen and unused": (Partial, rows, 0.0),
    "frozen and unused, decayed": (Partial, rows, WEIGHT_DECAY),
}
WORLD_SIZE = 4  # hybrid engines need it


def sharded(**mesh):
    def wrap(module, comm):
        ranks = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        for block in module.blocks:
            fully_shard(block, mesh=ranks)
        return fully_shard(module, mesh=ranks)

    return wrap


def replicated(module, comm):
    return DistributedDataParallel(module, find_unused_parameters=isinstance(module, Partial))


OURS = {"DDP": DDP, "Zero3": Zero3, "hybrid": functools.partial(Zero3, sharding_factor=2)}
THEIRS = {"DistributedDataParallel": replicated, "fully_shard": sharded(shard=4)}
THEIRS["hybrid fully_shard"] = sharded(replicate=2, shard=2)


def their_names(case):
    """PyTorch's hybrid engine takes the GPT's time."""
    return [name for name in THEIRS if name != "hybrid fully_shard" or case == "GPT"]


def every_case(comm):
    """(Losses, state) by (model, engine)."""
    found = {}
    for case, (make, batches, weight_decay) in CASES.items():
        torch.manual_seed(0)
        start = {name: value.clone() for name, value in make().state_dict().items()}
        found[case, "start"] = [0.0] * STEPS, start
        for name in (*OURS, *their_names(case)):
            module = make()
            module.load_state_dict(start)
            model = (OURS | THEIRS)[name](module, comm)
            optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, eps=1e-4, weight_decay=weight_decay)
            mine = lambda step, batches=batches: [part.chunk(comm.size)[comm.rank] for part in batches(step)]  # noqa: E731
            losses = steps(functools.partial(model), optimizer, range(STEPS), mine)
            state = model.gather_state_dict() if name in OURS else module.state_dict()
            full = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in state.items()}
            found[case, name] = losses, {n: p.detach().clone() for n, p in full.items()}
    return found


def difference(ours, theirs):
    """The largest relative difference of a loss, and of a tensor by name."""
    (losses, state), (their_losses, their_state) = ours, theirs
    assert state.keys() == their_state.keys() and len(losses) == len(their_losses) == STEPS
    tensors = {n: float((state[n] - p).float().norm() / p.float().norm()) for n, p in their_state.items()}
    return max(abs(a - b) / b for a, b in zip(losses, their_losses)), tensors


@pytest.mark.slow
def test_losses_and_parameters_are_those_of_pytorchs_engines(tmp_path):
    ranks = run(every_case, WORLD_SIZE, tmp_path)
    for case in CASES:
        worst_loss = worst_tensor = 0.0
        for mine, peer, (rank, found) in itertools.product(OURS, their_names(case), enumerate(ranks)):
            loss, tensors = difference(found[case, mine], found[case, peer])
            if "decayed" in case:
                decays = {name: tensors.pop(name) for name in list(tensors) if name.startswith(UNUSED)}
                check_decay(found[case, "start"][1], found[case, mine][1], found[case, peer][1], decays)
            if rank:  # a batch norm's running averages are each rank's own; ours are given back as rank 0's
                tensors = {n: d for n, d in tensors.items() if "running" not in n}
            worst_loss, worst_tensor = max(worst_loss, loss), max(worst_tensor, *tensors.values())
            assert loss < 1e-6 and max(tensors.values()) < 1e-6, f"{case}, {mine} beside {peer}, rank {rank}: {tensors}"
        _, moved = difference(ranks[0][case, "start"], ranks[0][case, "Zero3"])
        assert max(moved.values()) > 1e-2, f"{case}: nothing was trained"
        print(f"{case}: losses within {worst_loss:.1e}, parameters within {worst_tensor:.1e}")


def check_decay(start, ours, theirs, names):
    """An unused parameter has a gradient of zero here, so weight decay shrinks it; PyTorch's has none, and stays."""
    assert len(names) == 5
    for name in names:
        assert torch.equal(theirs[name], start[name])
        shrunk = start[name] * (1 - LEARNING_RATE * WEIGHT_DECAY) ** STEPS
        torch.testing.assert_close(ours[name], shrunk, rtol=1e-5, atol=0)
        assert not torch.equal(ours[name], start[name])
