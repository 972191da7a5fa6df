"""A training step under a plan, watched: the loop of any training script, once with numbers or without.

Nothing here knows whether its tensors are fake. So a test runs it on real tensors, and expects the same bytes.

The loop: the batch is made, micro-batch by micro-batch the loss and its backward, the optimizer's step, zero_grad. It
keeps of the model's output only the loss.

A first step comes before the one that is shown: the optimizer's states exist from then on, and stage 3 has learned what
to prefetch. If it is known which parameters get a gradient, `trained`, an optimizer's step on zeros does as well, where
nothing is to be learned.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from minizero.engines.engine import Engine
from minizero.memory import Ledger
from minizero.memory.tape import at_peak
from minizero.ranks.comm import Comm
from minizero.xray.plan import Plan

Optimizer = Callable[[Any], torch.optim.Optimizer]


@dataclasses.dataclass(frozen=True)
class Result:
    """The figures of one step. peak: as the ledger's; parts: by category, at the joint peak; sent: by this rank."""

    peak: dict[str, int]
    parts: dict[str, int]
    sent: int


@dataclasses.dataclass(frozen=True)
class Measured:
    """One step: its ledger, whose tape is long, the bytes that this rank sent, and which parameters got a gradient."""

    ledger: Ledger
    sent: int
    trained: frozenset[int]

    def result(self) -> Result:
        """What is kept once the tape is dropped."""
        return Result(self.ledger.peak, dict(at_peak(self.ledger.tape, self.ledger.start).totals), self.sent)


def measure(
    module: nn.Module,
    inputs: Any,
    plan: Plan,
    optimizer: Optimizer,
    comm: Comm,
    ledger_type: type[Ledger] = Ledger,
    trained: frozenset[int] | None = None,
) -> Measured:
    """Train `module`, which is changed, under `plan` as one rank of `comm`. inputs: this rank's batch."""
    model = plan.wrap(module.train(), comm)
    states = plan.optimizer(optimizer, model)
    with ledger_type(model, states) as ledger, plan.around_the_steps():
        if trained is None or plan.learns:
            trained = step(model, states, inputs, plan)
        else:
            step_on_zeros(model, states, trained)
        ledger.reset()
        before = comm.bytes_sent
        step(model, states, inputs, plan)
    return Measured(ledger, comm.bytes_sent - before, trained)


def step_on_zeros(model: nn.Module, optimizer: torch.optim.Optimizer, trained: frozenset[int]) -> None:
    """The optimizer's states begin to exist. An engine's shards all have a gradient."""
    for number, parameter in enumerate(model.parameters()):
        if parameter.requires_grad and (isinstance(model, Engine) or number in trained):
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Any, plan: Plan) -> frozenset[int]:
    """One step of training; returns the numbers of the parameters that got a gradient."""
    batch = tree_map_only(Tensor, torch.clone, inputs)  # a new one, as from a data loader
    for number in range(plan.micro_batches):
        last = number == plan.micro_batches - 1
        with model.no_sync() if isinstance(model, Engine) and not last else contextlib.nullcontext():
            loss = loss_of(model, cut(batch, plan.micro_batches, number))
            (loss if plan.micro_batches == 1 else loss / plan.micro_batches).backward()
    optimizer.step()
    trained = frozenset(n for n, parameter in enumerate(model.parameters()) if parameter.grad is not None)
    optimizer.zero_grad()
    return trained


def loss_of(model: nn.Module, inputs: Any) -> Tensor:
    """The loss of a model that is called as its user calls it.

    inputs: keyword arguments in a dict, or arguments in a tuple or list, or one tensor. The model returns the loss, or
    something with `.loss`, or a tuple or dict with one number in it. `ValueError` if there is no one number.
    """
    if isinstance(inputs, Mapping):
        output = model(**inputs)
    else:
        output = model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)
    if isinstance(loss := getattr(output, "loss", output), Tensor) and loss.numel() == 1:
        return loss
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    numbers = [part for part in parts if isinstance(part, Tensor) and part.dim() == 0]
    if len(numbers) != 1:
        kind = f"tensor of shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(
            f"xray: the model returned a {kind}, which has no loss, a tensor with one number: give inputs with which "
            "it returns the loss (Hugging Face's models want labels=…), or a module around it that does"
        )
    return numbers[0]


def tensors_of(inputs: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    return (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))


def batch_size(inputs: Any) -> int:
    """How many samples a batch has: the first tensor's first dimension. 0 if there is none."""
    return next((tensor.shape[0] for tensor in tensors_of(inputs) if tensor.dim()), 0)


def cut(batch: Any, pieces: int, number: int) -> Any:
    """Piece `number` of a batch: a part of each tensor whose first dimension counts samples, and all else whole."""
    size = batch_size(batch)

    def part(tensor: Tensor) -> Tensor:
        counts = tensor.dim() and tensor.shape[0] == size
        return tensor[number * size // pieces : (number + 1) * size // pieces] if counts else tensor

    return tree_map_only(Tensor, part, batch) if pieces > 1 else batch
