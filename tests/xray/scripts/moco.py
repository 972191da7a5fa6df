"""MoCo: an encoder, a slow copy of it, and a queue of keys that is a buffer."""

import torch
from gpt import training
from torch import nn
from torch.nn import functional as F


class MoCo(nn.Module):
    def __init__(self, dim=64, K=1024, m=0.999, T=0.07):
        super().__init__()
        self.m, self.T, self.ptr = m, T, 0
        self.encoder_q, self.encoder_k = self.encoder(dim), self.encoder(dim)
        self.encoder_k.load_state_dict(self.encoder_q.state_dict())
        self.encoder_k.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(dim, K), dim=0))

    def encoder(self, dim):
        return nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(3600, dim))

    def forward(self, im_q, im_k):
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            for slow, fast in zip(self.encoder_k.parameters(), self.encoder_q.parameters()):
                slow.data = slow.data * self.m + fast.data * (1.0 - self.m)
            k = F.normalize(self.encoder_k(im_k), dim=1)
        l_pos = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
        logits = torch.cat([l_pos, l_neg], dim=1) / self.T
        self.queue[:, self.ptr : self.ptr + k.shape[0]] = k.T
        self.ptr = (self.ptr + k.shape[0]) % self.queue.shape[1]
        return logits, torch.zeros(logits.shape[0], dtype=torch.long).cuda()


def make():
    torch.cuda.set_device(0)
    model = MoCo().cuda(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.03, momentum=0.9, weight_decay=1e-4)
    images = torch.zeros(2, 32, 3, 32, 32)
    return training(model, optimizer, lambda: F.cross_entropy(*model(*images.cuda(0, non_blocking=True))))
