"""A case: a model, a batch and an optimizer, of which any number of steps can be run, each under another plan.

A plan that this model cannot follow raises `NotPossible`, with the reason in words and the line of the user's code.
"""

import contextlib
import dataclasses
import functools
import inspect
import os
import re
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from minizero import torch_private
from minizero.memory import Ledger
from minizero.memory.hooks import Hooks
from minizero.ranks.one_of_many import one_of_many
from minizero.xray.answers import answers
from minizero.xray.card import as_on, autocast_for_cuda, card_of
from minizero.xray.fake import ALONE, HALVES, OUTSIDE, SHARDED, SPARSE, Copier, NotPossible, build, pretend
from minizero.xray.hugging_face import notes_of
from minizero.xray.lines import is_users
from minizero.xray.places import CARD, HOST, having, place_of, put
from minizero.xray.plan import Plan, use_foreach
from minizero.xray.step import Measured, Optimizer, Result, batch_size, measure, seen_in, tensors_of

MOST = 8  # processes; each takes half a GB for a large model
WORTH_A_LINE = 2**20  # bytes on the host: an optimizer's counters of steps are fewer


class Case:
    """A model, its inputs or a step of a loop, an optimizer and a card, as `xray()` takes them. Nothing is changed."""

    def __init__(
        self, model: nn.Module, inputs: Any, optimizer: Optimizer = torch.optim.AdamW, card: str | None = None
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(f"xray: the model must be a torch.nn.Module, not {type(model).__name__}")
        self.model, self.inputs, self.make_optimizer, self.card = model, inputs, optimizer, card and card_of(card)
        self.loops = callable(inputs)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.batch_size = batch_size(inputs)
        self.found: dict[Plan, Result | str] = {}  # the figures, or why there are none
        self.notes = {*notes_of(model, inputs)}  # what is worth a sentence in the report

    def run(self, plan: Plan) -> Result:
        """The figures of a step under `plan`, run once. `NotPossible` if this model cannot follow it."""
        self.run_all([plan])
        if isinstance(found := self.found[self.as_run(plan)], str):
            raise NotPossible(found)
        return found

    def run_all(self, plans: Sequence[Plan]) -> None:
        """Run a step under each plan, several at once: a process for each core, which begins as a copy of this one.

        With a PyTorch that is built for CUDA they run here, one by one: once it has gone backwards, a copy cannot.
        """
        wanted = dict.fromkeys(self.as_run(plan) for plan in reversed(plans))  # the stacks first, which take longest
        missing = [plan for plan in wanted if plan not in self.found]
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
            worker_init_fn=torch_private.is_no_worker,
            in_order=False,  # whoever is free takes the next
            generator=torch.Generator(),  # the caller's random numbers stay as they are
        )
        screen = Console(stderr=True)
        shown = track(loader, "steps", len(missing), console=screen, transient=True) if screen.is_terminal else loader
        with ALONE, torch.device("cpu"):  # no other thread holds it; a loader draws a number, which "meta" has none of
            self.found.update(shown)

    def attempt(self, plan: Plan) -> tuple[Plan, Result | str]:
        """A plan, and the figures of a step under it, or why there are none."""
        try:
            return plan, self.measure(plan).result()
        except NotPossible as error:
            return plan, str(error)

    def as_run(self, plan: Plan) -> Plan:
        """The plan as it is run here: two rows of a table may be one step."""
        return dataclasses.replace(plan, dtype=self.masters(plan) or plan.dtype)

    def measure(self, plan: Plan, ledger_type: type[Ledger] = Ledger) -> Measured:
        """Run a step under `plan`, without numbers. `NotPossible` if this model cannot follow it."""
        try:
            if self.batch_size % plan.micro_batches:
                raise ValueError(f"{plan.micro_batches} micro-batches do not divide a batch of {self.batch_size}")
            if self.loops and plan.needs_its_loop:
                raise ValueError("it changes the loop, and make() has returned one: let it return (model, inputs)")
            plan = self.as_run(plan)
            with pretend() as mode, answers(self.card), refusing_own(OUTSIDE), contextlib.ExitStack() as stack:
                copier = Copier(mode)
                module, optimizer, inputs = copier.copy((self.model, self.make_optimizer, self.inputs))
                for tensor in (*module.parameters(), *module.buffers()) if self.masters(plan) else ():
                    tensor.data = tensor.data.float() if tensor.dtype in HALVES else tensor.data
                # A batch's tensors are cloned, but for those inside of objects: they are there all the time.
                batch = {id(tensor) for tensor in tensors_of(inputs)}
                tensors = (part for part in copier.made if isinstance(part, Tensor) and id(part) not in batch)
                others = [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
                if self.loops:  # a step may take the model
                    optimizer = [part for part in copier.made if isinstance(part, torch.optim.Optimizer)]
                    asked = inspect.signature(inputs).parameters.values()
                    wanted = sum(one.default is one.empty and one.kind < one.VAR_POSITIONAL for one in asked)
                    inputs = functools.partial(inputs, *[module] * wanted)
                mode.from_outside.copied = frozenset(copier.storages)
                stack.enter_context(having(marks=self.lay_out(plan, copier, module, inputs)))
                del copier, tensors  # a step may drop what a model keeps, such as an average in a list
                around = functools.partial(self.counting, others)
                found = measure(module, inputs, plan, optimizer, one_of_many(plan.ranks), ledger_type, around)
                self.notes.update(seen_in(found, module, self.loops) if plan == Plan() else ())
                return found
        except (Exception, SystemExit) as error:
            raise NotPossible(reason(error)) from error

    def lay_out(self, plan: Plan, copier: Copier, module: nn.Module, inputs: Any) -> bool:
        """Lay what was copied on host and card, as make() has; False if all is in one place, as for an engine."""
        if self.card is None or not any(hasattr(storage, "place") for storage in copier.storages.values()):
            return False
        if plan.stage is not None or plan.dtype is not None:
            if isinstance(plain := self.found.get(Plan()), Result) and plain.peak["host"] >= WORTH_A_LINE:
                raise ValueError("it has tensors on the host, and this row is run as if all were on the card")
            return False
        with having(marks=True):
            if not self.loops:  # the loop is ours, and brings the model and its batch to the card
                for tensor in (*module.parameters(), *module.buffers(), *tensors_of(inputs)):
                    put(tensor, CARD)
            for tensor in copier.made:
                if isinstance(tensor, Tensor) and place_of(tensor) == HOST:
                    put(tensor, HOST)
        return True

    def counting(
        self, others: list[weakref.ref], ledger: Ledger, optimizers: list[torch.optim.Optimizer]
    ) -> contextlib.AbstractContextManager:
        """The ledger counts what was copied beside model and optimizer, and in the context all is as on the card."""
        assert ledger.recorder is not None and ledger.hooks is not None
        for optimizer in optimizers:
            if optimizer is not ledger.optimizer:  # a loop's
                Hooks(ledger.recorder, None, optimizer).owner = ledger.hooks.owner
            if self.card:
                use_foreach(optimizer)
        alive = (storage for other in others for storage in [other()] if storage is not None)
        for record in map(ledger.recorder.follow, alive):  # no name may hold a storage while the steps run
            if record.category is None:
                record.category, record.module = "buffers", "not registered"
        return as_on(self.card, self.notes) if self.card else contextlib.nullcontext()

    def masters(self, plan: Plan) -> torch.dtype | None:
        """If an engine is to train a model in 16 bits, it gets FP32, and computes in this dtype."""
        halves = [parameter.dtype for parameter in self.model.parameters() if parameter.dtype in HALVES]
        return halves[0] if halves and (plan.stage is not None or plan.dtype is not None) else None

    def vocabulary(self) -> int:
        """How many words the largest embedding has; 0 if a length or a width is the same number: none can tell then."""
        tables = [part for part in self.model.modules() if isinstance(part, nn.Embedding)]
        words = max((table.num_embeddings for table in tables), default=0)
        others = {table.embedding_dim for table in tables} | {n for x in tensors_of(self.inputs) for n in x.shape}
        return 0 if words in others else words


def refusing_own(words: str) -> contextlib.AbstractContextManager:
    """Until the context ends, the step of an optimizer that nobody has copied is `NotPossible`, in this thread."""
    thread = threading.get_ident()

    def refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        if thread == threading.get_ident() and not all(isinstance(parameter, FakeTensor) for parameter in parameters):
            raise NotPossible(words)

    return register_optimizer_step_pre_hook(refuse)


def case_of(make: Callable[[], Any], optimizer: Optimizer = torch.optim.AdamW, card: str | None = None) -> Case:
    """The case that a user's `make()` describes: (model, inputs), (model, inputs, optimizer), or (model, step)."""
    try:
        with autocast_for_cuda(), answers(card and card_of(card)):
            made = build(make)
    except NotPossible:
        raise
    except (Exception, SystemExit) as error:
        raise NotPossible(f"make() failed: {reason(error)}: it runs on the CPU, without a GPU") from error
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise ValueError(
            "xray: make() must return a model and its inputs, (model, inputs), or (model, inputs, optimizer), or "
            f"(model, step), not {type(made).__name__}"
        )
    model, inputs, *own = made
    return Case(model, inputs, own[0] if own else optimizer, card)


# What PyTorch says, by parts of its text or by its type; in our words. {operator}: which one it is about.
KNOWN = {
    r"^SystemExit (\d+|SystemExit) ": "it ends the program, as sys.exit() does",
    "DataDependentOutputException": "it looks at a tensor's value ({operator}), and a fake tensor has none",
    "DynamicOutputShapeException": "a shape depends on a tensor's values ({operator}), and a fake tensor has none",
    "UnsupportedOperatorException": "{operator} has no fake kernel",
    "SparseTensorImpl": SPARSE,  # of which there is no copy without numbers
    "torch/distributed/": SHARDED,
    "Couldn't swap": "it moves a model in step(): a Trainer's train(), or .to(): move it in make(), and run one step",
    "ScriptModules": "a module of torch.jit.script is not run here: leave that call out",
    "dummy base class|not compiled with CUDA|CUDA error": "it uses a part of torch.cuda that is not answered here, "
    "such as graphs: leave that line out; or torch.set_default_device: write with torch.device('cuda'): in its place",
    "data_ptr": "a kernel that is not PyTorch's wants numbers (Triton, flash-attn, xformers): take PyTorch's attention",
    "does not require grad and": "no gradient goes from its loss to a parameter: all are frozen, or a checkpoint with "
    "use_reentrant=True has an input without one: try use_reentrant=False, or model.enable_input_require_grads()",
    "created only for scalar": "its backward() starts from a tensor that is no number: take the mean",
    "through the graph a second": "it goes back through a graph that an earlier one has freed: detach() what is kept",
    "by an inplace operation": "a tensor that backward needs is changed in place: leave out inplace=True, or clone it",
    "an empty parameter list": "its optimizer has no parameter to train",
    "not allocated yet": "it makes a tensor of others' numbers, which have none: Qwen's models of images want "
    "position_ids",
    "FlashAttention2": "flash-attn is not run here: attn_implementation='sdpa' holds the same bytes",
}


def reason(error: BaseException) -> str:
    """An error in words, and the user's line that led to it."""
    first = next(iter(str(error).splitlines()), type(error).__name__)
    frames = traceback.extract_tb(error.__traceback__)
    where = frames[-1].filename if frames and "<" not in frames[-1].filename else ""
    about = f"{type(error).__name__} {first} {where.replace(os.sep, '/')}"
    words = next((ours for parts, ours in KNOWN.items() if re.search(parts, about)), "{first}")
    words = words.format(operator=getattr(error, "func", ""), first=first)
    lines = [frame for frame in frames if is_users(frame.filename)]
    return words + (f" ({os.path.basename(lines[-1].filename)}:{lines[-1].lineno})" if lines else "")
