"""LoRA by hand, beside frozen weights of 8 bits with a scale for each row."""

import torch
from gpt import GPT, training
from torch import nn
from torch.nn import functional as F


class LoRALinear(nn.Module):
    def __init__(self, base, r=8, alpha=16):
        super().__init__()
        scale = base.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (base.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.lora_A = nn.Parameter(torch.randn(r, base.in_features) * 0.01)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))
        self.scaling = alpha / r

    def forward(self, x):
        frozen = F.linear(x, self.weight.to(x.dtype) * self.scale)
        return frozen + (x @ self.lora_A.T @ self.lora_B.T) * self.scaling


def make():
    model = GPT(width=128).requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.proj = LoRALinear(block.qkv), LoRALinear(block.proj)
    optimizer = torch.optim.AdamW([p for p in model.cuda().parameters() if p.requires_grad], lr=1e-4)

    def loss():
        ids = torch.randint(512, (4, 64)).cuda(non_blocking=True)
        return model(ids, ids)[1]

    return training(model, optimizer, loss)
