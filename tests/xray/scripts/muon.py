"""Muon for matrices and AdamW for the rest, in DataParallel; and a script whose optimizers step inside of backward."""

import torch
from gpt import GPT
from torch import nn


def zeropower(G, steps=5):
    X = G.bfloat16() / (G.norm() + 1e-7)
    for _ in range(steps):
        A = X @ X.T
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                buf = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buf.lerp_(p.grad, 1 - group["momentum"])
                p.add_(zeropower(p.grad.lerp(buf, group["momentum"])), alpha=-group["lr"])


def muon():
    model = nn.DataParallel(GPT()).to("cuda")
    matrices = [p for p in model.module.blocks.parameters() if p.ndim == 2]
    optimizers = [Muon(matrices), torch.optim.AdamW([*{*model.parameters()} - {*matrices}])]

    def step():
        _, loss = model(*torch.randint(512, (2, 4, 64), device="cuda"))
        loss.mean().backward()
        [optimizer.step() for optimizer in optimizers]
        model.zero_grad()

    return model, step


def in_backward():
    model = GPT().cuda()
    optimizers = {p: torch.optim.Adam([p]) for p in model.parameters()}

    def hook(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)

    return model, lambda: model(*torch.randint(512, (2, 4, 64), device="cuda"))[1].backward()
