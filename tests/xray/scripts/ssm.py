"""State space models: a complex diagonal one by FFT (S4D), and one in chunks with inputs in its states (Mamba-2)."""

import torch
from gpt import training
from torch import nn
from torch.nn import functional as F


class S4D(nn.Module):
    def __init__(self, width, states=16):
        super().__init__()
        self.log_dt = nn.Parameter(torch.zeros(width))
        self.A = nn.Parameter(torch.randn(width, states, dtype=torch.cfloat))
        self.C = nn.Parameter(torch.randn(width, states, dtype=torch.cfloat))

    def forward(self, x):
        u, n = x.transpose(1, 2), x.shape[1]
        powers = (self.A * self.log_dt.exp()[:, None])[..., None] * torch.arange(n, device=u.device)
        kernel = 2 * torch.einsum("hs,hsn->hn", self.C, powers.exp()).real
        y = torch.fft.irfft(torch.fft.rfft(u, 2 * n) * torch.fft.rfft(kernel, 2 * n), 2 * n)[..., :n]
        return x + F.gelu(y).transpose(1, 2)


class SSD(nn.Module):
    def __init__(self, width, heads=4, states=16, chunk=16):
        super().__init__()
        self.heads, self.states, self.chunk = heads, states, chunk
        self.inputs = nn.Linear(width, width + 2 * states + heads)
        self.conv, self.A_log = nn.Conv1d(width, width, 4, groups=width, padding=3), nn.Parameter(torch.zeros(heads))

    def forward(self, u):
        x, B, C, dt = self.inputs(u).split([u.shape[-1], self.states, self.states, self.heads], -1)
        x = F.silu(self.conv(x.transpose(1, 2))[..., : u.shape[1]]).transpose(1, 2)
        decay = (F.softplus(dt) * -self.A_log.exp()).unflatten(1, (-1, self.chunk)).transpose(-1, -2).cumsum(-1)
        lower = torch.ones(self.chunk, self.chunk, dtype=torch.bool, device=u.device).tril()
        L = (decay[..., :, None] - decay[..., None, :]).masked_fill(~lower, -torch.inf).exp()
        x, B, C = (y.unflatten(1, (-1, self.chunk)) for y in (x, B, C))
        y = torch.einsum("bcln,bcsn,bchls,bcshp->bclhp", C, B, L, x.unflatten(-1, (self.heads, -1)))
        return u + y.flatten(3).flatten(1, 2)


def make():
    model = nn.Sequential(nn.Embedding(100, 64), S4D(64), SSD(64), nn.Linear(64, 100)).to("cuda")
    tokens = torch.zeros(4, 64, dtype=torch.long, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return training(model, optimizer, lambda: F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))
