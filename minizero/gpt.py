"""A small GPT on bytes: the model that all lessons share.

Pre-norm transformer blocks with causal self-attention (Vaswani et al., 2017; Radford et al.,
2019, "GPT-2"), the embedding tied to the output. About 12 · layers · width² parameters.
"""

import dataclasses
import math

import torch
from torch import nn
from torch.nn import functional as F


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """Shapes of a GPT; the default has about 2.8 million parameters. `seed` fixes its initial values."""

    vocabulary: int = 256  # bytes
    sequence_length: int = 64
    width: int = 192
    layers: int = 6
    heads: int = 6
    seed: int = 0


class Attention(nn.Module):
    """Causal multi-head self-attention: (batch, sequence, width) to the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, width = x.shape
        qkv = self.qkv(x).view(batch, sequence, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, sequence, head dim)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        future = torch.ones(sequence, sequence, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, sequence, width))


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to the stream it reads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Next-byte prediction. `model(x)` gives logits, `model(x, y)` the mean cross-entropy in nats.

    x, y: (batch, sequence) of integers below `vocabulary`; y is -100 where there is no target.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.width % config.heads:
            raise ValueError(f"GPT: width ({config.width}) must be divisible by heads ({config.heads})")
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.sequence_length, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        # A generator of its own: ranks that are threads share torch's.
        generator = torch.Generator().manual_seed(config.seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What is added to the stream is scaled down, so that depth does not widen it (GPT-2).
                added = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(
                    parameter, std=0.02 / math.sqrt(2 * config.layers) if added else 0.02, generator=generator
                )
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        if x.shape[1] > self.config.sequence_length:
            raise ValueError(
                f"GPT: a sequence of {x.shape[1]} does not fit: sequence_length is {self.config.sequence_length}"
            )
        stream = self.embedding(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            stream = block(stream)
        logits = self.head(self.norm(stream))
        return logits if y is None else F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), ignore_index=-100)
