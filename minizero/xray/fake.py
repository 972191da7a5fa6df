"""Fake tensors: a training step of a model that this machine could not hold.

    real    a shape, a dtype, and a storage full of numbers
    fake    a shape, a dtype, and a storage that only says how many bytes it has

An operator on fake tensors computes shapes and no numbers. So a step of 8 billion parameters takes seconds and some
hundred MiB, and every tensor in it is born and dies as the real one does: a memory ledger counts the same bytes.

PyTorch's FakeTensorMode is all of that. Three things are added here, for a model that nobody here has seen.
Building: `build` calls the user's function on the device "meta", where tensors have no numbers either. What looks at a
number there is built again for real. Operators: a few own other memory than their fake kernel says (`OWN_ANSWERS`).
Devices: if the user's code says "cuda", the device where it runs is meant (`OneDevice`).

Kernels of Python, the collector and names of PyTorch are changed for the whole process, so one thread at a time is in
here (`ALONE`).
"""

import contextlib
import copy
import functools
import gc
import inspect
import logging
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorConverter, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from minizero import torch_private
from minizero.memory.operators import Watcher
from minizero.memory.recorder import current_recorder
from minizero.xray.hugging_face import masks_as_for_real
from minizero.xray.lines import is_users

aten = torch.ops.aten
ALONE = threading.RLock()
SPARSE = (
    "Sparse tensors: how many numbers they have depends on the batch's own. Those of a gradient are counted before "
    "rows of one word are summed, and what sums them is not."
)
HALVES = (torch.float16, torch.bfloat16)


class OneDevice(TorchFunctionMode):
    """While it is entered, "cuda" in the user's code means `device`: without a GPU, PyTorch would abort the process."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            return args[0].to(self.device)
        if is_cuda(kwargs.get("device")):
            kwargs = kwargs | {"device": self.device}
        if func is Tensor.to and len(args) > 1 and is_cuda(args[1]):
            args = (args[0], self.device, *args[2:])
        return func(*args, **kwargs)


def is_cuda(device: Any) -> bool:
    """Does it name a GPU? A number alone does."""
    return type(device) is int or (isinstance(device, str | torch.device) and str(device).startswith("cuda"))


def build(make: Callable[[], Any]) -> Any:
    """What `make()` returns, if possible without a number: on "meta". Code that reads a number builds for real."""
    try:
        with torch.device("meta"), OneDevice("meta"):
            return make()
    except Exception as on_meta:
        try:
            with OneDevice("cpu"):
                return make()
        except Exception as error:
            raise error from on_meta


class AsFake(TorchFunctionMode):
    """While it is entered, `copy.deepcopy` makes tensors of `mode`: on the CPU, and sharing what they shared.

    masters: what is in 16 bits becomes FP32.
    """

    def __init__(self, mode: FakeTensorMode, masters: bool = False) -> None:
        super().__init__()
        self.mode, self.masters = mode, masters
        self.storages: dict[int, torch.UntypedStorage] = {}  # by the number of the storage that was copied

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:  # of a buffer, or any other tensor
            tensor, memo = args
            return memo.setdefault(id(tensor), self.fake(tensor))
        if func is Tensor.clone:  # by which a parameter copies its data
            return self.fake(args[0])
        return func(*args, **kwargs or {})

    def fake(self, tensor: Tensor) -> FakeTensor:
        """A fake tensor at the same place of a storage of the same size."""
        old, dtype = tensor.untyped_storage(), tensor.dtype
        if up := self.masters and dtype in HALVES:
            dtype = torch.float32
        new = self.storages.setdefault(
            torch_private.storage_id(old),
            torch.empty(old.nbytes() * (2 if up else 1), dtype=torch.uint8, device="meta").untyped_storage(),
        )
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        bare = torch.empty(0, dtype=dtype, device="meta").set_(new, *place)
        return FakeTensor(self.mode, bare, torch.device("cpu"))


class Notes(FakeTensorConverter):
    """Notes which tensors from outside take part in the step: a teacher in a global, say. Those on "meta" may, too."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def from_real_tensor(self, fake_mode: FakeTensorMode, t: Tensor, *args: Any, **kwargs: Any) -> FakeTensor:
        """The fake tensor in the place of `t`."""
        if not kwargs.get("make_constant"):
            self.outside[torch_private.storage_id(t.untyped_storage())] = weakref.ref(t.untyped_storage())
        if t.is_meta:
            with torch_private.without_modes():
                return AsFake(fake_mode).fake(t)
        return super().from_real_tensor(fake_mode, t, *args, **kwargs)


class Pretend(Watcher, FakeTensorMode):
    """PyTorch's fake tensors, and the operators of `OWN_ANSWERS`. Tensors from before may take part."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.fake_tensor_converter = self.notes = Notes()
        self.copied: list[Any] = []
        self.remarks: set[str] = set()  # sentences for the report

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = OWN_ANSWERS.get(func)
        if own is None:
            try:
                result = self.dispatch(func, types, args, kwargs or {})
                if isinstance(result, Tensor) and result.is_sparse:
                    self.remarks.add(SPARSE)
                return result
            except DataDependentOutputException:
                if func is not aten._local_scalar_dense.default or (number := one_number(args[0])) is None:
                    raise
                return number
        with self:
            return own(*args, **kwargs or {})

    def copy(self, value: Any, masters: bool = False) -> Any:
        """A copy of modules, tensors and functions, real or on meta, as fake ones; `copied` has all of its parts.

        What cannot be copied, such as a lock or a generator that a module keeps, is shared.
        """
        shared: dict[int, Any] = {}
        thread, part = threading.get_ident(), torch.optim.Optimizer.__getstate__
        ours = {
            types.FunctionType: functools.partial(copy_function, thread),
            weakref.ref: functools.partial(copy_reference, thread),
        }
        functions = mock.patch.dict(copy._deepcopy_dispatch, ours)  # type: ignore[attr-defined]
        whole = mock.patch.object(
            torch.optim.Optimizer, "__getstate__", lambda o: vars(o) if threading.get_ident() == thread else part(o)
        )
        while True:
            try:  # this mode would fake by itself
                with torch_private.without_modes(), AsFake(self, masters), functions, whole:
                    result = copy.deepcopy(value, memo := dict(shared))
                    for old in [kept for kept in memo.get(id(memo), ()) if isinstance(kept, nn.Parameter)]:
                        copy_hooks(old, memo)
                self.copied = list(memo.values())
                return result
            except Exception as error:
                frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
                at = [frame for frame in frames if frame.f_code is copy.deepcopy.__code__][-1].f_locals["x"]
                if isinstance(at, Tensor | nn.Module) or id(at) in shared:
                    raise
                shared[id(at)] = at


def copy_hooks(old: nn.Parameter, memo: dict[int, Any]) -> None:
    """A copied parameter gets copies of its hooks: an optimizer may step in backward."""
    before, after = torch_private.gradient_hooks(old)
    for hook in before:
        memo[id(old)].register_hook(copy.deepcopy(hook, memo))
    for hook in after:
        memo[id(old)].register_post_accumulate_grad_hook(copy.deepcopy(hook, memo))


def copy_function(thread: int, function: types.FunctionType, memo: dict[int, Any]) -> types.FunctionType:
    """A function of the user's, with copies of what it closes over, and of the globals that it trains.

    So a `step` gets the copied model and optimizer. A scheduler wraps its optimizer's step in a function of PyTorch's,
    which has a weak reference: that is copied, too. Other threads' functions are not, nor those of other files.
    """
    cells, known = function.__closure__ or (), function.__globals__
    kinds = Tensor | nn.Module | torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler
    names = [n for n in names_in(function.__code__) if isinstance(known.get(n), kinds) or inside(known.get(n)) is known]
    trains = is_users(inspect.unwrap(function).__code__.co_filename) or any(map(refers, cells))
    if thread != threading.get_ident() or not (cells or names) or not trains:
        return function
    scope, empty = dict(known), tuple(types.CellType() for _ in cells)
    made = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, empty)
    made.__kwdefaults__ = function.__kwdefaults__
    vars(made).update(vars(function))
    memo[id(function)] = made  # before what it uses: a function may call itself
    scope.update({name: copy.deepcopy(known[name], memo) for name in names})
    for old, new in zip(cells, empty):
        with contextlib.suppress(ValueError):  # a cell may be empty
            new.cell_contents = copy.deepcopy(old.cell_contents, memo)
    return made


def names_in(code: types.CodeType) -> set[str]:
    """The names of globals that a function uses, and the functions inside it."""
    parts = [names_in(part) for part in code.co_consts if isinstance(part, types.CodeType)]
    return {*code.co_names}.union(*parts)


def inside(function: Any) -> Any:
    """The globals of a function's file, seen through decorators such as `torch.no_grad()`; else None."""
    return inspect.unwrap(function).__globals__ if isinstance(function, types.FunctionType) else None


def refers(cell: types.CellType) -> bool:
    """Is there a weak reference in a function's cell?"""
    with contextlib.suppress(ValueError):
        return isinstance(cell.cell_contents, weakref.ref)
    return False


def copy_reference(thread: int, reference: weakref.ref, memo: dict[int, Any]) -> weakref.ref:
    """A weak reference to a model or an optimizer that is copied refers to the copy."""
    old = reference()
    ours = thread == threading.get_ident() and isinstance(old, nn.Module | torch.optim.Optimizer)
    return weakref.ref(copy.deepcopy(old, memo)) if ours else reference


@contextlib.contextmanager
def pretend() -> Iterator[Pretend]:
    """A world of fake tensors, in which nothing is compiled: PyTorch's compiler would crash on them."""
    with ALONE, contextlib.ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # only where something compiles: loading it takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(masks_as_for_real())
        # It prints a traceback of PyTorch's own files before it raises. What is raised has the user's line.
        stack.enter_context(mock.patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True))
        if gc.isenabled():  # the collector would search millions of objects, and when it runs is chance
            gc.disable()
            stack.callback(gc.enable)
        if torch.get_default_device().type != "cpu":  # a caller's `with torch.device("meta")` is for the model alone:
            stack.enter_context(torch.device("cpu"))  # an optimizer's counter of steps has a number
        # A distribution looks whether its numbers are allowed, unless its user or this says no.
        stack.enter_context(mock.patch.object(torch.distributions.Distribution, "_validate_args", False))
        stack.enter_context(OneDevice("cpu"))
        yield stack.enter_context(Pretend())


# The operators whose fake kernel says other bytes than the CPU's kernel owns, or refuses what that accepts.


def grouped_products(a: Tensor, b: Tensor, offsets: Any = None, bias: Any = None, out_dtype: Any = None) -> Tensor:
    """One matrix product for each expert. The fake kernel wants BF16, as a GPU's does; the CPU's takes FP32."""
    if a.dim() == b.dim() == 2:
        return a.new_empty(offsets.shape[0], a.shape[0], b.shape[1])
    rows = (a.shape[0], a.shape[1]) if a.dim() == b.dim() == 3 else (a.shape[-2] if a.dim() == 2 else a.shape[1],)
    return a.new_empty(*rows, b.shape[-1])


def reduced_in_place(option: int) -> Callable[..., Tensor]:
    """A loss that is summed inside the memory of its unreduced values: one number is returned, and that memory stays.

    option: which of the options after the two tensors says how to reduce; 0 means not at all.
    """

    def loss(x: Tensor, y: Tensor, *options: Any) -> Tensor:
        values = x.sub(y)
        return values if options[option : option + 1] == (0,) else values.as_strided((), ())

    return loss


def by_trial(operator: Any) -> Callable[..., tuple[Tensor, ...]]:
    """Runs the operator once on zeros, to learn what its results are: no kernel says how large a reserve is."""

    def shapes(args: Any, half: torch.dtype | None = None) -> list[tuple[torch.Size, torch.dtype]]:
        """Of the results; with `half` those of FP32, called half."""
        zeros = tree_map_only(Tensor, lambda t: torch.zeros(t.shape, dtype=torch.float32 if half else t.dtype), args)
        return [(x.shape, half if half and x.is_floating_point() else x.dtype) for x in operator(*zeros)]

    def run(*args: Any) -> tuple[Tensor, ...]:
        half = next((t.dtype for t in tree_leaves(args) if isinstance(t, Tensor) and t.dtype in HALVES), None)
        with torch_private.without_modes():
            try:
                found = shapes(args)
            except RuntimeError:  # this processor has no kernel for 16 bits
                if half is None:
                    raise
                found = shapes(args, half)
        return tuple(torch.empty(shape, dtype=dtype) for shape, dtype in found)

    return run


def one_number(tensor: Tensor) -> float | None:
    """What a loop reads outside of forward: 1 in an optimizer's step, which divides by it, else 0, such as a loss."""
    position = None if (recorder := current_recorder()) is None else recorder.position
    if position is None or (tensor.dtype == torch.bool if position.in_step else len(position.running) > 1):
        return None  # what it decides would change the step
    return (float if tensor.is_floating_point() else bool if tensor.dtype == torch.bool else int)(position.in_step)


OWN_ANSWERS: dict[Any, Callable[..., Any]] = {
    # An engine makes a parameter that is away a `Released`, of which the fake mode does not know the device.
    torch.ops.prim.device.default: lambda tensor: torch.device("cpu"),
    aten._grouped_mm.default: grouped_products,
    aten.mse_loss.default: reduced_in_place(0),
    aten.smooth_l1_loss.default: reduced_in_place(0),
    aten.soft_margin_loss.default: reduced_in_place(0),
    aten.binary_cross_entropy.default: reduced_in_place(1),
    aten.unsafe_split.Tensor: torch.split,  # it returns views, which its schema does not say
    aten.mkldnn_rnn_layer.default: by_trial(aten.mkldnn_rnn_layer.default),
}
