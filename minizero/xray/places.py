"""Host and card: where a tensor lies, for code that says "cuda" on a machine that has none.

To PyTorch all tensors of an X-ray are the CPU's, or "meta". Each storage has a mark, its place: the card, or the host.

    device="cuda", .to("cuda"), .cuda()     the card's; what lies on the host is copied
    device="cpu", .to("cpu"), .cpu()        the host's; what lies on the card is copied
    what an operator makes                  lies where its inputs lie

What the host has is counted as "host", which is not in the total. Code that never says "cuda" has no marks, and all of
it is the card's.
"""

import contextlib
import functools
import importlib.machinery
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from minizero.memory.operators import Watcher
from minizero.torch_private import current_backward

HOST, CARD = torch.device("cpu"), torch.device("cuda", 0)
TWO = "it uses a second card, and one is counted: write 'cpu' for what lies on another, and it is left out"
MIXED = "one tensor lies on the host, another on the card, and a GPU would refuse it: add .to('cuda')"
# These take tensors of both places, and what they make lies where their first does. Indices may come from the host.
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
COPYING = {"copy_", "_to_copy", "_foreach_copy_", "set_", "_pack_padded_sequence"}


class Here(threading.local):
    """What holds in this thread."""

    marks = False  # do tensors lie on host or card? Else all are in one place
    making: torch.device | None = None  # the place of what is made now, if it is not its inputs'
    caller: torch.device | None = None  # the place of what is given to the function that runs now
    latest = HOST  # the place of the operator that ran last
    inside = 0  # operators that run now: to PyTorch's own code, which they call, all is the CPU's
    imports = False  # is a file imported now? What it makes has numbers, since a second import would find the same
    card: Any = None  # a `Gpu`, while a step runs as on a card
    notes: set[str]  # gets sentences for the report meanwhile


here = Here()


@contextlib.contextmanager
def having(**names: Any) -> Iterator[None]:
    """In the block, `here` has these values."""
    before = {name: getattr(here, name, None) for name in names}
    vars(here).update(names)
    try:
        yield
    finally:
        vars(here).update(before)


def meant(device: Any) -> torch.device | None:
    """The place that a device means: a number is a card's. None if it is neither host nor card."""
    if type(device) not in (int, str, torch.device):
        return None
    device = torch.device("cuda", device) if type(device) is int else torch.device(device)
    if device.type == "cuda" and device.index not in (None, 0):
        raise ValueError(TWO)
    return {"cpu": HOST, "cuda": CARD}.get(device.type)


def storage_of(tensor: Tensor) -> Any:
    """The tensor's storage; None if it has none of its own, as a sparse one."""
    with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError):
        return tensor.untyped_storage()


def place_of(tensor: Tensor) -> torch.device:
    """Where a tensor lies."""
    return getattr(storage_of(tensor), "place", HOST) if here.marks else HOST


def put(tensor: Tensor, place: torch.device) -> None:
    """Say where a tensor lies. The ledger counts what a step has on the host as "host"."""
    if (storage := storage_of(tensor)) is not None:
        storage.place = place
        if place == HOST and isinstance(tensor, FakeTensor):
            storage.category = "host"


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors among an operator's arguments, or its results, and in their lists."""
    parts = (part for value in values for part in (value if isinstance(value, list | tuple) else (value,)))
    return [part for part in parts if isinstance(part, Tensor)]


def marking(run: Callable[..., Any], func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator; what it makes lies where it should. `ValueError` if a GPU would refuse its inputs."""
    given, asked = tensors_in((*args, *kwargs.values())), meant(kwargs.get("device"))
    place = here.making or (CARD if asked == CARD else place_for(func, given))
    kwargs = kwargs | {"device": HOST} if asked == CARD else kwargs  # PyTorch's Python says what a tensor has said
    with having(making=place, inside=here.inside + 1):  # also for the operators that it is made of
        result = run(func, args, kwargs)
    here.latest = place
    for made in tensors_in(result if isinstance(result, tuple | list) else (result,)):
        if not hasattr(storage_of(made), "place"):  # otherwise it is one of its inputs, or a view
            put(made, place)
    return result


def place_for(func: Any, given: list[Tensor]) -> torch.device:
    """Where an operator's result lies. Without inputs, such as zeros: with those of the function around it.

    Backward has no such function: there it lies where the operator before has run.
    """
    if not given:
        return (here.caller or HOST) if current_backward() == -1 else here.latest
    places, name = [place_of(tensor) for tensor in given], func.overloadpacket.__name__
    if name in COPYING or (name in INDEXING and places[0] == CARD) or CARD not in places:
        return places[0]
    if any(place == HOST and tensor.dim() for place, tensor in zip(places, given)):
        raise ValueError(MIXED)  # but one number of the host's goes everywhere
    return CARD


class Marks(Watcher):
    """While it is entered, operators mark what they make: around make(). `Pretend` does so by itself."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return marking(few_have_numbers, func, args, kwargs or {})


FEW = 4096  # numbers


def few_have_numbers(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator around make(), where most tensors are on "meta". Small ones have numbers until they meet these.

    So a sampler may draw, and a list of dropout rates be read, while the weights beside them have none.
    """
    given = tensors_in((*args, *kwargs.values()))
    if len({tensor.is_meta for tensor in given}) == 2:
        first = 1 if func._schema.is_mutable else 0  # what it writes stays what it is
        rest = tree_map_only(Tensor, lambda x: x if x.is_meta else x.to("meta"), (args[first:], kwargs))
        args, kwargs = (*args[:first], *rest[0]), rest[1]
    result = func(*args, **kwargs)
    if not given and isinstance(result, Tensor) and result.is_meta and result.numel() <= FEW:
        return func(*args, **kwargs | {"device": HOST})
    return result


class OneDevice(TorchFunctionMode):
    """While it is entered, "cuda" in the user's code means `device`: without a GPU, PyTorch would abort the process.

    So does "cpu" if a tensor has said it, and not the user, who may write it to get numbers.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in QUESTIONS and here.marks:
            return QUESTIONS[func](place_of(args[0]))
        asked = kwargs.get("device")
        place = meant(asked)
        if place == CARD or (place == HOST and type(asked) is torch.device and not here.imports):
            kwargs["device"] = self.device
        if func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], Tensor):
            kwargs["device"] = "cpu"  # Python has the numbers anyway
        kwargs.pop("pin_memory", None)
        caller = CARD if CARD in map(place_of, tensors_in((*args, *kwargs.values()))) else HOST
        with having(making=place or here.making, caller=caller):
            return func(*args, **kwargs)


# What a tensor says to its user, by its place.
QUESTIONS: dict[Any, Callable[[torch.device], Any]] = {
    Tensor.device.__get__: lambda place: place,  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: CARD.__eq__,  # type: ignore[attr-defined]
    Tensor.get_device: lambda place: 0 if place == CARD else -1,
}


@contextlib.contextmanager
def lent(*names: tuple[Any, str, Callable[..., Any]]) -> Iterator[None]:
    """While it is entered, each `owner.name` is another function, called as `function(before, *args, **kwargs)`.

    before: what was there. A name is the whole process's, so other threads call that.
    """
    thread = threading.get_ident()

    def calling(before: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            here = threading.get_ident() == thread
            return function(before, *args, **kwargs) if here else before(*args, **kwargs)

        return functools.wraps(before)(call) if callable(before) else call

    with contextlib.ExitStack() as stack:
        for owner, name, function in names:
            lending = calling(getattr(owner, name, None), function)
            stack.enter_context(mock.patch.object(owner, name, lending, create=True))
        yield


def moved(tensor: Tensor, place: torch.device) -> Tensor:
    """A copy at another place; its gradient goes back."""
    back = place_of(tensor)
    with having(making=place):
        copied = tensor.clone()
    if copied.grad_fn is not None:
        copied.grad_fn.register_hook(lambda given, _: (given[0] if given[0] is None else moved(given[0], back),))
    return copied


def to(before: Callable[..., Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`Tensor.to`, which copies between host and card. It casts on the host, as PyTorch does."""
    first, rest = (args[0], args[1:]) if args else (None, ())
    if isinstance(other := kwargs.get("other", first), Tensor):
        place, rest = place_of(other), (other.dtype, *rest)
    elif (place := meant(kwargs.get("device", first))) is None:  # type: ignore[assignment]
        return before(tensor, *args, **kwargs)
    options = dict(zip(("dtype", "non_blocking", "copy"), rest)) | kwargs
    options = {key: options[key] for key in ("dtype", "copy", "memory_format") if options.get(key) is not None}
    if here.marks and not here.inside and place != place_of(tensor):
        options.pop("copy", None)
        if place == CARD and options:
            tensor, options = before(tensor, **options), {}
        tensor = moved(tensor, place)
    return before(tensor, **options) if options else tensor


def deep_copy(before: Any, tensor: Tensor, memo: Any) -> Tensor:
    """`copy.deepcopy`, which copies a storage without an operator."""
    put(copied := before(tensor, memo), place_of(tensor))
    return copied


def without_workers(before: Callable[..., Any], loader: DataLoader) -> Any:
    """`DataLoader.__iter__`: the batches are made in this process. In a worker's tensors would have numbers."""
    if not loader.num_workers:
        return before(loader)
    with mock.patch.multiple(loader, num_workers=0, timeout=0):
        return before(loader)


def moves() -> contextlib.AbstractContextManager:
    """While it is entered, tensors of this thread move between host and card, and loaders have no workers."""
    plain = Tensor.to
    return lent(
        (Tensor, "to", to),
        (Tensor, "cpu", lambda before, x, *_, **__: to(plain, x, HOST)),
        (Tensor, "cuda", lambda before, x, device=0, *_, **__: to(plain, x, 0 if device is None else device)),
        (Tensor, "pin_memory", lambda before, x, *_: moved(x, HOST) if here.marks else x),
        (Tensor, "__deepcopy__", deep_copy),
        (Tensor, "record_stream", lambda before, x, *_: None),
        (DataLoader, "__iter__", without_workers),
        (DataLoader, "check_worker_number_rationality", lambda before, loader: None),  # it would warn of them
    )


def with_numbers(before: Callable[..., None], *args: Any) -> None:
    """Execute the file of a module that is imported, and of those that it imports."""
    with contextlib.nullcontext() if here.imports else torch.device("cpu"), having(imports=True):
        before(*args)


@contextlib.contextmanager
def in_make(device: str) -> Iterator[None]:
    """Around the user's make(): what is made there is `device`'s to PyTorch, and lies on host or card."""
    imported = lent((importlib.machinery.SourceFileLoader, "exec_module", with_numbers))
    with torch.device(device), OneDevice(device), Marks(), moves(), imported, having(marks=True):
        yield
