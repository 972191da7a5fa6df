"""SAM: two forwards and backwards a step, the first of which moves the weights uphill."""

import torch
from torch import nn
from torch.nn import functional as F


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.params = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def first_step(self):
        scale = self.defaults["rho"] / (torch.stack([p.grad.norm(2) for p in self.params]).norm(2) + 1e-12)
        for p in self.params:
            self.state[p]["old_p"] = p.data.clone()
            p.add_(p.grad * scale.to(p))

    @torch.no_grad()
    def second_step(self):
        for p in self.params:
            p.data = self.state[p]["old_p"]
        self.base_optimizer.step()


def make():
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(28800, 10)).cuda()
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)

    def step():
        inputs, targets = (b.cuda() for b in (torch.zeros(32, 3, 32, 32), torch.zeros(32, dtype=torch.long)))
        for half in (optimizer.first_step, optimizer.second_step):
            F.cross_entropy(model(inputs), targets).backward()
            half()
            optimizer.zero_grad()

    return model, step
