"""Fake tensors: a training step of a model that this machine could not hold.

    real    a shape, a dtype, and a storage full of numbers
    fake    a shape, a dtype, and a storage that only says how many bytes it has

An operator on fake tensors computes shapes and no numbers. So a step of 8 billion parameters takes seconds and some
hundred MiB, and every tensor in it is born and dies as the real one does: a memory ledger counts the same bytes.

PyTorch's FakeTensorMode is all of that. Four things are added here, for a model that nobody here has seen.

building     `build` calls make() on "meta", where tensors have no numbers either, and for real if it reads a number
copying      `Copier` copies what make() has returned: small tensors of whole numbers, such as sizes, keep them
operators    a few own other memory than their fake kernel says (`OWN_ANSWERS`)
numbers      a loop may read some, outside of forward (`one_number`)
"""

import contextlib
import gc
import inspect
import io
import logging
import pickle
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorConverter, FakeTensorMode
from torch.utils._pytree import tree_map_only

from minizero import torch_private
from minizero.memory.operators import Watcher
from minizero.memory.recorder import DEVICE, current_recorder
from minizero.xray.lines import is_users
from minizero.xray.places import CARD, FEW, HOST, OneDevice, here, in_make, lent, marking, moves, place_of

aten = torch.ops.aten
ALONE = threading.RLock()  # names of PyTorch are changed for the whole process, by one thread at a time
OUTSIDE = (
    "a method uses a model or an optimizer that is a global, and copies are trained: use it in a function, or give it "
    "to the method's object"
)
SPARSE = "it has a sparse tensor, and how many numbers those have depends on the batch's own: try sparse=False"
SHARDED = "it asks for other ranks, and here is one: give the model inside of fully_shard or FSDP, and --ranks N"
HALVES = (torch.float16, torch.bfloat16)


class NotPossible(ValueError):
    """A model that cannot be built here, or a step that cannot be run under a plan; says why."""


def build(make: Callable[[], Any]) -> Any:
    """What `make()` returns, if possible without a number: on "meta". Code that reads a number builds for real."""
    try:
        with in_make("meta"):
            return make()
    except NotPossible:
        raise
    except (Exception, SystemExit):
        with in_make("cpu"):
            return make()


class Copier(pickle.Pickler):
    """Copies what a step is made of. Tensors are fake ones of `mode` then, on the CPU, and share what they shared.

    What cannot be copied, such as a class, a lock, a generator, is shared.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode, self.file = mode, io.BytesIO()
        self.storages: dict[int, torch.UntypedStorage] = {}  # by the number of the storage that was copied
        self.shared: dict[int, Any] = {}  # copies of globals, and of cells of functions, by the number of the first
        self.made: list[Any] = []  # what is there before the copy is put together
        self.get = self.made.__getitem__
        super().__init__(self.file, 5)

    def copy(self, value: Any) -> Any:
        """The copy of `value`, and of all that it refers to."""
        with torch_private.without_modes():  # a mode would fake by itself
            self.dump(value)
            self.file.seek(0)
            loader = pickle.Unpickler(self.file)
            loader.persistent_load = lambda _: self.get  # type: ignore[method-assign]
            return loader.load()

    def fake(self, tensor: Tensor) -> FakeTensor:
        """A fake tensor at the same place of a storage of the same size."""
        old = tensor.untyped_storage()
        new = torch.empty(old.nbytes(), dtype=torch.uint8, device="meta").untyped_storage()
        new = self.storages.setdefault(torch_private.storage_id(old), new)
        if getattr(old, "place", HOST) == CARD:
            new.place = CARD  # type: ignore[attr-defined]
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        bare = torch.empty(0, dtype=tensor.dtype, device="meta").set_(new, *place)
        known = not tensor.is_meta and tensor.dtype in (torch.int64, torch.int32) and tensor.numel() <= FEW  # a size?
        return FakeTensor(self.mode, bare, torch.device("cpu"), constant=tensor.clone() if known else None)

    def persistent_id(self, part: Any) -> str | None:
        """A name for what the bytes do not contain."""
        return "get" if part is self.get else None

    def ready(self, made: Any, state: Any = None, fill: Any = None) -> tuple[Any, ...]:
        """To pickle: `made` is there, and gets a copy of `state`, by `fill`."""
        self.made.append(made)
        return self.get, (len(self.made) - 1,), state, None, None, fill

    def reducer_override(self, part: Any) -> tuple[Any, ...]:
        """To pickle: by what a part, which is no container, is made again."""
        if isinstance(part, Tensor) and hasattr(part, "__tensor_flatten__"):
            raise ValueError(SHARDED)
        if isinstance(part, Tensor):
            bare, trained = self.fake(part), part.requires_grad and part.is_leaf
            made = type(part)(bare, trained) if isinstance(part, nn.Parameter) else bare.requires_grad_(trained)
            hooks = torch_private.gradient_hooks(part) if trained else ()  # an optimizer may step in backward
            return self.ready(made, hooks, add_hooks)
        if isinstance(part, torch.optim.Optimizer):  # its own state leaves out some
            return self.ready(object.__new__(type(part)), vars(part))
        if isinstance(part, types.FunctionType):
            return self.function(part)
        if isinstance(part, types.MethodType):
            return types.MethodType, (part.__func__, part.__self__)
        if isinstance(part, weakref.ref) and isinstance(part(), nn.Module | torch.optim.Optimizer):
            return weakref.ref, (part(),)
        with contextlib.suppress(Exception):
            shared = isinstance(part, type | torch.Generator) or type(part).__module__ == "numpy"  # a file's array, say
            if not shared and isinstance(found := part.__reduce_ex__(4), tuple):
                return found
        if isinstance(part, nn.Module):  # one with parametrizations refuses to be pickled
            return self.ready(object.__new__(type(part)), vars(part))
        return self.ready(part)

    def function(self, function: types.FunctionType) -> tuple[Any, ...]:
        """A function of the user's, with copies of what it refers to, its globals too: so `step` gets the copies.

        A scheduler wraps its optimizer's step in a function of PyTorch's, which has a weak reference: that, too.
        """
        known, closure = function.__globals__, function.__closure__ or ()
        cells = [[] if cell == types.CellType() else [cell.cell_contents] for cell in closure]  # some are empty yet
        file = inspect.unwrap(function).__code__.co_filename
        used = globals_of(function) if is_users(file) and "site-packages" not in file else {}
        held = cells, used, function.__defaults__, function.__kwdefaults__
        if not any(held) or not (is_users(file) or any(isinstance(value, weakref.ref) for value in sum(cells, []))):
            return self.ready(function)
        space = self.shared.setdefault(id(known), dict(known)) if used else known
        twins = tuple(self.shared.setdefault(id(cell), types.CellType()) for cell in closure)
        made = types.FunctionType(function.__code__, space, function.__name__, None, twins)
        vars(made).update(vars(function))
        return self.ready(made, held, fill)


def globals_of(function: types.FunctionType) -> dict[str, Any]:
    """The globals that a function of the user's uses, by name, without modules and classes."""
    codes, names = [function.__code__], set[str]()
    for code in codes:  # functions inside are found on the way
        names.update(code.co_names)
        codes += [part for part in code.co_consts if isinstance(part, types.CodeType)]
    known = function.__globals__
    return {name: known[name] for name in names & known.keys() if not isinstance(known[name], types.ModuleType | type)}


def add_hooks(leaf: Tensor, hooks: tuple[list[Any], list[Any]]) -> None:
    """A copied tensor that is trained gets copies of its hooks."""
    for add, each in zip((leaf.register_hook, leaf.register_post_accumulate_grad_hook), hooks):
        for hook in each:
            add(hook)


def fill(function: types.FunctionType, held: tuple[Any, ...]) -> None:
    """A copied function gets copies of what its cells hold, of the globals that it uses, and of its defaults."""
    cells, used, function.__defaults__, function.__kwdefaults__ = held
    for cell, values in zip(function.__closure__ or (), cells):
        for value in values:
            cell.cell_contents = value
    function.__globals__.update(used)


class FromOutside(FakeTensorConverter):
    """Tensors from outside may take part in the step, also those on "meta": a teacher in a global, say. They count."""

    copied: frozenset[int] = frozenset()  # the storages of which there are copies: to be used in their place

    def from_real_tensor(self, fake_mode: FakeTensorMode, t: Tensor, *args: Any, **kwargs: Any) -> FakeTensor:
        """The fake tensor in the place of `t`. `ValueError` if `t` has a copy."""
        if not kwargs.get("make_constant"):
            if torch_private.storage_id(t.untyped_storage()) in self.copied:
                raise ValueError(OUTSIDE)
            if (recorder := current_recorder()) is not None:
                recorder.claim(t, "host" if here.marks and place_of(t) == HOST else "buffers", "from outside")
        if t.is_meta:
            with torch_private.without_modes():
                return Copier(fake_mode).fake(t)
        return super().from_real_tensor(fake_mode, t, *args, **kwargs)


class Pretend(Watcher, FakeTensorMode):
    """PyTorch's fake tensors, and the operators of `OWN_ANSWERS`. Tensors from before may take part."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.fake_tensor_converter = self.from_outside = FromOutside()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:  # asked by C++, also of a parameter that an engine has released, which is not fake
            return HOST
        arguments = func, args, kwargs or {}
        return marking(self.answer, *arguments) if here.marks else self.answer(*arguments)

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operator returns."""
        if func in OWN_ANSWERS:
            with self:
                return OWN_ANSWERS[func](*args, **kwargs)
        try:
            result = self.dispatch(func, (), args, kwargs)
        except DataDependentOutputException:
            if func is not aten._local_scalar_dense.default or (number := one_number(args[0])) is None:
                raise
            return number
        if isinstance(result, Tensor) and result.is_sparse:
            raise ValueError(SPARSE)  # a fake one has none, and an optimizer leaves it out
        if func in DRAWN and isinstance(result, FakeTensor) and result.numel() <= FEW and not in_forward():
            with torch_private.without_modes():
                result.constant = DRAWN[func](*args)
        return result


def device_of(tensor: FakeTensor, asked: Any = FakeTensor.device.fget) -> torch.device:  # type: ignore[attr-defined]
    """What a fake tensor says to its user: where it lies. To PyTorch it lies on the CPU."""
    return CARD if here.marks and not here.inside and place_of(tensor) == CARD else asked(tensor)


@contextlib.contextmanager
def pretend() -> Iterator[Pretend]:
    """A world of fake tensors, in which nothing is compiled: PyTorch's compiler would crash on them."""
    with ALONE, contextlib.ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # only where something compiles: loading it takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if masks := sys.modules.get("transformers.masking_utils"):  # of fake tensors it assumes packed sequences
            stack.enter_context(mock.patch.object(masks, "find_packed_sequence_indices", lambda position_ids: None))
        # It prints a traceback of PyTorch's own files before it raises. What is raised has the user's line.
        stack.enter_context(mock.patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True))
        if gc.isenabled():  # the collector would search millions of objects, and when it runs is chance
            gc.disable()
            stack.callback(gc.enable)
        if torch.get_default_device().type != "cpu":  # a caller's `with torch.device("meta")` is for the model alone:
            stack.enter_context(torch.device("cpu"))  # an optimizer's counter of steps has a number
        # A distribution looks whether its numbers are allowed, unless its user or this says no.
        stack.enter_context(mock.patch.object(torch.distributions.Distribution, "_validate_args", False))
        stack.enter_context(mock.patch.object(FakeTensor, "device", property(device_of)))
        stack.enter_context(mock.patch.object(fake_tensor, "CONSTANT_NUMEL_LIMIT", FEW))
        stack.enter_context(OneDevice("cpu"))
        stack.enter_context(moves())
        in_lists = FakeTensor, "tolist", lambda before, tensor: numbers(before, tensor).tolist()
        stack.enter_context(lent((FakeTensor, "numpy", numbers), in_lists))
        yield stack.enter_context(Pretend())


def grouped_products(a: Tensor, b: Tensor, offsets: Any = None, bias: Any = None, out_dtype: Any = None) -> Tensor:
    """One matrix product for each expert. The fake kernel wants BF16, as a GPU's does; the CPU's takes FP32."""
    experts = () if a.dim() != b.dim() else (a.shape[0] if a.dim() == 3 else offsets.shape[0],)
    return a.new_empty(*experts, a.shape[-2], b.shape[-1])


def reduced_in_place(x: Tensor, y: Tensor, *options: Any) -> Tensor:
    """A loss that is summed in the memory of its unreduced values: it returns one number, and that memory stays."""
    values = x.sub(y)
    reduction = next((option for option in options if type(option) is int), 1)  # by default the mean
    return values.as_strided((), ()) if reduction else values


def recurrent_layer(x: Tensor, *options: Any) -> tuple[Tensor, ...]:
    """Runs the layer once on zeros, to learn what its results are: no kernel says how large a reserve is."""

    def results(dtype: torch.dtype) -> tuple[Tensor, ...]:
        zeros = tree_map_only(Tensor, lambda t: torch.zeros(t.shape, dtype=dtype), (x, *options))
        return aten.mkldnn_rnn_layer(*zeros)

    with torch_private.without_modes():
        try:
            found = results(x.dtype)
        except RuntimeError:  # this processor has no kernel for 16 bits
            found = results(torch.float32)

    kinds = [t if t is None else x.dtype if t.is_floating_point() else t.dtype for t in found]
    # Without gradients it has no reserve.
    return tuple(t if t is None else x.new_empty(t.shape, dtype=kind) for t, kind in zip(found, kinds))


def in_forward() -> bool:
    """Does a module's forward run?"""
    return (recorder := current_recorder()) is None or len(recorder.position.running) > 1


# Numbers by which a loop picks its samples. They may go to NumPy, as the ends of a slice: here they are the least.
DRAWN: dict[Any, Callable[..., Tensor]] = {
    aten.randint.default: lambda high, size: torch.zeros(size, dtype=torch.long),
    aten.randint.low: lambda low, high, size: torch.full(size, low),
    aten.randperm.default: torch.arange,
}


def one_number(tensor: Tensor) -> float | None:
    """What a loop reads outside of forward: 1 in an optimizer's step, which divides by it, else 0, such as a loss."""
    in_step = (recorder := current_recorder()) is not None and recorder.position.in_step
    if tensor.dtype == torch.bool if in_step else in_forward():
        return None  # what it decides would change the step
    return (float if tensor.is_floating_point() else bool if tensor.dtype == torch.bool else int)(in_step)


def numbers(before: Any, tensor: FakeTensor, **_: Any) -> Any:
    """`numpy`: what a loop prints, each as `one_number`."""
    with torch_private.without_modes():
        if tensor.constant is not None:
            return tensor.constant.numpy()
        if (number := one_number(tensor)) is None:
            raise DataDependentOutputException(aten._local_scalar_dense.default)
        return torch.full(tensor.shape, number, dtype=tensor.dtype).numpy()


OWN_ANSWERS: dict[Any, Callable[..., Any]] = {
    aten._grouped_mm.default: grouped_products,
    aten.mse_loss.default: reduced_in_place,
    aten.smooth_l1_loss.default: reduced_in_place,
    aten.soft_margin_loss.default: reduced_in_place,
    aten.binary_cross_entropy.default: reduced_in_place,
    aten.unsafe_split.Tensor: torch.split,  # it returns views, which its schema does not say
    aten.mkldnn_rnn_layer.default: recurrent_layer,
}
