"""What a small GPT holds and sends in training, by stage, as the ledger measures it."""

import contextlib

import torch

from minizero import GPT, GPTConfig
from minizero.memory import Ledger

CONFIG = GPTConfig(vocabulary=64, sequence_length=8, width=160, layers=4, heads=2)  # 1.2 million parameters
TOTAL = sum(p.numel() for p in GPT(CONFIG).parameters())
BLOCK = sum(p.numel() for p in GPT(CONFIG).blocks[0].parameters())
ROOT = TOTAL - CONFIG.layers * BLOCK


def measure(comm, stage, dtype=None, steps=2, config=CONFIG):
    """Of the last step: bytes before zero_grad, the curve, bytes sent in all, and across groups."""
    model = stage(GPT(config), comm, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.zeros(1, config.sequence_length, dtype=torch.long)
    # Two ranks are enough to look at: a ledger in every thread makes them queue up for the interpreter.
    watched = comm.rank in (0, comm.size - 1)
    counted = comm, getattr(model, "across", None) or comm
    for _ in range(steps):
        before = [each.bytes_sent for each in counted]
        optimizer.zero_grad()
        with Ledger(model, optimizer) if watched else contextlib.nullcontext() as ledger:
            model(tokens, tokens).backward()
            optimizer.step()
            current = ledger and ledger.current
    sent = [each.bytes_sent - number for each, number in zip(counted, before)]
    return (current, ledger.curve, *sent) if watched else None


def most(curve, category, phase):
    return max(sample[category] for sample in curve if sample.phase == phase)
