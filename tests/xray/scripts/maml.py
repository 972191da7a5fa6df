"""MAML: an inner step whose gradients are part of the graph, through torch.func.functional_call."""

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

net = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 128), nn.Linear(128, 5)).to("cuda")
meta_opt = torch.optim.Adam(net.parameters(), lr=1e-3)


def train():
    for _ in range(4):  # tasks
        x_spt, x_qry = torch.zeros(2, 25, 1, 28, 28, device="cuda")
        y = torch.arange(25, device="cuda") % 5
        fast = dict(net.named_parameters())
        for _ in range(2):
            loss = F.cross_entropy(functional_call(net, fast, (x_spt,)), y)
            grads = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
            fast = {name: value - 0.1 * grad for (name, value), grad in zip(fast.items(), grads)}
        (F.cross_entropy(functional_call(net, fast, (x_qry,)), y) / 4).backward()
    meta_opt.step()
    meta_opt.zero_grad()


def make():
    return net, train
