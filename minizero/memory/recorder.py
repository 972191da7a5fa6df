"""The recorder: follows each storage of a thread from birth to death, and writes every event on a tape.

    birth      an operator returns a tensor whose storage has no record yet
    resize     an operator, or `storage.resize_`, has changed its size
    death      its record, a weak reference, is called back by Python

It is a dispatch mode, as the ledger on a page is. It adds nothing up: a ledger reads the tape later.

The recorder cannot see what an operator allocates and frees inside itself: tests/memory/test_allocators.py measures it.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from minizero.memory.operators import IN_PARTS, ONE_NEW, Watcher, dense_parts, learn, outputs_of
from minizero.memory.position import Position, current_backward
from minizero.memory.tape import CATEGORIES, Record, Tape
from minizero.torch_private import storage_id

PLAIN = {torch.Tensor, nn.Parameter}
DEVICE = torch.ops.prim.device.default

_active = threading.local()  # .recorder: the one that watches this thread


def current_recorder() -> "Recorder | None":
    """The recorder that watches this thread, if one does."""
    return getattr(_active, "recorder", None)


@contextlib.contextmanager
def watched_by(recorder: "Recorder | None") -> Iterator[None]:
    """Let `recorder` hear of what this thread tags and resizes in the block: it works for the recorder's own thread.

    The recorder still does not see this thread's operators.
    """
    before, _active.recorder = current_recorder(), recorder
    try:
        yield
    finally:
        _active.recorder = before


def tag(tensor: torch.Tensor, category: str) -> None:
    """Say what a tensor's storage is for. It counts as that from its birth."""
    if category not in CATEGORIES:
        raise ValueError(f"tag: unknown category {category!r}: use one of {', '.join(CATEGORIES)}")
    storage = tensor.untyped_storage()
    if getattr(storage, "category", None) == "host":  # offloaded memory stays "host", whatever it is for
        category = "host"
    storage.category = category  # type: ignore[attr-defined]
    if (recorder := current_recorder()) is not None:
        recorder.follow(storage).category = category


class Recorder(Watcher):
    """Writes on `tape` what happens to the storages of this thread, while it is entered."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape
        self.position = Position(tape)
        self.records: dict[int, Record] = {}  # by the storage's address

    def __enter__(self) -> "Recorder":
        _watch_what_runs_no_operator()
        _active.recorder = self
        return super().__enter__()

    def __exit__(self, kind: Any, *exception: Any) -> None:
        super().__exit__(kind, *exception)
        _active.recorder = None

    # What follows runs once for each operator. It takes about a microsecond. PyTorch takes four to come here.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = not types or PLAIN.issuperset(types)
        if not plain:
            if func is DEVICE:  # no operator: a fake tensor's device is asked for, several times an operator
                return getattr(args[0], "fake_device", None) or args[0].device
            if any(hasattr(kind, "__tensor_flatten__") for kind in types):
                return NotImplemented  # a tensor made of tensors (DTensor): its own operators on those come next
        outputs = outputs_of.get(id(func))
        if outputs is None:
            outputs = learn(func)
        if outputs is IN_PARTS:
            return self.run_in_parts(func, args, kwargs)

        # The operator runs. `func(...)` would do no more than call `func._op(...)`, after a Python call of its own.
        if plain:
            result = func._op(*args, **kwargs) if kwargs else func._op(*args)
        else:
            result = func(*args, **kwargs or {})  # the tensors' own class says what it does
        self.tape.append(func)
        if (current_backward() != -1) is not self.position.in_backward:
            self._cross_into_or_out_of_backward()

        # Then its outputs: which of them are new, or may have been resized?
        if outputs is ONE_NEW:
            self._born(result)
        elif outputs:
            results = result if isinstance(result, tuple | list) else (result,)
            for tensor, kind in zip(results, outputs if len(outputs) > 1 else outputs * len(results)):
                if kind == "new":
                    self._born(tensor)
                elif kind == "written" and self._known(storage := tensor.untyped_storage()):
                    self.resized(storage)  # a storage from before the ledger is not known: writing adds no bytes
        return result

    def _born(self, tensor: torch.Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
        except (AttributeError, NotImplementedError):  # None, or a sparse tensor
            for part in dense_parts(tensor):
                self._born(part)
            return
        self.follow(storage)  # it has a record if the operator returned one of its inputs

    def _known(self, storage: torch.UntypedStorage) -> Record | None:
        record = self.records.get(storage_id(storage))
        # The record of a dead storage is of another one, which had this address before.
        return record if record is not None and record() is not None else None

    def _cross_into_or_out_of_backward(self) -> None:
        if self.position.in_backward:
            self.position.leave_backward()
            return
        for record in list(self.records.values()):
            if record.category is None and record.phase == "forward" and record() is not None:
                record.category = "activations"  # born in forward, and alive when backward begins
        self.position.enter_backward()

    # Called from outside: by `tag`, by `resize_`, by the hooks, by the ledger.

    def follow(self, storage: torch.UntypedStorage) -> Record:
        """The record of a storage, which is made now if there is none."""
        if (known := self._known(storage)) is not None:
            return known
        tape = self.tape
        # `tape.append` is the callback: at its death, in whatever thread, the record writes itself on the tape again.
        record = self.records[storage_id(storage)] = Record(storage, tape.append)
        record.first_size = record.size = storage.nbytes()
        record.category = getattr(storage, "category", None)
        record.phase, record.module = self.position.phase, self.position.running[-1]
        tape.append(record)
        return record

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage may have another size now. It is followed from now on if it was not before."""
        record = self.follow(storage)
        size = storage.nbytes()
        if record.size != size:
            self.tape.append((record, size - record.size))
            record.size = size

    def claim(self, tensor: torch.Tensor, category: str, module: str) -> None:
        """Count a tensor as `category`, unless it has been tagged, and as held by `module` and all that claim it."""
        for part in dense_parts(tensor):
            record = self.follow(part.untyped_storage())
            if record.category is None or record.module == "":
                record.module = module
            elif record.module != module:  # around both: `blocks.0` of `blocks.0.up` and `blocks.0.norm`
                shared = os.path.commonprefix([record.module.split("."), module.split(".")])
                record.module = ".".join(shared) or "(several)"
            record.category = record.category or category

    def forget(self) -> None:
        """Clear the tape of all but the phase and what is alive."""
        storages = [(record, record()) for record in list(self.records.values())]  # held here, so that none dies yet
        alive = [record for record, storage in storages if storage is not None]
        for record in alive:
            record.first_size = record.size
        self.tape[:] = [self.position.phase, *alive]

    def close(self) -> Tape:
        """The tape as it is now. Nothing is written on it any more, and the recorder holds nothing."""
        tape = self.tape[:]
        # Storages that die later still write on the old tape. Nobody reads it, and it is cleared of the records,
        # which refer to it: without that circle they are freed at once, and not by the garbage collector.
        self.tape.clear()
        self.records.clear()
        return tape


@functools.cache  # once in a process
def _watch_what_runs_no_operator() -> None:
    """Make these functions of PyTorch tell the recorder: no operator runs in them, so no dispatch mode sees them."""
    storages = [(torch.UntypedStorage, name) for name in ("__new__", "from_buffer", "resize_")]
    tensors = [(torch, name) for name in ("frombuffer", "asarray", "from_dlpack")]
    for owner, name in (*storages, *tensors, (torch.utils.dlpack, "from_dlpack")):
        setattr(owner, name, _telling(getattr(owner, name)))


def _telling(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        # A tensor that is made from a tensor shares its memory, which may be older.
        if (recorder := current_recorder()) and not any(isinstance(x, torch.Tensor) for x in (*args, *kwargs.values())):
            recorder.resized(result.untyped_storage() if isinstance(result, torch.Tensor) else result)
        return result

    return call
