"""An oracle for host and card: a user's loop on fake tensors of a device that PyTorch itself keeps apart from the CPU.

PyTorch has a place for a device of somebody else's ("privateuse1"), and since 2.13 a backend for it in Python alone. So
here a tensor that is moved is copied by PyTorch's own rules, a mixed operator is PyTorch's own error, and what lives
on that device is counted by a tracker that knows nothing of an X-ray. "cuda" in a script means that device.

    python -m tests.support.other_device FILE.py:make …     prints {"FILE.py:make": bytes at the peak of a step}

It runs in a process of its own: autograd starts a thread for such a device, and after that no process can be forked.
"""

import contextlib
import json
import os
import runpy
import sys
import weakref
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from minizero import torch_private
from minizero.xray.plan import use_foreach

POSSIBLE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
CARD = "gpu:0"
aten = torch.ops.aten


class Fakes(FakeTensorMode):
    """Fake tensors; a number that is read is 1, by which an optimizer may divide."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten._local_scalar_dense.default and args[0].constant is None:
            return (float if args[0].is_floating_point() else int)(1)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func is aten.randint.default and result.device.type == "cpu":
            with torch_private.without_modes():
                result.constant = torch.zeros(result.shape, dtype=torch.long)  # where a loop's samples begin
        return result


class Tracker(TorchDispatchMode):
    """Bytes of the storages that live on the card."""

    def __init__(self):
        super().__init__()
        self.peak, self.alive = 0, weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "gpu":
                self.alive[tensor.untyped_storage()] = tensor.untyped_storage().nbytes()
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


class Cuda(TorchFunctionMode):
    """ "cuda" means the card, in whatever a function of PyTorch is given."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args, kwargs = tree_map(translated, (args, kwargs or {}))
        kwargs.pop("pin_memory", None)
        if func is torch.Tensor.pin_memory:
            return args[0].clone()
        if func in (torch.Tensor.to, torch.Tensor.cuda):
            args[0].constant = None  # a number that PyTorch knows is computed on, on that device, for real
        return args[0].to(CARD) if func is torch.Tensor.cuda else func(*args, **kwargs)


def translated(value):
    """A device of the script's as one of this process."""
    named = isinstance(value, str) and value.startswith("cuda")
    return torch.device(CARD) if named or (isinstance(value, torch.device) and value.type == "cuda") else value


def several_at_once(self, *args, _init=torch.optim.Optimizer.__init__, **kwargs):
    """An optimizer's `__init__`: it steps all tensors at once, as it does on a card for tensors that are not fake."""
    _init(self, *args, **kwargs)
    use_foreach(self)


def moved(self, *args, **kwargs):
    """`Module.to`, with new parameters: PyTorch swaps fake ones, which fails as long as a weak reference is there."""
    new = {}
    for module in self.modules():
        for held in (module._parameters, module._buffers):
            for name, old in held.items():
                if old is not None and old not in new:
                    copy = old.detach().to(*args, **kwargs)
                    new[old] = nn.Parameter(copy, old.requires_grad) if isinstance(old, nn.Parameter) else copy
                held[name] = new.get(old)
    return self


def peak(file, name):
    """Bytes on the card at the peak of a step after the first one."""
    nothing = dict.fromkeys(["synchronize", "manual_seed", "manual_seed_all", "empty_cache", "set_device"])
    answers = {"is_available": True, "get_device_name": "a card", "max_memory_allocated": 0, **nothing}
    patches = [(torch.cuda, each, lambda *_, value=value, **__: value) for each, value in answers.items()]
    patches += [(torch.optim.Optimizer, "__init__", several_at_once)]
    patches += [(nn.Module, "to", moved), (nn.Module, "cuda", lambda self, *_: moved(self, CARD))]
    patches += [(sys.modules[nn.DataParallel.__module__], "_get_available_device_type", lambda: None)]  # one card
    patches += [(sys, "argv", [file]), (sys, "path", [str(Path(file).parent), *sys.path])]
    patches += [(torch.Tensor, "numpy", lambda x: np.zeros(tuple(x.shape)))]
    patches += [(torch.distributions.Distribution, "_validate_args", False)]
    alone = property(lambda self: 0, lambda self, number: None)  # a loader's workers would have no fake tensors
    patches += [(torch.utils.data.DataLoader, "num_workers", alone, None, True)]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        stack.enter_context(Fakes(allow_non_fake_inputs=True))
        tracker = stack.enter_context(Tracker())
        stack.enter_context(Cuda())
        make = runpy.run_path(file)[name]  # the rest that it returns would hold a script's first batch
        model, step = make()
        model.train()
        calls = 3 if name == "every_third" else 1  # until its optimizer has stepped
        for call in range(2 * calls):
            tracker.peak = 0 if call == calls else tracker.peak
            step()
    return tracker.peak


if __name__ == "__main__":
    backend_registration._setup_privateuseone_for_python_backend("gpu")
    print(json.dumps({given: peak(*given.rsplit(":", 1)) for given in sys.argv[1:]}), flush=True)
    os._exit(0)  # at an end as usual autograd's thread for the device may abort the process
