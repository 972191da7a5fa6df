"""Hooks on the model and on the optimizer tell the recorder what is what, and when.

    what     parameters, gradients and buffers belong to the model's modules, states to the optimizer
    when     the model's forward begins; a module's begins and ends; the optimizer's step begins and ends

No hook tells when a backward begins and ends: the recorder sees that by itself.
"""

import functools
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from minizero.memory.recorder import Recorder


class Hooks:
    """Hooks on a model, a plain module or an engine, and on an optimizer, for as long as a ledger is open."""

    def __init__(self, recorder: Recorder, model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> None:
        self.recorder = recorder
        self.position = recorder.position
        self.handles: list[Any] = []
        self.owner = WeakTensorKeyDictionary()  # by parameter: the name of its module
        self.modules: dict[str, nn.Module] = {}  # by name
        if model is not None:
            self._watch_model(model)
        if optimizer is not None:
            self._find_states(optimizer)  # those from before
            self.handles.append(optimizer.register_step_pre_hook(lambda *_: self.position.turn_step(True)))
            self.handles.append(optimizer.register_step_post_hook(self._find_states))  # a first step makes them
            self.handles.append(optimizer.register_step_post_hook(lambda *_: self.position.turn_step(False)))

    def remove(self) -> None:
        """Leave model and optimizer as they were."""
        for handle in self.handles:
            handle.remove()

    def look_again(self) -> None:
        """Find what the modules hold now: a model that was moved or cast has other storages."""
        for path, module in self.modules.items():
            self._watch_own(path, module)

    def _watch_model(self, model: nn.Module) -> None:
        # An engine's only child is the module that it wraps, under the name "module".
        children = dict(model.named_children())
        inner = children["module"] if list(children) == ["module"] else model
        enter, leave = self.position.running.append, self.position.leave_module

        for path, module in inner.named_modules():
            path = path or type(inner).__name__
            self.modules[path] = module
            self._watch_own(path, module)
            if any(map(is_lazy, (*module._parameters.values(), *module._buffers.values()))):
                # They get their shapes in the module's first forward.
                self.handles.append(module.register_forward_hook(functools.partial(self._watch_own, path)))
            # `prepend`: before any hook that may fail. `always_call`: recompute leaves a forward by an exception.
            self.handles.append(module.register_forward_pre_hook(lambda *_, path=path: enter(path), prepend=True))
            self.handles.append(module.register_forward_hook(lambda *_, path=path: leave(path), always_call=True))

        # What an engine holds besides: its shards, which are named after their units, and its replicas. The masters of
        # what does not train are no shards: `named_parameters()` are for the optimizer.
        for name, parameter in model.named_parameters():
            if not is_lazy(parameter):
                self._watch_parameter(parameter, name)
        units = vars(model).get("units")
        for unit in units if isinstance(units, list) else []:
            for tensor in getattr(unit, "replica", None), None if getattr(unit, "trains", True) else unit.master:
                if tensor is not None:
                    self.recorder.claim(tensor, "parameters", unit.name.removesuffix(" (frozen)"))

        self.handles.append(model.register_forward_pre_hook(lambda *_: self.position.enter_forward(), prepend=True))
        self.handles.append(model.register_forward_pre_hook(lambda *_: self.look_again(), prepend=True))  # runs first

    def _watch_own(self, path: str, module: nn.Module, *_: Any) -> None:
        for parameter in module._parameters.values():
            if parameter is not None and not is_lazy(parameter):
                self._watch_parameter(parameter, path)
        for buffer in module._buffers.values():
            if buffer is not None and not is_lazy(buffer):
                self.recorder.claim(buffer, "buffers", path)

    def _watch_parameter(self, parameter: torch.Tensor, path: str) -> None:
        known = parameter in self.owner
        path = self.owner.setdefault(parameter, path)  # a tied parameter belongs to the first module that has it
        self.recorder.claim(parameter, "parameters", path)
        if known:
            return
        self._claim_gradient(parameter)  # the one from before
        if parameter.requires_grad and parameter.is_leaf:
            self.handles.append(parameter.register_post_accumulate_grad_hook(self._claim_gradient))

    def _claim_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:  # an engine's own hook may have taken it away
            self.recorder.claim(parameter.grad, "gradients", self.owner[parameter])

    def _find_states(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter, state in optimizer.state.items():
            at_host = getattr(parameter.untyped_storage(), "category", None) == "host"
            for tensor in tree_leaves(state):  # L-BFGS has lists
                self.recorder.claim(tensor, "host" if at_host else "optimizer", self.owner.get(parameter, ""))
