"""What goes wrong in 16 bits, and what helps: each claim of the paper as a small training run on real images.

    gradient_histograms      where weight gradients and activation gradients lie on the exponent axis
    train_classifier         FP16 weights with FP32 masters and without them: updates are lost
    drop_gradients           a run in FP32 that loses only gradients of one range, as FP16 would
    train_batch_norm         a network whose batch norm adds in FP16, or in FP32
    train_softmax            a language model whose softmax adds in FP16, or in FP32
    bytes_moved              what the operators of a step read and write

Forward and backward are emulated in FP16 with FP32 accumulation, so that the failures are those of FP16 anywhere.
Micikevicius et al., 2018, "Mixed Precision Training", sections 3.1 and 3.2.
"""

import dataclasses

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minizero.mixed_precision.table1 import batches, loss_of, make
from minizero.models import images
from minizero.models.text import TEXT, read_text
from precision import accumulate
from precision.emulate import emulate
from precision.formats import FP16, FloatFormat
from precision.histogram import Collected, collect


def gradient_histograms(network: str = "resnet", steps: int = 60, seed: int = 0) -> Collected:
    """The exponents of weights, their gradients, their updates and activation gradients in an FP32 training run.

    network: a row of Table 1, or "gpt".
    """
    model = make(network, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with collect(model, optimizer) as found:
        for _, (x, y) in zip(range(steps), batches(network, seed)):
            loss_of(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return found


@dataclasses.dataclass(frozen=True)
class Classified:
    """What `train_classifier` finds.

    accuracy: percent of the test images. lost: the share of all updates after which the weight was as before.
    """

    accuracy: float
    lost: float


def train_classifier(masters: bool, seed: int = 0, steps: int = 300, learning_rate: float = 6e-6) -> Classified:
    """Trains two linear layers with Adam. masters: FP32 weights, rounded in use; without them the weights are FP16.

    All else is the same: gradients are FP16; the optimizer computes in FP32 and keeps its moments in FP32.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    round_weights(model)
    updates = 0  # changes that the optimizer made
    kept = 0  # those that the weights still have afterwards
    for _, (x, y) in zip(range(steps), images.batches(*images.load("train"), 64, seed)):
        with emulate(FP16):
            F.cross_entropy(model(x), y).backward()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        updates += changed(model, before)
        if not masters:
            round_weights(model)
        kept += changed(model, before)
        optimizer.zero_grad()
    x, y = images.load("test")
    with torch.no_grad(), emulate(FP16):
        correct = int((model(x).argmax(1) == y).sum())
    return Classified(100 * correct / len(y), 1 - kept / updates)


def changed(model: nn.Module, before: list[torch.Tensor]) -> int:
    """How many weights differ from what they were before."""
    return sum(int((parameter != old).sum()) for parameter, old in zip(model.parameters(), before))


@torch.no_grad()
def round_weights(model: nn.Module) -> None:
    """Makes all weights FP16 numbers, in their FP32 tensors."""
    for parameter in model.parameters():
        parameter.copy_(FP16.quantize(parameter))


def drop_gradients(model: nn.Module, low: float, high: float) -> None:
    """From now on backward makes every gradient g with low ≤ |g| < high zero: of modules' outputs, of parameters."""

    def drop(gradient: torch.Tensor) -> torch.Tensor:
        size = gradient.abs()
        return gradient.masked_fill((size >= low) & (size < high), 0.0)

    def watch(_: nn.Module, __: object, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(drop)

    for module in model.modules():
        if next(module.children(), None) is None:
            module.register_forward_hook(watch)
    for parameter in model.parameters():
        parameter.register_hook(drop)


@dataclasses.dataclass(frozen=True)
class Normed:
    """What `train_batch_norm` finds.

    losses: of each step. variance: the first channel's, as the last step computed it.
    """

    losses: list[float]
    variance: float


def train_batch_norm(accumulator: FloatFormat, steps: int = 100, seed: int = 0) -> Normed:
    """Trains linear, batch norm, ReLU, linear on pixels from 0 to 255, which batch norm is to bring to one scale.

    What batch norm reads are FP16 numbers. accumulator: what its sums, over 128 images, are rounded to. All else is
    FP32.
    """
    torch.manual_seed(seed)
    first, second = nn.Linear(784, 64), nn.Linear(64, 10)
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=1e-3)
    x, y = images.load("train")
    x = 255 * (x * images.STANDARD_DEVIATION + images.MEAN).flatten(1)
    losses, variance = [], torch.zeros(1)
    for _, (pixels, labels) in zip(range(steps), images.batches(x, y, 128, seed)):
        h = first(pixels)
        mean, variance = accumulate.batch_norm_statistics(h.detach(), accumulator)
        # The values are the accumulator's. The gradients are those of a batch norm, as far as they are finite.
        mean = h.mean(0) + (mean - h.mean(0)).detach()
        own = h.var(0, unbiased=False)
        variance = torch.where(variance.isfinite(), own + (variance - own).detach(), variance)
        loss = F.cross_entropy(second(torch.relu((h - mean) / (variance + 1e-5).sqrt())), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Normed(losses, variance[0].item())


@dataclasses.dataclass(frozen=True)
class Predicted:
    """What `train_softmax` finds, in each step.

    true: the loss in FP32. reported: the loss of the probabilities that were computed. total: what these add up to.
    """

    true: list[float]
    reported: list[float]
    total: list[float]


def train_softmax(accumulator: FloatFormat, steps: int = 15, seed: int = 0, classes: int = 4096) -> Predicted:
    """Trains a model that sees two bytes of a text and predicts the next two, as one of 4,096 classes.

    accumulator: what the softmax's sum over the classes is rounded to. The gradient is probability - target.
    """
    torch.manual_seed(seed)
    text = read_text(TEXT, 1)[: 2**20].long().view(-1, 2)
    pairs = (256 * text[:, 0] + text[:, 1]).unique(return_inverse=True)[1].clamp(max=classes - 1)
    model = nn.Sequential(nn.Embedding(classes, 64), nn.Linear(64, classes))
    nn.init.normal_(model[0].weight, std=0.02)  # type: ignore[arg-type]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    found = Predicted([], [], [])
    for _ in range(steps):
        where = torch.randint(len(pairs) - 1, (128,))
        logits, target = model(pairs[where]), F.one_hot(pairs[where + 1], classes)
        probabilities = accumulate.softmax(logits.detach(), 1, accumulator)
        logits.backward((probabilities - target) / len(where))
        optimizer.step()
        optimizer.zero_grad()
        found.true.append(F.cross_entropy(logits, pairs[where + 1]).item())
        found.reported.append(-(probabilities * target).sum(1).clamp(min=2.0**-24).log().mean().item())
        found.total.append(probabilities.sum(1).mean().item())
    return found


class _Traffic(TorchDispatchMode):
    """Adds up the bytes of all tensors that operators read and write. Views move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            moved = tree_leaves((args, kwargs, result))
            self.bytes += sum(each.nbytes for each in moved if isinstance(each, torch.Tensor))
        return result


def bytes_moved(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> int:
    """What the operators of one forward and backward read and write, in bytes, each of them by itself.

    A count, not a time: it takes nothing of caches, and nothing of operators that are fused.
    """
    with _Traffic() as traffic:
        F.cross_entropy(model(x), y).backward()
    return traffic.bytes
