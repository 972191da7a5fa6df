"""A small network in 16 bits, and a backward of it on random vectors."""

import torch
from torch import nn


def network(dtype=torch.float16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).to(dtype)


def batch(step, dtype=torch.float16):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(32, 6, generator=generator).to(dtype)
    return x, x.float().square().sum(1, keepdim=True)


def backward(model, step):
    x, y = batch(step, next(model.parameters()).dtype)
    loss = (model(x).float() - y).square().mean()
    loss.backward()
    return loss
