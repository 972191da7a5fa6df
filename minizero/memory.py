"""Where the memory goes: bytes measured (`Ledger`), and bytes predicted (`predict`, `predict_sent`).

A tensor's bytes live in its storage. The ledger is a dispatch mode: it sees every operator of
this thread, follows each storage that comes out until it dies or is resized, and notes the
bytes by category. What an operator allocates and frees inside itself it cannot see.

    model states per parameter (FP32, Adam)   parameters 4 + gradients 4 + optimizer 8 = 16 bytes

Rajbhandari et al., 2019, "ZeRO", sections 3 and 5.
"""

import functools
import threading
import weakref
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "temporary", "communication", "buffers")

_active = threading.local()  # .ledger: the one that watches this thread


def tag(tensor: torch.Tensor, category: str) -> None:
    """Say what a tensor's storage is for. It counts as that from its birth."""
    storage = tensor.untyped_storage()
    storage.category = category  # type: ignore[attr-defined]
    ledger = getattr(_active, "ledger", None)
    if ledger is not None:
        ledger.follow(storage).category = category


class Sample(dict):
    """Bytes by category at one moment, and in which phase that was."""

    phase: str


class _Record:
    """What the ledger knows of one storage."""

    __slots__ = ("size", "category", "phase", "reference")

    def __init__(self, size: int, category: str | None, phase: str) -> None:
        self.size, self.category, self.phase = size, category, phase
        self.reference: Any = None


class Ledger(TorchDispatchMode):
    """Measures the live tensor bytes of this thread, by category, while the block runs.

    model: its parameters, gradients and buffers are known by that; a plain module or an engine.
    optimizer: its states are. Counts every tensor born inside, and of older ones the model's and
    the optimizer's. An activation was born in forward and is alive when backward begins; the rest
    is temporary. `RuntimeError` when another ledger watches this thread already.
    """

    def __init__(self, model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None) -> None:
        super().__init__()
        self.model, self.optimizer = model, optimizer
        self.phase = "between"
        self.records: dict[int, _Record] = {}  # live storages by address
        self.events: list[tuple[_Record, int, str]] = []  # (storage, bytes more or fewer, phase)
        self.start = 0  # so many events are what was there before
        self.hooks: list[Any] = []

    # What happens.

    def __enter__(self) -> "Ledger":
        if getattr(_active, "ledger", None) is not None:
            raise RuntimeError("Ledger: another ledger watches this thread already: close it first")
        _watch_resizes()
        if self.model is not None:
            self._find_model(self.model)
            self.hooks.append(self.model.register_forward_pre_hook(lambda *_: self._enter_phase("forward")))
        if self.optimizer is not None:
            self._find_states()
            self.hooks.append(self.optimizer.register_step_pre_hook(lambda *_: self._enter_phase("optimizer")))
            self.hooks.append(self.optimizer.register_step_post_hook(lambda *_: self._after_step()))
        self.start = len(self.events)
        _active.ledger = self
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        _active.ledger = None
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward != (self.phase == "backward"):
            self._enter_backward() if in_backward else self._enter_phase("between")
        births, may_resize = _outputs(func)
        if any(births) or may_resize:
            results = result if isinstance(result, tuple | list) else (result,)
            for tensor, born in zip(results, births if len(births) > 1 else births * len(results)):
                if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                    storage = tensor.untyped_storage()
                    if born or storage._cdata in self.records:  # not what is older and only written to
                        self.resized(storage)
        return result

    def follow(self, storage: torch.UntypedStorage) -> _Record:
        """The record of a storage, made where the storage is new."""
        key = storage._cdata
        record = self.records.get(key)
        if record is None:
            record = _Record(storage.nbytes(), getattr(storage, "category", None), self.phase)
            record.reference = weakref.ref(storage, lambda _: self._died(key, record))
            self.records[key] = record
            self.events.append((record, record.size, self.phase))
        return record

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage may be new, or have another size now."""
        record, size = self.follow(storage), storage.nbytes()
        if record.size != size:
            self.events.append((record, size - record.size, self.phase))
            record.size = size

    def _died(self, key: int, record: _Record) -> None:
        # May be called in another thread: only appends, which is safe.
        if self.records.get(key) is record:
            del self.records[key]
        self.events.append((record, -record.size, self.phase))

    # What is what.

    def _find_model(self, model: nn.Module) -> None:
        inner = [p for module in model.modules() for p in module._parameters.values() if p is not None]
        for parameter in [*inner, *model.parameters()]:
            self._claim(parameter, "parameters")
            if parameter.grad is not None:
                self._claim(parameter.grad, "gradients")
            if parameter.requires_grad and parameter.is_leaf:
                self.hooks.append(parameter.register_post_accumulate_grad_hook(self._claim_gradient))
        for buffer in model.buffers():
            self._claim(buffer, "buffers")

    def _claim_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:  # an engine takes it away at once
            self._claim(parameter.grad, "gradients")

    def _find_states(self) -> None:
        assert self.optimizer is not None
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    self._claim(value, "optimizer")

    def _claim(self, tensor: torch.Tensor, category: str) -> None:
        record = self.follow(tensor.untyped_storage())
        record.category = record.category or category

    def _enter_phase(self, phase: str) -> None:
        self.phase = phase

    def _enter_backward(self) -> None:
        for record in list(self.records.values()):
            if record.category is None and record.phase == "forward":
                record.category = "activations"
        self.phase = "backward"

    def _after_step(self) -> None:
        self._find_states()
        self.phase = "between"

    # What was measured.

    def reset(self) -> None:
        """Forget the curve and the peaks so far; what is alive stays counted."""
        self.events = [(record, record.size, self.phase) for record in list(self.records.values())]
        self.start = len(self.events)

    @property
    def current(self) -> dict[str, int]:
        """Live bytes by category, and `total`."""
        totals = dict.fromkeys(CATEGORIES, 0)
        for record in list(self.records.values()):
            totals[record.category or "temporary"] += record.size
        return totals | {"total": sum(totals.values())}

    @property
    def peak(self) -> dict[str, int]:
        """The most bytes of each category at any moment; `total` is the most of all together."""
        curve = self.curve
        return {key: max(sample[key] for sample in curve) for key in curve[0]}

    @property
    def curve(self) -> list[Sample]:
        """Bytes by category after every allocation, free and resize, since entry or the last reset."""
        totals = Sample(dict.fromkeys((*CATEGORIES, "total"), 0))
        totals.phase = "between"
        samples = [totals]
        for number, (record, delta, phase) in enumerate(list(self.events)):
            if number >= self.start:
                totals = Sample(totals)
                samples.append(totals)
            totals.phase = phase
            totals[record.category or "temporary"] += delta
            totals["total"] += delta
        return samples

    def plot(self, ax: Any = None) -> Any:
        """Draw the curve, stacked by category; returns the matplotlib Axes."""
        from minizero.report import plot_curve

        return plot_curve(self.curve, ax)


@functools.cache
def _outputs(func: Any) -> tuple[list[bool], bool]:
    """Of an operator: which outputs are new tensors (not views, not inputs written to); can it resize one?"""
    schema = func._schema
    births = [output.alias_info is None for output in schema.returns]
    may_resize = any(argument.is_out for argument in schema.arguments) or schema.name in (
        "aten::resize_",
        "aten::resize_as_",
        "aten::set_",
    )
    return births, may_resize


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
        ledger = getattr(_active, "ledger", None)
        if ledger is not None:
            ledger.resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]


def predict(
    n_parameters: int,
    world_size: int,
    stage: int,
    *,
    dtype: torch.dtype = torch.float32,
    sharding_factor: int | None = None,
    convention: str = "minizero",
) -> dict[str, float]:
    """Bytes per rank between steps, with Adam: `parameters`, `gradients`, `optimizer`, `total`.

    Ψ = n_parameters, N = world_size; `sharding_factor` takes N's place. In 16 bits this code holds an FP32
    gradient beside the 16-bit one, since PyTorch refuses a 16-bit gradient on an FP32 parameter;
    convention="paper" counts the ZeRO paper's 2 + 2 + 12 bytes instead, in any dtype.
    """
    if not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"predict: world_size must be a whole number of at least 1, not {world_size!r}")
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"predict: stage must be 0, 1, 2 or 3, not {stage!r}")
    if convention not in ("minizero", "paper"):
        raise ValueError(f"predict: convention must be 'minizero' or 'paper', not {convention!r}")
    psi, shards = n_parameters, sharding_factor or world_size
    one_in = [1 / shards if stage >= k else 1 for k in range(4)]  # one_in[k]: what stage k shards
    if convention == "paper":
        parts = {"parameters": 2 * psi * one_in[3], "gradients": 2 * psi * one_in[2], "optimizer": 12 * psi * one_in[1]}
    elif dtype == torch.float32:
        parts = {"parameters": 4 * psi * one_in[3], "gradients": 4 * psi * one_in[2], "optimizer": 8 * psi * one_in[1]}
    else:
        working = 2 * psi if stage < 2 else 0  # the 16-bit gradient that the ring averages
        parts = {
            "parameters": 2 * psi if stage < 3 else 0,  # a stage-3 replica exists only while a unit computes
            "gradients": working + 4 * psi * one_in[1],
            "optimizer": 12 * psi * one_in[1],
        }
    return parts | {"total": sum(parts.values())}


def predict_sent(n_parameters: int, world_size: int, stage: int, *, n_root: int = 0, bytes_each: int = 4) -> float:
    """Bytes that a rank sends in a step: (N-1)/N of 2Ψ elements, in stage 3 of 3Ψ less the root unit's."""
    elements = 2 * n_parameters if stage < 3 else 3 * n_parameters - n_root
    return elements * bytes_each * (world_size - 1) / world_size
