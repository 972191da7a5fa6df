"""SAM: two forwards and backwards a step, the first of which moves the weights uphill."""

import torch
from torch import nn
from torch.nn import functional as F


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)

    @torch.no_grad()
    def first_step(self):
        norms = [p.grad.norm(2) for group in self.param_groups for p in group["params"]]
        scale = self.param_groups[0]["rho"] / (torch.stack(norms).norm(2) + 1e-12)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale.to(p))

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()


def make():
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(28800, 10)).cuda()
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)

    def step():
        inputs, targets = (b.cuda() for b in (torch.zeros(32, 3, 32, 32), torch.zeros(32, dtype=torch.long)))
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.first_step()
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.second_step()
        optimizer.zero_grad()

    return model, step
