"""What a script asks of a GPU or of its process group, answered on a machine that has neither: one table.

Only the user's code is answered, and libraries of models. PyTorch's own gets what it always gets, so that nothing in
there takes a GPU's way. A name in the table has a value, a function of the arguments, or a class in a class's place.
"""

import contextlib
import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

from flash.gpus import GPUS
from minizero.xray.lines import is_users
from minizero.xray.places import lent


class Quiet:
    """A stream, an event, a device's context, a call without a result: it does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> "Quiet":
        return self

    def __exit__(self, *_: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # such as what a copy asks for
            raise AttributeError(name)
        return lambda *_, **__: 1.0  # elapsed_time, by which some divide; query


class OneProcess(nn.Module):
    """DistributedDataParallel of one process: its buckets are as large as the gradients, unless these are views."""

    def __init__(self, module: nn.Module, *_: Any, gradient_as_bucket_view: bool = False, **__: Any) -> None:
        super().__init__()
        self.module = module
        trained = [] if gradient_as_bucket_view else [p for p in module.parameters() if p.requires_grad]
        self.buckets = [torch.empty_like(parameter, requires_grad=False) for parameter in trained]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    no_sync = contextlib.nullcontext  # nothing is sent anyway


def on_card(dtype: torch.dtype, *given: Any) -> torch.Tensor:
    """What torch.cuda.FloatTensor and its like make, of a size or of numbers."""
    if all(isinstance(number, int) for number in given):
        return torch.empty(*given, dtype=dtype, device="cuda")
    return torch.tensor(given[0], dtype=dtype, device="cuda")


def class_calling(function: Callable[..., Any]) -> type:
    """A class whose call is the function's."""
    return type("", (), {"__new__": lambda _, *args, **kwargs: function(*args, **kwargs)})


# Names of torch.cuda: what does nothing; what returns a number of bytes.
QUIET = """Event Stream stream device device_of current_stream default_stream set_stream
set_device manual_seed manual_seed_all seed seed_all init ipc_collect
reset_peak_memory_stats reset_max_memory_allocated reset_max_memory_cached reset_accumulated_memory_stats
set_per_process_memory_fraction"""
NO_BYTES = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved utilization"
TENSORS = "FloatTensor HalfTensor BFloat16Tensor DoubleTensor LongTensor IntTensor ByteTensor BoolTensor"


def table(card: str) -> dict[Any, dict[str, Any]]:
    """By owner: each name, and its answer."""
    gpu, memory, name = GPUS[card], int(GPUS[card].usable * 2**30), f"NVIDIA {card}"
    about = SimpleNamespace(name=name, total_memory=memory, multi_processor_count=gpu.processors)
    about.major, about.minor = gpu.capability
    of_card = {"is_available": True, "device_count": 1, "synchronize": Quiet, "empty_cache": Quiet}
    cuda: dict[str, Any] = of_card | dict.fromkeys(QUIET.split(), Quiet) | dict.fromkeys(NO_BYTES.split(), 0)
    cuda |= {"get_device_name": name, "get_device_properties": about, "get_device_capability": gpu.capability}
    cuda |= {"current_device": 0, "is_bf16_supported": gpu.capability >= (8, 0), "get_arch_list": [gpu.kind]}
    cuda |= {"is_initialized": True, "mem_get_info": (memory, memory), "memory_summary": "", "memory_stats": Counter()}
    cuda |= {name: class_calling(functools.partial(on_card, getattr(torch, name).dtype)) for name in TENSORS.split()}
    started = [torch.distributed.is_available() and torch.distributed.is_initialized()]
    group: dict[str, Any] = dict.fromkeys(["destroy_process_group", "barrier", "all_reduce", "broadcast"], Quiet)
    group |= {"init_process_group": lambda *_, **__: started.append(True), "is_initialized": lambda: any(started)}
    group |= {"get_rank": 0, "get_world_size": 1, "get_backend": "nccl"}
    return {
        torch.cuda: cuda,
        torch.accelerator: of_card | {"current_accelerator": torch.device("cuda")},
        torch.distributed: group,
        nn.parallel: {"DistributedDataParallel": OneProcess},
        torch: {"Generator": class_calling(lambda *_, **__: torch.Generator())},  # the host's
    }


def asks(frame: FrameType) -> bool:
    """Is it code of the user's, or a notebook's cell, that asks?"""
    return is_users(file := frame.f_code.co_filename) or file.startswith("<")


def asked(answer: Any, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """An answer as `lent` wants it: for the user's code, else what was there."""
    if not asks(sys._getframe(2)):
        return before(*args, **kwargs)
    return answer(*args, **kwargs) if callable(answer) else answer


class StandIn(type):
    """A class in the place of another: if the user's code of one thread calls it, it is itself, else that other."""

    original: type
    thread: int

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        ours = threading.get_ident() == cls.thread and asks(sys._getframe(1))
        return super().__call__(*args, **kwargs) if ours else cls.original(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) or isinstance(instance, cls.original)


@contextlib.contextmanager
def answers(card: str | None) -> Iterator[None]:
    """While it is entered, the user's code of this thread finds one GPU. None: it finds none."""
    with contextlib.ExitStack() as stack:
        for owner, names in table(card).items() if card else ():
            for name, answer in names.items():
                if isinstance(original := getattr(owner, name, None), type):
                    made = StandIn(name, (answer,), {"original": original, "thread": threading.get_ident()})
                    stack.enter_context(mock.patch.object(owner, name, made))
                elif original is not None:
                    stack.enter_context(lent((owner, name, functools.partial(asked, answer))))
        yield
