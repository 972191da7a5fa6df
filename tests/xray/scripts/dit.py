"""DDPM with a small DiT: noise at a random time, an average of the weights, images on the host."""

import copy

import torch
from gpt import training
from torch import nn


class DiTBlock(nn.Sequential):
    def __init__(self, width):
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulate = nn.Sequential(nn.SiLU(), nn.Linear(width, 3 * width))

    def forward(self, x, c):
        shift, scale, gate = self.modulate(c)[:, None].chunk(3, -1)
        y = self.norm(x) * (1 + scale) + shift
        return x + gate * self[2](self[1](self[0](y)))


class DiT(nn.Module):
    def __init__(self, width=128, steps=1000):
        super().__init__()
        self.patch, self.time = nn.Conv2d(3, width, 4, 4), nn.Embedding(steps, width)
        self.blocks = nn.ModuleList(DiTBlock(width) for _ in range(3))
        self.out = nn.ConvTranspose2d(width, 3, 4, 4)
        self.register_buffer("alpha_bar", torch.cumprod(1 - torch.linspace(1e-4, 0.02, steps), 0))

    def forward(self, x, t):
        h = self.patch(x)
        y, c = h.flatten(2).transpose(1, 2), self.time(t)
        for block in self.blocks:
            y = block(y, c)
        return self.out(y.transpose(1, 2).reshape(h.shape))


model = DiT().to("cuda")
ema = copy.deepcopy(model).requires_grad_(False)
dataset = torch.zeros(2000, 3, 32, 32)  # stays on the host


def loss():
    x = dataset[torch.randint(len(dataset), (16,))].to("cuda")
    t = torch.randint(1000, (x.shape[0],), device=x.device)
    noise = torch.randn_like(x)
    a = model.alpha_bar[t][:, None, None, None]
    return (model(a.sqrt() * x + (1 - a).sqrt() * noise, t) - noise).square().mean()


@torch.no_grad()
def update():
    for slow, fast in zip(ema.parameters(), model.parameters()):
        slow.lerp_(fast, 0.001)


def make():
    return training(model, torch.optim.AdamW(model.parameters(), lr=1e-4), loss, update)
