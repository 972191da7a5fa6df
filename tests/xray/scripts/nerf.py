"""NeRF: rays from images on the host, frequencies, samples along each ray, colours composed."""

import torch
from gpt import training
from torch import nn

device = torch.device("cuda")
images = torch.zeros(20, 64, 64, 3)


def embed(x, bands=6):
    scaled = (x[..., None] * 2.0 ** torch.arange(bands, device=x.device)).flatten(-2)
    return torch.cat([x, scaled.sin(), scaled.cos()], -1)


model = nn.Sequential(nn.Linear(39, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 4)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)


def render(origins, directions):
    t = torch.linspace(2.0, 6.0, 32, device=device)
    points = origins[:, None] + directions[:, None] * t[:, None]
    raw = model(embed(points))
    alpha = 1.0 - torch.exp(-torch.relu(raw[..., 3]) * (t[1] - t[0]))
    clear = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1.0 - alpha + 1e-10], -1), -1)[:, :-1]
    return ((alpha * clear)[..., None] * torch.sigmoid(raw[..., :3])).sum(1)


def loss():
    pick = torch.randint(images.numel() // 3, (256,))
    target = images.reshape(-1, 3)[pick].to(device)
    return ((render(*torch.zeros(2, 256, 3).to(device)) - target) ** 2).mean()


def make():
    return training(model, optimizer, loss)
