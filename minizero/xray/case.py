"""A case: a model, a batch and an optimizer, of which any number of steps can be run, each under another plan.

A plan that this model cannot follow raises `NotPossible`, with the reason in words and the line of the user's code.
"""

import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from minizero.memory import Ledger
from minizero.ranks.one_of_many import one_of_many
from minizero.xray.fake import build, pretend
from minizero.xray.hugging_face import switch_caches_off
from minizero.xray.lines import is_users
from minizero.xray.plan import Plan
from minizero.xray.step import Measured, Optimizer, Result, batch_size, measure, tensors_of

MOST = 8  # processes; each takes half a GB for a large model


class NotPossible(ValueError):
    """A model that cannot be built here, or a step that cannot be run under a plan; says why."""


class Case:
    """model: real or on "meta". inputs: as `model(*inputs)` or `model(**inputs)` takes them. Neither is changed."""

    def __init__(self, model: nn.Module, inputs: Any, optimizer: Optimizer = torch.optim.AdamW) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(f"xray: the model must be a torch.nn.Module, not {type(model).__name__}")
        self.model, self.inputs, self.make_optimizer = model, inputs, optimizer
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.batch_size = batch_size(inputs)
        self.found: dict[Plan, Result | str] = {}  # the figures, or why there are none
        self.trained: frozenset[int] | None = None  # which parameters get a gradient, once a plain step has shown it

    def run(self, plan: Plan) -> Result:
        """The figures of a step under `plan`, run once. `NotPossible` if this model cannot follow it."""
        self.run_all([plan])
        if isinstance(found := self.found[plan], str):
            raise NotPossible(found)
        return found

    def run_all(self, plans: Sequence[Plan]) -> None:
        """Run a step under each plan, several at once: a process for each core, which begins as a copy of this one.

        With a PyTorch that is built for CUDA they run here, one by one: once it has gone backwards, a copy cannot.
        """
        missing = [plan for plan in reversed(plans) if plan not in self.found]  # the stacks first, which take longest
        cannot_fork = torch.backends.cuda.is_built() or torch.accelerator.is_available()
        alone = len(missing) < 2 or sys.platform != "linux" or cannot_fork
        workers = 0 if alone else min(len(missing), os.cpu_count() or 1, MOST)
        loader: DataLoader = DataLoader(
            missing,  # type: ignore[arg-type]  # a list is a data set
            batch_size=None,
            collate_fn=self.attempt,  # type: ignore[arg-type]  # of one plan, not of a list
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
            prefetch_factor=1 if workers else None,
            in_order=False,  # whoever is free takes the next
            generator=torch.Generator(),  # the caller's random numbers stay as they are
        )
        with torch.device("cpu"):  # a loader draws a number, which "meta" has none of
            self.found.update(loader)

    def attempt(self, plan: Plan) -> tuple[Plan, Result | str]:
        """A plan, and the figures of a step under it, or why there are none."""
        try:
            return plan, self.measure(plan).result()
        except NotPossible as error:
            return plan, str(error)

    def measure(self, plan: Plan, ledger_type: type[Ledger] = Ledger) -> Measured:
        """Run a step under `plan`, without numbers. `NotPossible` if this model cannot follow it."""
        try:
            if self.batch_size % plan.micro_batches:
                raise ValueError(f"{plan.micro_batches} micro-batches do not divide a batch of {self.batch_size}")
            with pretend() as mode:
                module, inputs = mode.copy(self.model), mode.copy(self.inputs)
                if plan.recompute:
                    switch_caches_off(module)
                comm = one_of_many(plan.ranks)
                found = measure(module, inputs, plan, self.make_optimizer, comm, ledger_type, self.trained)
                if plan == Plan():
                    self.trained = found.trained
                return found
        except Exception as error:
            raise NotPossible(reason(error)) from error

    def vocabulary(self) -> int:
        """How many words the largest embedding has; 0 if a length or a width is the same number: none can tell then."""
        tables = [part for part in self.model.modules() if isinstance(part, nn.Embedding)]
        words = max((table.num_embeddings for table in tables), default=0)
        others = {table.embedding_dim for table in tables} | {n for x in tensors_of(self.inputs) for n in x.shape}
        return 0 if words in others else words


def case_of(make: Callable[[], Any], optimizer: Optimizer = torch.optim.AdamW) -> Case:
    """The case that a user's `make()` describes: it returns a model and its inputs."""
    try:
        made = build(make)
    except Exception as error:
        raise NotPossible(f"make() failed: {reason(error)}: it runs on the CPU, without a GPU") from error
    if not isinstance(made, tuple) or len(made) != 2:
        raise ValueError(f"xray: make() must return a model and its inputs, (model, inputs), not {type(made).__name__}")
    return Case(*made, optimizer)


KNOWN = {
    "DataDependentOutputException": "it looks at a tensor's value ({operator}), and a fake tensor has none",
    "DynamicOutputShapeException": "a shape depends on a tensor's values ({operator}), and a fake tensor has none",
    "UnsupportedOperatorException": "{operator} has no fake kernel",
}


def reason(error: BaseException) -> str:
    """An error in words, and the user's line that led to it."""
    first = next(iter(str(error).splitlines()), type(error).__name__)
    if re.search("cpu(,| and) meta", first):  # the step trains a copy of the model
        first = "a function that the model keeps, such as a lambda, uses another module's weights: make it a method"
    words = KNOWN.get(type(error).__name__, "{first}").format(operator=getattr(error, "func", ""), first=first)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    return words + (f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else "")
