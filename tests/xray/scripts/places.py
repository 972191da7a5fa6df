"""Loops that keep something on the host: a data set, an average, masters, what autograd saves; and steps in time."""

import functools

import torch
from torch import nn


def net(wide=2048):
    return nn.Sequential(nn.Linear(512, wide), nn.GELU(), nn.Linear(wide, 512)).to("cuda")


def training(model=None, masters=None, batch=None, every=1, after=lambda loss: None, rows=256):
    """What make() returns: a model, and a step of a loop with what is left on the host."""
    model, calls = model or net(), []
    batch = batch or functools.partial(torch.zeros, rows, 512, device="cuda")
    optimizer = torch.optim.AdamW(masters or model.parameters())

    def step():
        x = batch().to("cuda", non_blocking=True)
        (loss := (model(x) - x).pow(2).mean()).backward()
        calls.append(1)
        for master, parameter in zip(masters or (), model.parameters()):
            master.grad, parameter.grad = parameter.grad.cpu(), None
        if len(calls) % every == 0:
            optimizer.step()
            optimizer.zero_grad()
        after(loss)

    return model, step


def data_set():
    rows = torch.zeros(524288, 512).pin_memory()
    return training(batch=lambda: rows[:256])


def average():
    model = net()
    slow = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}

    def after(loss):
        for name, value in model.state_dict().items():
            slow[name].lerp_(value.detach().cpu(), 0.01)

    return training(model, after=after)


def masters():
    model = net()
    host = [parameter.detach().cpu().clone().requires_grad_() for parameter in model.parameters()]

    @torch.no_grad()
    def update(loss):
        for master, parameter in zip(host, model.parameters()):
            parameter.copy_(master)

    return training(model, masters=host, after=update)


class Away(nn.Sequential):
    def forward(self, x):
        with torch.autograd.graph.save_on_cpu():
            return super().forward(x)


def kept(kind=nn.Sequential):
    return training(kind(*(net() for _ in range(4))), rows=4096)


saved, every_third = functools.partial(kept, Away), functools.partial(training, every=3)
