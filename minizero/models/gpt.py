"""A small GPT on bytes: the model that all lessons share.

Pre-norm transformer blocks with causal self-attention (Vaswani et al., 2017; Radford et al.,
2019, "GPT-2"), the embedding tied to the output, no biases. About 12 · layers · width² parameters.
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
    "full": checkpoint,
    "selective": functools.partial(checkpoint_selective, keep_matmuls),
}


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """Shapes of a GPT; the default has about 3.2 million parameters. `seed` fixes its initial values.

    attention: "naive" holds the scores, "flash" or "tiled" do not, "reference" is the textbook's; see `flash`.
    recompute: "full" keeps of each block its input only, "selective" its matrix products too; see `recompute`.
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
        """How many parameters the GPT has, and how many of them outside its blocks, without building it."""
        root = (self.vocabulary + self.sequence_length + 1) * self.width
        return root + self.layers * (12 * self.width**2 + 2 * self.width), root


def flash_function(name: str) -> Callable[..., torch.Tensor]:
    """One of `flash`'s attentions. `ValueError` for an unknown name."""
    import flash  # only where it is asked for: the package changes how Triton starts

    names = {"reference": "attention_reference", "tiled": "attention_tiled", "flash": "flash_attention"}
    if name not in names:
        raise ValueError(f"GPT: attention is {name!r}; expected one of {', '.join(ATTENTIONS)}")
    return getattr(flash, names[name])


class Attention(nn.Module):
    """Causal multi-head self-attention: (tokens, width) to the same, tokens = batch · sequence.

    softmax(q kᵀ / √d + mask) v, where `mask`, (sequence, sequence), is -inf on what lies in the future.
    The attentions of `flash` know the future by themselves: for them the mask is empty, (sequence, 0).
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
        self.norm1, self.norm2 = nn.LayerNorm(config.width, bias=False), nn.LayerNorm(config.width, bias=False)
        self.attention = Attention(config)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), mask)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Next-byte prediction. `model(x)` gives logits, `model(x, y)` the mean cross-entropy in nats.

    x, y: (batch, sequence) of integers below `vocabulary`; y is -100 where there is no target.
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
        # A generator of its own: ranks that are threads share torch's.
        generator = torch.Generator().manual_seed(config.seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What is added to the stream is scaled down, so that depth does not widen it (GPT-2).
                added = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(
                    parameter, std=0.02 / math.sqrt(2 * config.layers) if added else 0.02, generator=generator
                )

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
