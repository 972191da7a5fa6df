"""Fake tensors: a training step of a model that this machine could not hold.

    real    a shape, a dtype, and a storage full of numbers
    fake    a shape, a dtype, and a storage that only says how many bytes it has

An operator on fake tensors computes shapes and no numbers. So a step of 8 billion parameters takes seconds and some
hundred MiB, and every tensor in it is born and dies as the real one does: a memory ledger counts the same bytes.

PyTorch's FakeTensorMode is all of that. Two things are added here, for a model that nobody here has seen.
Building: `build` calls the user's function on the device "meta", where tensors have no numbers either. What looks at a
number there is built again for real. Operators: a few own other memory than their fake kernel says (`OWN_ANSWERS`).
"""

import contextlib
import copy
import gc
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from minizero import torch_private
from minizero.xray.hugging_face import masks_as_for_real

aten = torch.ops.aten


def build(make: Callable[[], Any]) -> Any:
    """What `make()` returns, if possible without a number: on "meta". Code that reads a number builds for real."""
    try:
        with torch.device("meta"):
            return make()
    except Exception as on_meta:
        try:
            return make()
        except Exception as error:
            raise error from on_meta


class AsFake(TorchFunctionMode):
    """While it is entered, `copy.deepcopy` makes tensors of `mode`: on the CPU, and sharing what they shared."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode
        self.storages: dict[int, torch.UntypedStorage] = {}  # by the number of the storage that was copied

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:  # of a buffer, or any other tensor
            tensor, memo = args
            return memo.setdefault(id(tensor), self.fake(tensor))
        if func is Tensor.clone:  # by which a parameter copies its data
            return self.fake(args[0])
        return func(*args, **kwargs or {})

    def fake(self, tensor: Tensor) -> Tensor:
        """A fake tensor at the same place of a storage of the same size."""
        old = tensor.untyped_storage()
        new = self.storages.setdefault(
            torch_private.storage_id(old),
            torch.empty(old.nbytes(), dtype=torch.uint8, device="meta").untyped_storage(),
        )
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        bare = torch.empty(0, dtype=tensor.dtype, device="meta").set_(new, *place)
        return FakeTensor(self.mode, bare, torch.device("cpu"))


class Pretend(FakeTensorMode):
    """PyTorch's fake tensors, and the operators of `OWN_ANSWERS`. Real tensors from before may take part."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = OWN_ANSWERS.get(func)
        if own is None:
            return super().dispatch(func, types, args, kwargs or {})
        with self:
            return own(*args, **kwargs or {})

    def copy(self, value: Any) -> Any:
        """A copy of modules and tensors, real or on meta, as fake ones."""
        with torch_private.without_modes(), AsFake(self):  # this mode would fake what it is given by itself
            return copy.deepcopy(value)


@contextlib.contextmanager
def pretend() -> Iterator[Pretend]:
    """A world of fake tensors, in which nothing is compiled: PyTorch's compiler would crash on them."""
    with contextlib.ExitStack() as stack:
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

    def run(*args: Any) -> tuple[Tensor, ...]:
        with torch_private.without_modes():
            zeros = tree_map_only(Tensor, lambda t: torch.zeros(t.shape, dtype=t.dtype), args)
            shapes = [(result.shape, result.dtype) for result in operator(*zeros)]
        return tuple(torch.empty(shape, dtype=dtype) for shape, dtype in shapes)

    return run


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
