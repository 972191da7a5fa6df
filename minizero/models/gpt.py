"""A small GPT on bytes: the model that all lessons share.

    stream = embedding(byte) + position
    stream = stream + attention(norm(stream))       in each block: pre-norm, causal
    stream = stream + perceptron(norm(stream))
    logits = embedding · norm(stream)               one matrix, at both ends

About 12 · layers · width² parameters; no biases. Vaswani et al., 2017; Radford et al., 2019, "GPT-2".
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from minizero.recompute import checkpoint, checkpoint_selective, keep_matmuls

ATTENTIONS = ("naive", "reference", "tiled", "flash")
RECOMPUTE: dict[str, Callable[..., torch.Tensor]] = {
    "none": lambda block, *arguments: block(*arguments),
    "selective": functools.partial(checkpoint_selective, keep_matmuls),
    "full": checkpoint,
}


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """Shapes of a GPT. The default has about 3.2 million parameters. `seed` fixes its initial values.

    attention: "naive" holds the scores, "flash" and "tiled" do not, "reference" is the textbook's; see `flash`.
    recompute: "full" keeps of each block only the input, "selective" its matrix products too; see `recompute`.
    """

    vocabulary: int = 256  # bytes
    sequence_length: int = 64
    width: int = 256
    layers: int = 4
    heads: int = 4
    seed: int = 0
    attention: str = "naive"
    recompute: str = "none"

    def count_parameters(self) -> tuple[int, int]:
        """How many parameters the GPT has, and how many of them lie outside its blocks. It is not built for that."""
        root = (self.vocabulary + self.sequence_length + 1) * self.width
        return root + self.layers * (12 * self.width**2 + 2 * self.width), root


def flash_function(name: str) -> Callable[..., torch.Tensor]:
    """One of `flash`'s attentions. Raises `ValueError` if there is none of that name."""
    import flash  # only when it is asked for: the package changes how Triton starts

    names = {"reference": "attention_reference", "tiled": "attention_tiled", "flash": "flash_attention"}
    if name not in names:
        raise ValueError(f"GPT: attention is {name!r}; expected one of {', '.join(ATTENTIONS)}")
    return getattr(flash, names[name])


class Attention(nn.Module):
    """Causal multi-head self-attention: (tokens, width) to the same, tokens = batch · sequence.

    softmax(q kᵀ / √d + mask) v. `mask`, (sequence, sequence), is -inf on what lies in the future and 0 elsewhere.
    The attentions of `flash` need no mask: for them it is empty, (sequence, 0), and tells the length only.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.from_flash = None if config.attention == "naive" else flash_function(config.attention)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        (tokens, width), sequence = x.shape, mask.shape[0]
        head_dim = width // self.heads
        qkv = self.qkv(x).view(-1, sequence, 3, self.heads, head_dim).permute(2, 0, 3, 1, 4)
        if self.from_flash is not None:
            heads = self.from_flash(*qkv, causal=True)
            return self.out(heads.transpose(1, 2).reshape(tokens, width))
        q, k, v = qkv.reshape(3, -1, sequence, head_dim)  # each (batch · heads, sequence, head dim)
        weights = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=1 / math.sqrt(head_dim)).softmax(-1)
        heads = torch.bmm(weights, v).view(-1, self.heads, sequence, head_dim)
        return self.out(heads.transpose(1, 2).reshape(tokens, width))


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to the stream it reads: (tokens, width)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, bias=False)
        self.norm2 = nn.LayerNorm(config.width, bias=False)
        self.attention = Attention(config)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), mask)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Predicts the next byte. `model(x)` gives logits, `model(x, y)` the mean cross-entropy in nats.

    x, y: (batch, sequence) of integers below `vocabulary`. A y of -100 is no target.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.width % config.heads:
            raise ValueError(f"GPT: width ({config.width}) must be divisible by heads ({config.heads})")
        if config.recompute not in RECOMPUTE:
            raise ValueError(f"GPT: recompute is {config.recompute!r}; expected one of {', '.join(RECOMPUTE)}")
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.sequence_length, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        # A generator of its own: torch's goes on as if there were no model.
        generator = torch.Generator().manual_seed(config.seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Each block adds to the stream twice. These matrices begin smaller, or depth would widen it (GPT-2).
                adds_to_stream = name.endswith(("out.weight", "down.weight"))
                std = 0.02 / math.sqrt(2 * config.layers) if adds_to_stream else 0.02
                nn.init.normal_(parameter, std=std, generator=generator)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        batch, sequence = x.shape
        if sequence > self.config.sequence_length:
            raise ValueError(
                f"GPT: a sequence of {sequence} does not fit: sequence_length is {self.config.sequence_length}"
            )
        stream = (self.embedding(x) + self.positions.weight[:sequence]).flatten(0, 1)
        keys = sequence if self.config.attention == "naive" else 0
        mask = torch.full((sequence, keys), float("-inf"), dtype=stream.dtype, device=x.device).triu(1)
        for block in self.blocks:
            stream = RECOMPUTE[self.config.recompute](block, stream, mask)
        logits = self.head(self.norm(stream))
        if y is None:
            return logits.view(batch, sequence, -1)
        return F.cross_entropy(logits.float(), y.flatten(), ignore_index=-100)
