"""Processes give the bits that threads give, and PyTorch's own engines the same numbers to rounding."""

import copy
import os
import tempfile

import pytest
import torch
import torch.distributed as dist
from helpers import SMALL, STAGES, batch, relative_error, run, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from minizero import GPT, Comm

STEPS = 50


def process_main(rank, world_size, folder):
    """All four stages, then PyTorch's two engines, on the same batches."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    with Comm.from_process_group() as comm:
        ours = [train(comm, stage, STEPS, eps=1e-4) for stage in STAGES]
        theirs = [train_peer(comm, name) for name in ("DDP", "fully_shard")]
    torch.save((ours, theirs), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def train_peer(comm, name):
    module = GPT(SMALL)
    if name == "DDP":
        model = DistributedDataParallel(module)
    else:
        mesh = init_device_mesh("cpu", (comm.size,))
        for block in module.blocks:
            fully_shard(block, mesh=mesh)
        model = fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    losses = []
    for step in range(STEPS):
        x, y = (part.chunk(comm.size)[comm.rank] for part in batch(step))
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in module.state_dict().items()}
    return losses, copy.deepcopy(state)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_threads_processes_and_pytorch_agree(world_size):
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(process_main, (world_size, folder), nprocs=world_size)
        processes = [torch.load(os.path.join(folder, f"{rank}.pt")) for rank in range(world_size)]
    threads = {stage: run(world_size, train, stage, STEPS, eps=1e-4) for stage in STAGES}
    for rank, (ours, theirs) in enumerate(processes):
        for stage, (losses, state, sent) in zip(STAGES, ours):
            expected = threads[stage][rank]
            assert losses == expected[0] and sent == expected[2], stage.__name__
            assert all(torch.equal(state[name], expected[1][name]) for name in expected[1]), stage.__name__
        for losses, state in theirs:
            assert max(abs(a - b) / b for a, b in zip(ours[0][0], losses)) < 1e-6
            assert relative_error(ours[0][1], state) < 1e-6
