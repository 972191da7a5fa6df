"""A training step under a plan, watched: the loop of any training script, once with numbers or without.

Nothing here knows whether its tensors are fake. So a test runs it on real tensors, and expects the same bytes.

The loop: the batch is made, micro-batch by micro-batch the loss and its backward, the optimizer's step, zero_grad. It
keeps of the model's output only the loss. Or the user has a loop of their own, a function `step()`.

A first step comes before the one that is shown: the optimizer's states exist from then on, and stage 3 has learned what
to prefetch. A step of a user's loop may be several calls: it ends when each of its optimizers has stepped. If more is
held after it than before, a third step shows how it grows.
"""

import contextlib
import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from minizero.engines.any_model.engine import AnyModel
from minizero.memory import Ledger
from minizero.memory.tape import at_peak, moments
from minizero.ranks.comm import Comm
from minizero.xray.head import LossInChunks
from minizero.xray.plan import Plan
from minizero.xray.scores import WithoutScores

Optimizer = Callable[[Any], torch.optim.Optimizer] | torch.optim.Optimizer
MOST_CALLS = 32  # of a loop's step(), to see its optimizers step


class Result(NamedTuple):
    """The figures of one step. peak: as the ledger's; parts: by category, at the joint peak; sent: by this rank."""

    peak: dict[str, int]
    parts: dict[str, int]
    sent: int


class Measured(NamedTuple):
    """One step: its ledger, whose tape is long, and the bytes that this rank sent.

    calls: of a loop's step(), until its optimizers have stepped; 0 if one does not. grown: bytes that are held more
    after this step than before it; if a loop's grows, as after the one before. idle: the identities of parameters that
    no step has found with a gradient.
    """

    ledger: Ledger
    calls: int
    sent: int
    grown: int
    idle: set[int]

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
    around: Callable[[Ledger, Any], contextlib.AbstractContextManager] = lambda *_: contextlib.nullcontext(),
) -> Measured:
    """Train `module`, which is changed, under `plan` as one rank of `comm`.

    inputs: this rank's batch, or a function that runs a step of a loop; then `optimizer` is a list of the loop's.
    around: what else holds while the steps run, by the ledger and the optimizers.
    """
    loops = callable(inputs)
    model = plan.wrap(module if loops else module.train(), comm)  # a loop has a mode of its own
    states: Any = None if loops else plan.optimizer(optimizer, model)
    optimizers: Any = optimizer if loops else [states]
    call = inputs if loops else functools.partial(step, model, states, inputs, plan)
    techniques = [LossInChunks()] * plan.chunked_loss + [WithoutScores()] * plan.flash  # a first step teaches them
    waiting: list[set[int]] = []  # the parameters of each optimizer that has to step

    def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        done = parameters_of(optimizer)
        waiting[:] = [parameters for parameters in waiting if not parameters <= done]  # one may be around another
        idle.difference_update(parameters_of(optimizer, with_gradient=True))

    with ledger_type(model, states) as ledger, around(ledger, optimizers), contextlib.ExitStack() as stack:
        for technique in techniques:
            stack.enter_context(technique)
        idle = set[int]().union(*map(parameters_of, optimizers))
        for each in optimizers:
            each.register_step_pre_hook(stepped)

        def again() -> Measured:
            """A step: a call, and more until each optimizer has stepped."""
            ledger.reset()
            waiting[:] = map(parameters_of, optimizers)
            held, sent, calls = ledger.current["total"], comm.bytes_sent, 0
            while not calls or (waiting and calls < MOST_CALLS):
                call()
                calls += 1
            grown = ledger.current["total"] - held
            return Measured(ledger, 0 if waiting else calls, comm.bytes_sent - sent, grown, idle)

        again()
        for technique in techniques:
            if not technique.found:
                raise ValueError(technique.missing)
        found = again()
        return again() if loops and found.grown > 0 else found  # a loop may make something once in its second step


def parameters_of(optimizer: torch.optim.Optimizer, with_gradient: bool = False) -> set[int]:
    """The identities of its parameters."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return {id(parameter) for parameter in parameters if not with_gradient or parameter.grad is not None}


def seen_in(found: Measured, module: nn.Module, loops: bool) -> Iterator[str]:
    """What is worth a sentence in the steps."""
    if found.calls > 1:
        yield f"Its optimizers step once in {found.calls} calls of step(), so the step shown is {found.calls} calls."
    if not found.calls:
        yield f"One of its optimizers does not step in {MOST_CALLS} calls of step(), and has no states here."
    if loops and found.grown > 0:
        where = f", most of it from {line}" if (line := line_of_the_rest(found.ledger)) else ""
        more = f"{found.grown / 2**20:,.2f} MiB" if found.grown > 10**4 else f"{found.grown:,} bytes"
        yield f"It grows: {more} more are held after each step{where}."
    trained = {name: id(parameter) for name, parameter in module.named_parameters() if parameter.requires_grad}
    if found.calls and (lost := [name for name, number in trained.items() if number in found.idle]):
        yield (
            f"No gradient comes to {len(lost)} of {len(trained)} trained tensors, such as {lost[0]}: they are "
            "not used, or a checkpoint with use_reentrant=True has an input without a gradient."
        )


def line_of_the_rest(ledger: Ledger) -> str:
    """The line in which most of what was made in this step, and is still there, was made; "" if nobody noted lines."""
    *_, end = moments(ledger.tape, len(ledger.tape))
    older = {id(entry) for entry in ledger.tape[: ledger.start]}
    lines: Counter[str] = Counter()
    for record, held, _ in end.alive.values():
        if id(record) not in older and record.category != "host" and (birth := getattr(record, "birth", None)):
            lines[birth.line] += held
    return next((line for line, _ in lines.most_common(1)), "")


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Any, plan: Plan) -> None:
    """One step of training."""
    batch = tree_map_only(Tensor, torch.clone, inputs)  # a new one, as from a data loader
    n, size = plan.micro_batches, batch_size(batch) // plan.micro_batches
    for part in time_first(model) if n > 1 else ():
        part.register_forward_pre_hook(functools.partial(refuse_time_first, size))
    for number in range(n):
        piece = of_samples(batch, operator.itemgetter(slice(number * size, (number + 1) * size))) if n > 1 else batch
        with model.no_sync() if isinstance(model, AnyModel) and number < n - 1 else contextlib.nullcontext():
            loss = loss_of(model, piece)
            (loss / n if n > 1 else loss).backward()
    optimizer.step()
    optimizer.zero_grad()


def loss_of(model: nn.Module, inputs: Any) -> Tensor:
    """The loss of a model that is called as its user calls it.

    inputs: keyword arguments in a dict, or arguments in a tuple or list, or one tensor. The model returns the loss, or
    something with `.loss` or ["loss"], or a tuple or dict with one number in it that has a gradient. `ValueError` if
    there is no one number.
    """
    if isinstance(inputs, Mapping):
        output = model(**inputs)
    else:
        output = model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)
    named = output.get("loss", output) if isinstance(output, Mapping) else getattr(output, "loss", output)
    if isinstance(named, Tensor) and named.numel() == 1:
        return named
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    numbers = [part for part in parts if isinstance(part, Tensor) and part.numel() == 1]
    numbers = [number for number in numbers if number.requires_grad] or numbers
    if len(numbers) == 1:
        return numbers[0]
    kind = f"tensor of shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
    found = f"in which {len(numbers)} may be the loss" if numbers else "which has no loss, a tensor with one number"
    raise ValueError(
        f"xray: the model returned a {kind}, {found}: give inputs with which it returns the loss (Hugging Face's "
        "models want labels=…), or call it loss in a dict, or put a module around it that returns it"
    )


def tensors_of(inputs: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    return (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))


def batch_size(inputs: Any) -> int:
    """How many samples a batch has: the first tensor's first dimension. 0 if there is none."""
    return next((tensor.shape[0] for tensor in tensors_of(inputs) if tensor.dim()), 0)


def of_samples(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A batch with each tensor changed. `ValueError` if one does not count samples first."""
    if not (size := batch_size(batch)):
        raise ValueError("the batch cannot be cut: no tensor of it counts samples")

    def part(tensor: Tensor) -> Tensor:
        if tensor.shape[:1] == (size,):
            return change(tensor)
        if tensor.shape[:1] not in ((), (1,)):  # else it is the same for all samples
            raise ValueError(
                f"the batch cannot be cut: an input of {tuple(tensor.shape)} does not count {size} samples"
            )
        return tensor

    return tree_map_only(Tensor, part, batch)


def time_first(model: nn.Module) -> list[nn.Module]:
    """Its layers with batch_first=False: perhaps the batch counts time first, too."""
    return [part for part in model.modules() if getattr(part, "batch_first", True) is False]


def refuse_time_first(size: int, module: nn.Module, inputs: tuple[Any, ...]) -> None:
    """A hook before the forward of a layer with batch_first=False: `ValueError` if the batch was cut along time."""
    if inputs and isinstance(inputs[0], Tensor) and inputs[0].dim() == 3 and inputs[0].shape[1] != size:
        kind = type(module).__name__
        raise ValueError(f"the batch cannot be cut: {kind} has time first, and so may the inputs: try batch_first=True")
