"""DDP and stage 3 beside PyTorch's own, in two processes of torchrun: the same losses, and the bytes of each.

The ledger is open before the model is built, so it counts what a constructor keeps: PyTorch's DDP allocates its buckets
there.
"""

import torch

from minizero import DDP, GPT, GPTConfig, Zero3
from minizero.memory import Ledger
from minizero.ranks.collectives import all_reduce
from minizero.ranks.launch import torchrun


def measure():
    """By name: `loss` of the last step; bytes `after the step`, `after zero_grad` and at the `peak`, on rank 0."""
    return torchrun(train_all, 2)[0]


def train_all(comm):
    """The program of each process."""
    torch.set_num_threads(1)
    return {name: train(comm, build) for name, build in kinds(comm, GPTConfig(width=128, layers=4)).items()}


def kinds(comm, config):
    """By name: a function that builds the wrapped model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh(comm.device.type, (comm.size,))

    def plain():
        return GPT(config).to(comm.device)

    def sharded():
        model = plain()
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    return {
        "DDP": lambda: DDP(plain(), comm),
        "PyTorch's DDP": lambda: DistributedDataParallel(plain()),
        "PyTorch's DDP, gradient_as_bucket_view": lambda: DistributedDataParallel(
            plain(), gradient_as_bucket_view=True
        ),
        "Zero3": lambda: Zero3(plain(), comm),
        "PyTorch's fully_shard": sharded,
    }


def train(comm, build, vocabulary=256, steps=3):
    """What `measure` says of one model."""
    found = {}
    with Ledger() as ledger:
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, eps=1e-4)
        for number in range(steps):
            ledger.reset()  # the peak of the last step alone
            generator = torch.Generator().manual_seed(100 * number + comm.rank)
            x, y = torch.randint(vocabulary, (2, 2, 64), generator=generator).to(comm.device)
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            found["loss"] = all_reduce(loss.detach(), comm, "mean").item()
            del x, y, loss
            found["after the step"] = ledger.current["total"]
            optimizer.zero_grad()
            found["after zero_grad"] = ledger.current["total"]
        found["peak"] = ledger.peak["total"]
    return found
