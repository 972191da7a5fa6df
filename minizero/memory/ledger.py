"""The ledger: the bytes of the live tensors, by category, while a block of code runs.

A tensor's bytes live in its storage. The ledger is a dispatch mode: PyTorch shows it every operator of this
thread. A storage that comes out new gets a record, which is a weak reference and so tells when the storage
dies. All of it is written on one tape (tape.py), which every figure is read off later.

What an operator allocates and frees inside itself the ledger cannot see; allocators.py measures how much that is.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from minizero.memory.hooks import Hooks, common_path
from minizero.memory.operators import IN_PARTS, ONE_NEW, Watcher, dense_parts, learn, outputs_of
from minizero.memory.tape import CATEGORIES, Record, Sample, at_peak, holders, moments, peak, peak_by_phase

# What follows runs once for each operator, in about a microsecond, beside the four that PyTorch takes to come here.
current_backward = torch._C._current_graph_task_id  # -1 where no backward runs
PLAIN = {torch.Tensor, nn.Parameter}

_active = threading.local()  # .ledger: the one that watches this thread


def tag(tensor: torch.Tensor, category: str) -> None:
    """Say what a tensor's storage is for. It counts as that from its birth."""
    if category not in CATEGORIES:
        raise ValueError(f"tag: unknown category {category!r}: use one of {', '.join(CATEGORIES)}")
    storage = tensor.untyped_storage()
    if getattr(storage, "category", None) == "host":  # under offload, whatever it is for
        category = "host"
    storage.category = category  # type: ignore[attr-defined]
    if (ledger := current_ledger()) is not None:
        ledger.follow(storage).category = category


@contextlib.contextmanager
def watched_by(ledger: "Ledger | None") -> Iterator[None]:
    """What this thread tags or resizes in the block is written in the ledger of the thread that it works for."""
    _active.ledger = ledger
    try:
        yield
    finally:
        _active.ledger = None


def current_ledger() -> "Ledger | None":
    """The ledger that watches this thread."""
    return getattr(_active, "ledger", None)


class Ledger(Watcher):
    """Measures the live tensor bytes of this thread, by category, while the block runs.

    model: its parameters, gradients and buffers are known by that; a plain module or an engine.
    optimizer: its states are. Counts every tensor born inside, and of older ones the model's and
    the optimizer's. An activation was born in forward and is alive when backward begins; the rest
    is temporary. Fake tensors, and those on `meta`, count as if they were real: what a model needs that does not fit
    can be measured under PyTorch's FakeTensorMode. All figures are readable inside and afterwards.
    `RuntimeError` when another ledger watches this thread, when this one was open before, and when the
    model moves to another device; `TypeError` when `model` is no module, or `optimizer` no optimizer.
    """

    def __init__(self, model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None) -> None:
        super().__init__()
        for name, given, kind in (("model", model, nn.Module), ("optimizer", optimizer, torch.optim.Optimizer)):
            if not isinstance(given, kind | None):
                raise TypeError(f"Ledger: {name} must be a {kind.__name__}, or None, not {type(given).__name__}")
        self.model, self.optimizer = model, optimizer
        self.phase, self.module = "between", ""
        self.in_backward = self.in_step = False
        self.running = [""]  # the modules whose forward is running, the innermost last
        self.records: dict[int, Record] = {}  # by the storage's address
        self.tape: list[Any] = []
        self.start = 0  # so much of the tape is what was there before

    # What happens.

    def __enter__(self) -> "Ledger":
        if current_ledger() is not None:
            raise RuntimeError("Ledger: another ledger watches this thread already: close it first")
        if self.tape:
            raise RuntimeError("Ledger: this one was open before: make a new Ledger for each block")
        _watch_resizes()
        self.tape.append(self.phase)
        self.hooks = Hooks(self, self.model, self.optimizer)
        self.start = len(self.tape)
        _active.ledger = self
        return super().__enter__()

    def __exit__(self, kind: Any, *exception: Any) -> None:
        super().__exit__(kind, *exception)
        _active.ledger = None
        hooks = self.hooks
        hooks.remove()
        del self.hooks  # which refer to the ledger: it must not take the garbage collector to be rid of both
        # Whatever dies from now on is written on the old tape, which nobody reads, and which holds nothing.
        old, self.tape = self.tape, self.tape[:]
        old.clear()
        self.records.clear()
        if kind is None:
            hooks.check_places()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = not types or PLAIN.issuperset(types)
        if not plain:
            if any(hasattr(kind, "__tensor_flatten__") for kind in types):
                return NotImplemented  # a tensor made of tensors (DTensor): what it does with those comes by in turn
        outputs = outputs_of.get(id(func))
        if outputs is None:
            outputs = learn(func)
        if outputs is IN_PARTS:
            return self.run_in_parts(func, args, kwargs)
        if plain:
            result = func._op(*args, **kwargs) if kwargs else func._op(*args)
        else:
            result = func(*args, **kwargs or {})  # the tensors' own class says what it does
        self.tape.append(func)
        if (current_backward() != -1) is not self.in_backward:
            self._leave_backward() if self.in_backward else self._enter_backward()
        if outputs is ONE_NEW:
            self._born(result)
        elif outputs:
            results = result if isinstance(result, tuple | list) else (result,)
            for tensor, kind in zip(results, outputs if len(outputs) > 1 else outputs * len(results)):
                if kind == "new":
                    self._born(tensor)
                elif kind == "written" and self._known(storage := tensor.untyped_storage()):
                    self.resized(storage)  # but not what is older than the ledger, and only written to
        return result

    def _born(self, tensor: torch.Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
        except (AttributeError, NotImplementedError):  # it is None, or sparse
            for part in dense_parts(tensor):
                self._born(part)
            return
        known = self.records.get(storage._cdata)
        if known is None or known() is None:  # else it is an input that came back
            self._record(storage)

    def _record(self, storage: torch.UntypedStorage) -> Record:
        tape = self.tape
        record = self.records[storage._cdata] = Record(storage, tape.append)  # its death, in whatever thread
        record.first_size = record.size = storage.nbytes()
        record.category = None
        record.phase, record.module = self.phase, self.module
        tape.append(record)
        return record

    def _known(self, storage: torch.UntypedStorage) -> Record | None:
        record = self.records.get(storage._cdata)
        return record if record is not None and record() is not None else None  # else one that was at this address

    def follow(self, storage: torch.UntypedStorage) -> Record:
        """The record of a storage, made where the storage is new."""
        record = self._known(storage)
        if record is None:
            record = self._record(storage)
            record.category = getattr(storage, "category", None)
        return record

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage may be new, or have another size now."""
        record, size = self.follow(storage), storage.nbytes()
        if record.size != size:
            self.tape.append((record, size - record.size))
            record.size = size

    def claim(self, tensor: torch.Tensor, category: str, module: str) -> None:
        """A tensor belongs to a module, or to several, and counts as `category`, unless it was tagged as another."""
        for part in dense_parts(tensor):
            record = self.follow(part.untyped_storage())
            unclaimed = record.category is None or record.module == ""
            record.module = module if unclaimed else common_path(record.module, module)
            record.category = record.category or category

    # When it happens.

    def enter_phase(self, phase: str) -> None:
        """Everything that is born from now on is born in this phase."""
        self.phase = phase
        self.tape.append(phase)

    def enter_forward(self) -> None:
        """The model's forward begins; where it is recomputed that is part of the backward."""
        if current_backward() == -1:
            self.in_backward = False
            self.enter_phase("forward")

    def enter_module(self, name: str) -> None:
        """This module's forward begins, perhaps inside another's."""
        self.module = name
        self.running.append(name)

    def leave_module(self, name: str) -> None:
        """It is over, or has failed, perhaps before it began."""
        if self.running[-1] == name:
            self.running.pop()
        self.module = self.running[-1]

    def enter_step(self) -> None:
        """The optimizer's step begins."""
        self.in_step = True
        self.enter_phase("optimizer")

    def leave_step(self) -> None:
        """The optimizer's step is over."""
        self.in_step = False
        self.enter_phase("between")

    def _enter_backward(self) -> None:
        for record in list(self.records.values()):
            if record.category is None and record.phase == "forward" and record() is not None:
                record.category = "activations"
        self.in_backward = True
        self.enter_phase("backward")

    def _leave_backward(self) -> None:
        self.in_backward = False
        self.enter_phase("forward" if len(self.running) > 1 else "optimizer" if self.in_step else "between")

    # What was measured.

    def reset(self) -> None:
        """Forget the curve and the peaks so far; what is alive stays counted."""
        storages = [(record, record()) for record in list(self.records.values())]  # held, so that none dies meanwhile
        alive = [record for record, storage in storages if storage is not None]
        for record in alive:
            record.first_size = record.size
        self.tape[:] = [self.phase, *alive]
        self.start = len(self.tape)

    @property
    def current(self) -> dict[str, int]:
        """Live bytes by category, and `total`."""
        *_, last = moments(self.tape, len(self.tape))
        return last.totals

    @property
    def peak(self) -> dict[str, int]:
        """The most bytes of each category at any moment; `total` is the most of all together."""
        return peak(self.tape, self.start)

    @property
    def peak_by_phase(self) -> dict[str, dict[str, int]]:
        """The same within "forward", "backward", "optimizer" and "between"."""
        return peak_by_phase(self.tape, self.start)

    @property
    def holders(self) -> list[dict[str, Any]]:
        """Who holds what is alive when `total` is largest: rows of `module category operator phase bytes tensors`."""
        return holders(at_peak(self.tape, self.start))

    @property
    def curve(self) -> list[Sample]:
        """Bytes by category after every allocation, free and resize, since entry or the last reset."""
        return [moment.sample() for moment in moments(self.tape, self.start)]

    def summary(self) -> dict[str, Any]:
        """All of these as plain data, fit for JSON: `current`, `peak`, …, and `curve` as lists, one for each key."""
        curve = self.curve
        columns = {key: [sample[key] for sample in curve] for key in curve[0]}
        columns |= {key: [getattr(sample, key) for sample in curve] for key in ("phase", "operator", "number")}
        found = {"current": self.current, "peak": self.peak, "peak_by_phase": self.peak_by_phase}
        return found | {"holders": self.holders, "curve": columns}

    def plot(self, ax: Any = None, note: str = "not seen: scratch inside operators") -> Any:
        """Draw the curve, stacked by category, and the note; returns the matplotlib Axes.

        `allocators.describe_gap` gives a note with the size of what is not seen.
        """
        from minizero.pictures.memory import plot_curve  # matplotlib takes long to load: not in every rank

        return plot_curve(self.curve, ax, note)


_watching_resizes = False


def _watch_resizes() -> None:
    """Storages are resized behind the dispatcher's back, so the method itself has to tell."""
    global _watching_resizes
    if _watching_resizes:
        return
    _watching_resizes = True
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        if (ledger := current_ledger()) is not None:
            ledger.resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
