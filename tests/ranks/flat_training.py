"""A training script of the usual shape, flat. The table in notebooks/README.md tells what its lines stand in place of.

    torchrun --standalone --nproc-per-node 2 tests/ranks/flat_training.py FOLDER DDP Zero3 DDP:Zero3

Trains under each stage in turn; "DDP:Zero3" goes on under Zero3 from DDP's checkpoint. FOLDER/losses.json gets the
training losses of each, and the loss of the evaluation at its end.
"""

import contextlib
import json
import sys
from pathlib import Path

import torch

import minizero
from minizero import GPT, Comm, GPTConfig, all_reduce, checkpoint
from precision import DynamicLossScaler

FOLDER = Path(sys.argv[1])
STEPS, SAVE_AT, MICRO_BATCHES = 4, 2, 2
TEXT = torch.arange(4096) ** 2 % 61  # in place of a file

comm = Comm.from_process_group()
everything = {}


def batch(number):
    """Of this rank: inputs and targets, (2, 16)."""
    generator = torch.Generator().manual_seed(number * comm.size + comm.rank)
    starts = torch.randint(len(TEXT) - 17, (2, 1), generator=generator)
    tokens = TEXT[starts + torch.arange(17)]
    return tokens[:, :-1], tokens[:, 1:]


def mean(loss):
    """Over all ranks."""
    return all_reduce(loss.detach(), comm, op="mean").item()


@torch.no_grad()
def evaluate():
    """On all ranks: each has its part of the batches, and in stage 3 its part of the parameters."""
    model.eval()
    loss = mean(torch.stack([model(*batch(1000 + number)) for number in range(3)]).mean())
    model.train()
    return loss


for run in sys.argv[2:]:
    before, _, stage = run.rpartition(":")
    module = GPT(GPTConfig(64, sequence_length=16, width=32, layers=2, heads=2))
    model = getattr(minizero, stage)(module, comm, group_by=lambda name, parameter: parameter.dim() >= 2)
    matrices, others = (model.parameter_groups()[is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scaler = DynamicLossScaler(combine=lambda flag: all_reduce(flag, comm, op="max"))
    first = checkpoint.load(FOLDER / before, model, optimizer) if before else 0
    losses = []
    for step in range(first, STEPS):
        total = torch.zeros((), device=comm.device)
        for number in range(MICRO_BATCHES):
            is_last = number == MICRO_BATCHES - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = model(*batch(step * MICRO_BATCHES + number)) / MICRO_BATCHES
                scaler.scale(loss).backward()
            total += loss.detach()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(mean(total))
        if not before and step + 1 == SAVE_AT:
            checkpoint.save(FOLDER / stage, model, optimizer, step + 1)
    everything[run] = [*losses, evaluate()]

if comm.rank == 0:
    (FOLDER / "losses.json").write_text(json.dumps(everything))
