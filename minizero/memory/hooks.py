"""What is what, and when: the ledger learns it from hooks on the model and on the optimizer.

    what     parameters, gradients and buffers belong to the model's modules, states to the optimizer
    when     the model's forward begins, a module's begins and ends, the optimizer's step begins and ends

(When a backward begins and ends the ledger sees by itself.)
"""

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from minizero.memory.ledger import Ledger


class Hooks:
    """Hooks on a model, a plain module or an engine, and on an optimizer, for as long as a ledger is open."""

    def __init__(self, ledger: "Ledger", model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> None:
        self.ledger, self.optimizer = ledger, optimizer
        self.handles: list[Any] = []
        self.owner: dict[int, str] = {}  # of each parameter, by its id: the name of its module
        self.places: list[tuple[str, dict[str, Any], str, torch.device, torch.dtype]] = []  # where each one was
        if model is not None:
            self._watch_model(model)
        if optimizer is not None:
            self._find_states()
            self.handles.append(optimizer.register_step_pre_hook(lambda *_: ledger.enter_step()))
            self.handles.append(optimizer.register_step_post_hook(lambda *_: self._after_step()))

    def remove(self) -> None:
        """Leave model and optimizer as they were."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def check_places(self) -> None:
        """`RuntimeError` where a parameter is on another device, or of another dtype, than when the ledger opened."""
        for name, parameters, key, device, dtype in self.places:
            now = parameters.get(key)
            if now is not None and (now.device, now.dtype) != (device, dtype):
                raise RuntimeError(
                    f"Ledger: {name} went from {dtype} on {device} to {now.dtype} on {now.device} while it was "
                    "watched: move or cast the model first, then open the ledger"
                )

    def _watch_model(self, model: nn.Module) -> None:
        children = dict(model.named_children())
        inner = children["module"] if list(children) == ["module"] else model  # of an engine, what it wraps
        for path, module in inner.named_modules():
            path = path or type(inner).__name__
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    name = f"{path}.{key}"
                    self.places.append((name, module._parameters, key, parameter.device, parameter.dtype))
                    self._watch_parameter(parameter, path)
            for buffer in module._buffers.values():
                if buffer is not None:
                    self.ledger.claim(buffer, "buffers", path)
            # The first of all hooks, and called after a failure too: recompute leaves a forward by an exception.
            enter, leave = self._module_hooks(path)
            self.handles.append(module.register_forward_pre_hook(enter, prepend=True))
            self.handles.append(module.register_forward_hook(leave, always_call=True))
        for name, parameter in model.named_parameters():  # an engine's shards, named after their units
            self._watch_parameter(parameter, name)
        for unit in _frozen_units(model):
            for tensor in (unit.replica, unit.master):  # which may be one and the same
                if tensor is not None:
                    self.ledger.claim(tensor, "parameters", unit.name.removesuffix(" (frozen)"))
        self.handles.append(model.register_forward_pre_hook(lambda *_: self._before_forward(), prepend=True))

    def _module_hooks(self, path: str) -> tuple[Any, Any]:
        ledger = self.ledger
        return lambda *_: ledger.enter_module(path), lambda *_: ledger.leave_module(path)

    def _watch_parameter(self, parameter: torch.Tensor, path: str) -> None:
        if id(parameter) in self.owner:  # tied
            return
        self.owner[id(parameter)] = path
        self.ledger.claim(parameter, "parameters", path)
        self._claim_gradient(parameter)
        if parameter.requires_grad and parameter.is_leaf:
            self.handles.append(parameter.register_post_accumulate_grad_hook(self._claim_gradient))

    def _claim_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:  # an engine takes it away at once
            self.ledger.claim(parameter.grad, "gradients", self.owner[id(parameter)])

    def _find_states(self) -> None:
        assert self.optimizer is not None
        for parameter, state in self.optimizer.state.items():
            at_host = getattr(parameter.untyped_storage(), "category", None) == "host"
            for value in state.values():
                for tensor in value if isinstance(value, list | tuple) else [value]:  # L-BFGS has lists
                    self.ledger.claim(tensor, "host" if at_host else "optimizer", self.owner.get(id(parameter), ""))

    def _before_forward(self) -> None:
        self.check_places()
        self.ledger.enter_forward()

    def _after_step(self) -> None:
        self._find_states()
        self.ledger.leave_step()


def _frozen_units(model: nn.Module) -> list[Any]:
    """Of an engine: its `named_parameters()` are what the optimizer may see, and leave these out."""
    units = vars(model).get("units")
    return [unit for unit in units if not getattr(unit, "trains", True)] if isinstance(units, list) else []


def common_path(one: str, other: str) -> str:
    """The innermost module around both: `blocks.0` of `blocks.0.up` and `blocks.0.norm`."""
    if one == other:
        return one
    shared = [a for a, b in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one.split("."), other.split(".")))]
    return ".".join(shared) or "(several)"
