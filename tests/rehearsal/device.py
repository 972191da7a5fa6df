"""Two pretend GPUs. Every tensor stays in the CPU's memory, with its real values; a note on its storage says where it
would lie: `tensor.device` reads the note. Each operator that mixes devices raises `MixedDevices`, as a GPU would.

    torch.zeros(3, device="cuda")    makes it on the CPU, and notes cuda:0
    x.to("cuda")                     copies it, and notes cuda:0 on the copy
    x + y                            looks at both notes, and notes the same on the result

A view shares the storage, hence the note. Two notes may differ where PyTorch allows it: in a copy, in an index of a
tensor on a GPU, and where one is a CPU tensor without dimensions.
"""

import functools
import os
import sys
import threading
import types
from contextlib import contextmanager, nullcontext

import torch
import torch._dynamo  # which optimizers would import later, and which then reads what stands in torch.cuda
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from minizero.memory.operators import IN_PARTS, Watcher, learn, outputs_of
from minizero.ranks.threads import ThreadTransport
from minizero.recompute.guards import generators as set_back
from minizero.recompute.guards import state

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
VENV = os.path.join(ROOT, ".venv")
CPU = torch.device("cpu")
GPUS = [torch.device("cuda", index) for index in range(2)]
UNKNOWN = "unknown"  # made inside PyTorch, which says "the device of that other tensor" where we see none

aten = torch.ops.aten
COPIES = (aten.copy_.default, aten._to_copy.default, aten._foreach_copy_.default, aten.set_.source_Tensor)
INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
ALSO_WITH_SCALARS = (*INDEXED[1:], aten.fill_.Tensor, aten.fill.Tensor, aten.masked_fill.Tensor)

real_transfer, real_device = ThreadTransport.transfer, torch.Tensor.device.__get__
thread = threading.local()
generators = {}  # where each draws, by its address: an operator is given another object for it
files = {}  # the name that code was compiled under: how a message calls it


class MixedDevices(RuntimeError):
    """An operator, or a generator, met tensors of another device."""


def note(tensor):
    """The device that is noted for the tensor's storage."""
    device = real_device(tensor)
    if device.type != "cpu" or tensor.layout != torch.strided:
        return device
    return getattr(tensor.untyped_storage(), "lies_on", CPU)


def where(tensor):
    """The device that `tensor.device` answers."""
    return CPU if (device := note(tensor)) is UNKNOWN else device


def put(tensor, device):
    """Note the device of a tensor that was made for it."""
    tensor.untyped_storage().lies_on = device
    return tensor


def line():
    """The innermost line on the stack that is ours, and the line of a program that it was called from."""
    found, frame = [], sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        ours = name.startswith(ROOT) and not name.startswith((HERE, VENV))
        ours = ours and frame.f_code.co_name != "__torch_dispatch__"  # a ledger's, which only looks on
        if name in files or (ours and (not found or "/tests/" in name)):
            found.append(f"{files.get(name) or os.path.relpath(name, ROOT)}, line {frame.f_lineno}")
        if name in files or (ours and "/tests/" in name):
            break
        frame = frame.f_back
    return ", called from ".join(found) or "a thread of the package"


def full(device):
    """A torch.device with its index; `meta` is left alone."""
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return torch.device("cuda", current()) if device.type == "cuda" and device.index is None else device


def current():
    return getattr(thread, "current", 0)


# Operators.


class Watch(Watcher):
    """Compares the notes of an operator's tensors, and notes the device of what it makes."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if (kinds := outputs_of.get(id(func))) is None:
            kinds = learn(func)
        if kinds is IN_PARTS:
            return self.run_in_parts(func, args, kwargs)
        given = tree_leaves((args, kwargs))
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        home = self.check(func, args, tensors)
        for generator in given:
            if isinstance(generator, torch._C.Generator) and home is not None:
                check_generator(func, generator, home)
        result = func(*args, **kwargs)
        if not kinds or home == CPU:  # nothing new, or nothing to note
            return result
        known = {tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout == torch.strided}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and real_device(tensor) == CPU and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                if storage._cdata not in known:
                    storage.lies_on = home or UNKNOWN
        return result

    def check(self, func, args, tensors):
        """The one device of the tensors, None where that is open; `MixedDevices` where there are two."""
        if func._schema.name.startswith("aten::_foreach_") and func not in COPIES:
            lists = [value for value in args if isinstance(value, list | tuple) and value]
            others = [value for value in args if isinstance(value, torch.Tensor)]
            homes = [self.common(func, [*together, *others], True) for together in zip(*lists)]
            return next(iter(homes), None)
        if func in COPIES:
            tensors = tensors[:1]
        elif func in INDEXED and note(args[0]) != CPU:  # indices may stay on the CPU
            tensors = [args[0], *args[2:3]]
        scalars = torch.Tag.pointwise in func.tags or func in ALSO_WITH_SCALARS
        written = args[0] if func._schema.name.endswith("_") and args and isinstance(args[0], torch.Tensor) else None
        return self.common(func, [t for t in tensors if isinstance(t, torch.Tensor)], scalars, written)

    def common(self, func, tensors, scalars, written=None):
        found = {}
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and (device := note(tensor)) is not UNKNOWN:
                if found.get(device) is None or found[device].dim() == 0:
                    found[device] = tensor
        if len(found) == 2 and scalars and CPU in found and found[CPU].dim() == 0 and found[CPU] is not written:
            del found[CPU]
        if len(found) > 1:
            each = " and ".join(f"{device} {tuple(tensor.shape)}" for device, tensor in found.items())
            raise MixedDevices(f"{line()}: {func} got tensors on {each}")
        return next(iter(found), None)


# Functions that make tensors or move them.


class Move(torch.autograd.Function):
    """`x.to(device)`, whose gradient goes back to where x is."""

    @staticmethod
    def forward(ctx, x, device, dtype):
        ctx.home, ctx.dtype = where(x), x.dtype
        return put(REAL["Tensor.to"](x.detach(), dtype=dtype or x.dtype, copy=True), device)

    @staticmethod
    def backward(ctx, gradient):
        return Move.apply(gradient, ctx.home, ctx.dtype), None, None


def to(x, *args, **kwargs):
    """Tensor.to in all its forms."""
    kwargs.pop("non_blocking", None)
    args = [value for value in args if not isinstance(value, bool)]
    if args and isinstance(args[0], torch.Tensor):
        args = [where(args[0]), args[0].dtype]
    device = kwargs.pop("device", None)
    if args and (args[0] is None or isinstance(args[0], str | int | torch.device)):
        device = args.pop(0)
    dtype = kwargs.pop("dtype", None) or (args[0] if args else None)
    if device is None or full(device) == where(x):
        return REAL["Tensor.to"](x, dtype=dtype or x.dtype, **kwargs)
    if "meta" in (full(device).type, real_device(x).type):
        return REAL["Tensor.to"](x, device, dtype=dtype, **kwargs)
    return Move.apply(x, full(device), dtype)


def maker(function, default):
    """A function that makes a tensor, on the device that is asked for."""

    @functools.wraps(function)
    def made(*args, device=None, pin_memory=False, **kwargs):
        device = default(*args) if device is None else full(device)
        if device.type == "meta" or kwargs.get("out") is not None:
            return function(*args, **({} if kwargs.get("out") is not None else {"device": device}), **kwargs)
        if kwargs.get("generator") is not None:
            check_generator(function.__name__, kwargs["generator"], device)
        tensor = function(*args, device=CPU, **kwargs)
        if tensor.layout == torch.strided and not (args and tensor is args[0]):
            put(tensor, device)
            tensor.untyped_storage().pinned = pin_memory
        return tensor

    return made


def default_device():
    """The device of `with torch.device(...)`, inside of which torch.get_default_device makes a tensor to ask."""
    around = [mode.device for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext)]
    return full(around[-1] if around else torch.get_default_device())


def of_data(*args):
    """torch.tensor(x): the device of x, if x is a tensor."""
    return where(args[0]) if args and isinstance(args[0], torch.Tensor) else default_device()


def as_tensor(data, dtype=None, device=None):
    if isinstance(data, torch.Tensor):
        return data.to(device or where(data), dtype or data.dtype)
    return put(REAL["as_tensor"](data, dtype=dtype, device=CPU), full(device) if device else default_device())


def numpy(x, **kwargs):
    if where(x) != CPU and not kwargs.get("force"):
        raise MixedDevices(f"{line()}: can't convert a tensor on {where(x)} to numpy: copy it to the CPU first")
    return REAL["Tensor.numpy"](x, **kwargs)


def array(x, *args, **kwargs):
    numpy(x.detach())
    return REAL["Tensor.__array__"](x, *args, **kwargs)


def set_gradient(x, gradient):
    if gradient is not None and note(gradient) not in (UNKNOWN, note(x)) and note(x) is not UNKNOWN:
        raise MixedDevices(f"{line()}: .grad of a tensor on {note(x)} is set to one on {note(gradient)}")
    torch._C.TensorBase.grad.__set__(x, gradient)


def pin_memory(x):
    pinned = x.clone()
    pinned.untyped_storage().pinned = True
    return pinned


class Generator(torch.Generator):
    """Draws what a CPU's draws, for tensors on its device only."""

    def __new__(cls, device="cpu"):
        generator = super().__new__(cls, "cpu")
        generators[generator._cdata] = generator.on = full(device)
        return generator

    device = property(lambda self: self.on)


def check_generator(what, generator, device):
    its = generators.get(generator._cdata, CPU)
    if device.type not in (its.type, "meta"):  # what has no data draws nothing
        raise MixedDevices(f"{line()}: {what} on {device} got a generator of {its}")


# torch.cuda.


class Anything:
    """A stream or an event: there is nothing to wait for."""

    def __init__(self, *args, **kwargs):
        self.device = GPUS[current()]

    def elapsed_time(self, other):
        return 1.0

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


def nothing(*args, **kwargs):
    return 0


def block(*args, **kwargs):
    return nullcontext()


def set_device(device):
    thread.current = full(device).index


PROPERTIES = types.SimpleNamespace(
    name="pretend GPU", total_memory=2**40, multi_processor_count=8, major=7, minor=0,
    shared_memory_per_block_optin=98304, shared_memory_per_multiprocessor=98304, L2_cache_size=2**22,
)  # fmt: skip
CUDA = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: len(GPUS),
    "current_device": current,
    "set_device": set_device,
    "get_device_name": lambda device=None: PROPERTIES.name,
    "get_device_properties": lambda device=None: PROPERTIES,
    "get_device_capability": lambda device=None: (7, 0),  # too old for Triton's kernels: `auto` takes tiles
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    **dict.fromkeys(("Event", "Stream", "current_stream"), Anything),
    **dict.fromkeys(("stream", "device", "device_of"), block),
    **dict.fromkeys(("synchronize", "empty_cache", "init", "reset_peak_memory_stats", "manual_seed_all"), nothing),
    **{f"{most}memory_{kind}": nothing for most in ("", "max_") for kind in ("allocated", "reserved")},
}

REAL = {
    "as_tensor": torch.as_tensor,
    **{f"Tensor.{name}": getattr(torch.Tensor, name) for name in ("to", "numpy", "__array__", "__deepcopy__")},
}


def pretend():
    """From now on this process has two GPUs."""
    for name in sorted({function.__name__ for function in _device_constructors()} - {"as_tensor", "nested_tensor"}):
        if not name.startswith(("fft", "sparse", "empty_quantized")):
            setattr(torch, name, maker(getattr(torch, name), of_data))
    for name in ("zeros", "ones", "empty", "full", "rand", "randn", "randint"):
        setattr(torch, f"{name}_like", maker(getattr(torch, f"{name}_like"), lambda x, *_: where(x)))
    for name in ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "new_empty_strided"):
        setattr(torch.Tensor, name, maker(getattr(torch.Tensor, name), lambda x, *_: where(x)))
    methods = {
        "device": property(where),
        "is_cuda": property(lambda x: where(x).type == "cuda"),
        "is_cpu": property(lambda x: where(x).type == "cpu"),
        "get_device": lambda x: -1 if where(x).index is None else where(x).index,
        "grad": property(torch._C.TensorBase.grad.__get__, set_gradient, torch._C.TensorBase.grad.__delete__),
        "to": to,
        "cpu": lambda x, **_: x.to("cpu"),
        "cuda": lambda x, device=None, **_: x.to("cuda" if device is None else device),
        "numpy": numpy,
        "__array__": array,
        "__deepcopy__": lambda x, memo: put(REAL["Tensor.__deepcopy__"](x, memo), where(x)),
        "pin_memory": pin_memory,
        "is_pinned": lambda x: getattr(x.untyped_storage(), "pinned", False),
        "record_stream": nothing,
    }
    for name, method in methods.items():
        setattr(torch.Tensor, name, method)
    torch.as_tensor, torch.Generator = as_tensor, Generator
    for name, stand_in in CUDA.items():
        setattr(torch.cuda, name, stand_in)
    torch.cuda.default_generators = tuple(map(Generator, GPUS))
    torch.accelerator.current_stream = Anything  # a build for CUDA asks it before each step of an optimizer
    run = threading.Thread.run

    def watched(self):
        with Watch():
            run(self)

    threading.Thread.run = watched
    for module in (state, set_back):
        module.without_modes = without_other_modes
    ThreadTransport.transfer = transfer
    # An operator of our own runs Python code, which is watched too.
    for operator in torch._library.custom_ops.OPDEFS.values():
        for kind, function in list(operator._backend_fns.items()):
            operator._backend_fns[kind] = in_watch(function)
    Watch().__enter__()


@contextmanager
def without_other_modes():
    with _disable_current_modes(), Watch():
        yield


def transfer(comm, outgoing, dst, incoming, src):
    """Threads could copy between devices. Processes could not."""
    for tensor in (outgoing, incoming):
        if tensor is not None and note(tensor) not in (UNKNOWN, comm.device):
            words = f"a rank on {comm.device} sends, or receives into, a tensor on {note(tensor)}"
            raise MixedDevices(f"{line()}: {words}: NCCL refuses that")
    return real_transfer(comm, outgoing, dst, incoming, src)


def in_watch(function):
    @functools.wraps(function)
    def watched(*args, **kwargs):
        with Watch():
            return function(*args, **kwargs)

    return watched
