"""Watches over emulated 16 bits: which values are off the format's grid, and which bytes a graph keeps."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from minizero.memory import Ledger
from precision.exact import exact, is_exact
from precision.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FloatFormat

FORMATS_OF_16_BITS = [FP16, BF16, FP8_E4M3, FP8_E5M2, FloatFormat(4, 11), FloatFormat(5, 10, saturate=True)]


def on_grid(fmt, tensor):
    with exact():
        same = fmt.quantize(tensor) == tensor
        return bool((same | tensor.isnan()).all())


class Watch(TorchDispatchMode):
    """Notes of each operator inside whether what it gave or wrote was on the grid, and when."""

    def __init__(self, fmt):
        super().__init__()
        self.fmt, self.seen = fmt, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if is_exact():  # the emulation's own
            return result
        written = [a for a, s in zip(args, func._schema.arguments) if s.alias_info and s.alias_info.is_write]
        born = [r.alias_info is None for r in func._schema.returns]
        results = result if isinstance(result, tuple | list) else [result]
        for tensor in [*written, *(r for r, new in zip(results, born * len(results)) if new)]:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and "empty" not in func.name():
                phase = "backward" if torch._C._current_graph_task_id() != -1 else "forward"
                self.seen.append((func.name(), phase, on_grid(self.fmt, tensor)))
        return result

    def wrong(self, phase):
        return {name for name, when, right in self.seen if when == phase and not right}

    def count(self, phase):
        return len({name for name, when, _ in self.seen if when == phase})


class Everything(nn.Module):
    """Operators of many kinds: convolution, norms, pooling, dropout, attention, embedding, in-place, concatenation."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.embedding, self.layer_norm = nn.Embedding(7, 12), nn.LayerNorm(12)
        self.qkv = nn.Linear(12, 36)
        self.linear = nn.Linear(12 + 4 * 9, 5)

    def forward(self, x, tokens):
        x = F.relu(self.norm(self.conv(x)), inplace=True)
        x = F.avg_pool2d(F.max_pool2d(x, 2), 3, 1, 1)[..., :3, :3].flatten(1)
        t = self.layer_norm(self.embedding(tokens))
        t = t + F.scaled_dot_product_attention(*self.qkv(t).chunk(3, -1), is_causal=True)
        t = F.dropout(F.gelu(t), 0.2, self.training).mean(1) * 0.3
        return self.linear(torch.cat([x, t.clamp_(-5, 5)], 1)).tanh()


def everything():
    torch.manual_seed(2)
    inputs = torch.randn(6, 1, 7, 7), torch.randint(7, (6, 5))
    return Everything(), inputs, torch.randint(5, (6,))


def kept_bytes(forward, context):
    """Bytes that live after a forward because its graph keeps them; what it returns is not counted."""
    with context, Ledger() as ledger:
        out = forward()
        return ledger.current["total"] - out.untyped_storage().nbytes()
