"""A small GPT and a loop, which several scripts beside it use, as their authors import their own from model.py."""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, n, width = x.shape
        q, k, v = (y.view(b, n, self.heads, -1).transpose(1, 2) for y in self.qkv(self.ln_1(x)).split(width, 2))
        mask = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()
        scores = (q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5).masked_fill(~mask, float("-inf"))
        x = x + self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, width))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, words=512, length=64, width=64, layers=2, heads=4):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln_f(x))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


def training(model, optimizer, loss_of, after=lambda: None):
    """What make() returns: the model, and a step of the loop."""

    def step():
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()
        after()

    return model, step
