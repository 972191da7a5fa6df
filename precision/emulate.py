"""Train as if every operation were in 16 bits, on a machine that has no unit for them.

    y = round(f(round(x), round(w)))        for every operator f, forward and backward

A dispatch mode sees every operator that PyTorch runs, those of backward too. It rounds what goes
in, lets FP32 compute (as a 16-bit unit with FP32 accumulators does inside) and rounds what comes
out. The tensors keep their dtype; their values are those of the format. What autograd keeps for
backward is stored in the format's bits, which is where mixed precision saves its memory. So

    with emulate(FP16):
        loss = model(x, y)
        loss.backward()
    optimizer.step()

is mixed precision: parameters that stay in FP32 are the master weights, and every operator inside
reads them rounded. Step inside of the block, and they become 16-bit weights without masters.
Micikevicius et al., 2018, "Mixed Precision Training", section 3.
"""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from precision import partial_sums
from precision.exact import exact, is_exact
from precision.formats import BF16, FP16, FP32, FloatFormat
from precision.islands import Islands

_thread = threading.local()  # .innermost: the emulation entered last


@contextlib.contextmanager
def emulate(fmt: FloatFormat = FP16, accumulator: FloatFormat = FP32) -> Iterator[None]:
    """While the block runs, this thread's operators read, write and keep for backward values of `fmt` only.

    fmt: FP16, BF16, FP8_E4M3 or any other FloatFormat. Of nested blocks the innermost alone counts.
    accumulator: what the partial sums of sums, means, matrix products and 2-d convolutions are rounded to, one
    addition after the other: slow, for small tensors. With FP32 PyTorch's own kernels add. `partial_sums` says which
    operators still add in FP32 (softmax, norms, losses), and which are refused: `NotImplementedError`.
    Call `backward` inside the block. Integers, views, and the running statistics of a batch norm are left alone.
    So is what a model itself computes in FP32, such as the square in Llama's norm (`precision.islands`). PyTorch's own
    kernels compute tensors that have 16 bits already. Backward keeps parameters as they are, without a copy.
    `TypeError` if fmt or accumulator is no FloatFormat. `NotImplementedError` from operators on complex, sparse or
    jagged tensors, which nothing here rounds. Complex ones that a model itself computes in FP32 are left alone, too.
    The tensors that are alive in the block are FP32 ones: only what autograd keeps has mixed precision's bytes.
    A loss scale above 65504 is infinite in FP16: compute the loss outside, and give `output.backward` its gradient.
    """
    for name, given in (("fmt", fmt), ("accumulator", accumulator)):
        if not isinstance(given, FloatFormat):
            raise TypeError(f"emulate: {name} must be a FloatFormat such as FP16, not {given!r}")
    emulation, outer = _Emulation(fmt, accumulator), getattr(_thread, "innermost", None)
    _thread.innermost = emulation
    try:
        with emulation, Islands(emulation), torch.autograd.graph.saved_tensors_hooks(emulation.pack, lambda get: get()):
            yield
    finally:
        _thread.innermost = outer
        if outer is not None:
            outer.born.clear()  # other values may have been written into them meanwhile


class _Emulation(TorchDispatchMode):
    """One block of `emulate`: rounds what operators read and write, and packs what autograd keeps."""

    def __init__(self, fmt: FloatFormat, accumulator: FloatFormat) -> None:
        super().__init__()
        self.fmt, self.accumulator = fmt, accumulator
        # Storages that were born in this block: all their values are rounded, at any time.
        self.born: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        # Storages whose values are FP32's, because the model asked for that: `precision.islands`.
        self.wide: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        # For each storage the bits that autograd holds: if two operators save a tensor, it is stored once.
        self.packed: weakref.WeakKeyDictionary[torch.UntypedStorage, Any] = weakref.WeakKeyDictionary()

    # Operators.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        names, births, written, is_composite = _effects(func)
        if is_exact() or not (births or written):
            return func(*args, **kwargs)
        if is_composite:  # only without autograd: cross_entropy, say, which is a log_softmax and more
            with self:
                return func.decompose(*args, **kwargs)
        # Round what the operator reads, run it, then round what it wrote into its arguments, and what it made.
        with exact():
            given = dict(zip(names, args)) | kwargs
            untouched = written | _STATISTICS
            args = [value if name in untouched else self.read(value) for name, value in zip(names, args)]
            kwargs = {name: value if name in untouched else self.read(value) for name, value in kwargs.items()}
            wide = any(map(self.is_wide, _tensors(list(given.values()))))
            if func._schema.name.removeprefix("aten::").removesuffix("_") in _ROUND_NUMBERS and not wide:
                reals = any(tensor.dtype != torch.float64 for tensor in _tensors(args))
                args = [self.number(value) if reals else value for value in args]
            if wide or self.accumulator == FP32:
                result = func(*args, **kwargs)
            else:
                result = partial_sums.run(self.fmt, self.accumulator, func, args, kwargs)
            results = result if isinstance(result, tuple | list) else (result,)
            _refuse(func, [*given.values(), *results], wide)
            for name in written - _STATISTICS:
                for tensor in [each for each in _tensors(given.get(name)) if _rounds(each) and not self.is_wide(each)]:
                    tensor.copy_(_round(self.fmt, tensor))
            results = [value for value, born in zip(results, births * len(results)) if born]
            for tensor in [each for each in _tensors(results) if each.untyped_storage() not in self.born]:
                if wide:
                    self.wide.add(tensor.untyped_storage())
                elif _rounds(tensor):
                    tensor.copy_(_round(self.fmt, tensor))
                    self.born.add(tensor.untyped_storage())
        return result

    def read(self, value: Any) -> Any:
        """An argument as the operator sees it: tensors that come from outside the block are rounded."""
        if isinstance(value, list | tuple):
            return [self.read(each) for each in value]
        if not _rounds(value) or value.untyped_storage() in self.born or self.is_wide(value):
            return value
        return _round(self.fmt, value)

    def number(self, value: Any) -> Any:
        """A Python number as the operators in `_ROUND_NUMBERS` read it: rounded."""
        return float(self.fmt.quantize(float(value))) if type(value) in (int, float) else value

    # Islands.

    def rounds(self) -> bool:
        """Whether this is the innermost block, and its format so narrow that a model would have islands."""
        return self.fmt.width <= 16 and _thread.innermost is self

    def is_wide(self, tensor: torch.Tensor) -> bool:
        """Whether its values are FP32's, because the model asked for that. Those of a real 16-bit tensor never are."""
        if not self.wide or tensor.layout != torch.strided or tensor.element_size() <= 2:
            return False
        return tensor.untyped_storage() in self.wide

    def convert(self, tensor: torch.Tensor, wide: bool) -> torch.Tensor:
        """A copy of `tensor`: marked as wide if `wide`, else rounded."""
        with exact():
            copy = self.read(tensor).clone() if wide else _round(self.fmt, tensor).clone()
            (self.wide if wide else self.born).add(copy.untyped_storage())
            return copy

    # What autograd keeps from forward to backward.

    def pack(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """What to keep of `tensor`, the format's bits, in the function that backward gets it from.

        Parameters live on anyhow, and are kept as they are.
        """
        base = tensor if tensor._base is None else tensor._base
        parameter = base.is_leaf and (base.requires_grad or isinstance(base, nn.Parameter))
        dtype = _DTYPES.get(self.fmt)
        packs = self.fmt.width <= 16 and tensor.dtype != dtype and _rounds(tensor)
        if parameter or self.is_wide(tensor) or not packs:
            return functools.partial(self.kept, tensor.detach(), tensor._version)
        with exact():
            storage, view = tensor.untyped_storage(), None
            part = tensor.detach()
            if storage in self.born:
                # All of it, as autograd itself would: a matrix and its transpose, which both are saved, share it.
                view = tensor.size(), tensor.stride(), tensor.storage_offset()
                part = part.as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
            known = self.packed.setdefault(storage, weakref.WeakValueDictionary())
            key = tensor._version, part.size(), part.stride(), part.storage_offset()
            bits = known.get(key)
            if bits is None:
                known[key] = bits = self.fmt.encode(part) if dtype is None else _round(self.fmt, part).to(dtype)
            return functools.partial(self.unpacked, bits, tensor.dtype, view)

    def unpacked(self, bits: torch.Tensor, dtype: torch.dtype, view: tuple[Any, Any, Any] | None) -> torch.Tensor:
        """A tensor from its bits: float16 or bfloat16 if the format is one of these, else integers.

        view: its size, stride and offset in the bits; None: they are the tensor.
        """
        with exact():
            bits = bits if view is None else bits.as_strided(*view)
            values = (bits if bits.is_floating_point() else self.fmt.decode(bits)).to(dtype)
            self.born.add(values.untyped_storage())
            return values

    def kept(self, tensor: torch.Tensor, version: int) -> torch.Tensor:
        """A tensor that is shared, not copied. `RuntimeError` if it was changed in place."""
        if tensor._version != version:
            raise RuntimeError(
                f"emulate: a tensor of shape {tuple(tensor.shape)} that backward needs was changed in place (version "
                f"{version} expected, found {tensor._version}): call backward before optimizer.step()"
            )
        with exact():
            return self.read(tensor)


# PyTorch has these two itself: their bits are stored under their own names.
_DTYPES = {FP16: torch.float16, BF16: torch.bfloat16}


def _round(fmt: FloatFormat, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with its values rounded to the format, in its own dtype."""
    dtype = _DTYPES.get(fmt)
    if tensor.dtype == dtype or (fmt == FP32 and tensor.dtype != torch.float64):
        return tensor
    if dtype is not None and tensor.dtype == torch.float32:
        # PyTorch's own conversion gives the numbers of `quantize` (tests compare them) in a tenth of the time.
        return tensor.to(dtype).float()
    return fmt.quantize(tensor)


# Batch norm itself updates these. They are FP32 in mixed precision, too.
_STATISTICS = frozenset({"running_mean", "running_var"})


# PyTorch's 16-bit kernels round a Python number before these: 0.1 is 0.099976 in FP16, and x % 0.1 another number. To
# a product or quotient it goes in FP32; what is filled or clamped with it is rounded afterwards, which is the same.
_ROUND_NUMBERS = {"remainder", "fmod", "pow", "eq", "ne", "lt", "le", "gt", "ge", "hardshrink", "hardshrink_backward"}


@functools.cache
def _effects(func: Any) -> tuple[list[str], list[bool], frozenset[str], bool]:
    """(an operator's argument names, which of its outputs are new tensors, the arguments that it writes to, whether it
    consists of other operators, which autograd would have taken apart)."""
    schema = func._schema
    births = [output.alias_info is None and "Tensor" in str(output.type) for output in schema.returns]
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    if schema.name in ("aten::set_", "aten::resize_", "aten::resize_as_"):  # another storage, the same values
        written = set()
    births = births if any(births) else []
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key  # of operators on tensors: others it does not know
    is_composite = bool(births or written) and has_kernel(func.name(), "CompositeImplicitAutograd")
    return [a.name for a in schema.arguments], births, frozenset(written), is_composite


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors of real or complex numbers in `value`, an argument or a result."""
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in _tensors(each)]
    numbers = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    return [value] if numbers else []


def _rounds(value: Any) -> bool:
    """Whether it is a tensor whose values are rounded."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.layout == torch.strided


def _refuse(func: Any, values: list[Any], wide: bool) -> None:
    """`NotImplementedError` if there are tensors that nobody rounds. Complex ones may be a model's own FP32 numbers."""
    odd = [tensor for tensor in _tensors(values) if not _rounds(tensor)]
    harmless = wide or func is torch.ops.aten.clone.default  # which writes out a conjugate
    if odd and not (harmless and all(tensor.layout == torch.strided for tensor in odd)):
        kind = odd[0].dtype if odd[0].is_complex() else odd[0].layout
        raise NotImplementedError(  # a TypeError would become "unsupported operand" at a * b
            f"emulate: {func} reads or makes a tensor of {kind}: complex, sparse and jagged tensors are not rounded: "
            "compute with real, strided ones here, or outside of the block"
        )
