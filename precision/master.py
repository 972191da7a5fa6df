"""FP32 master weights: compute with 16-bit weights, and add the updates up in 32 bits.

    g32 = float32(g16)         gradients up: exact, since every 16-bit number is an FP32 number
    w32 = w32 - update(g32)    the optimizer's step
    w16 = round(w32)           weights back: the nearest 16-bit number

An update is often far smaller than its weight. FP16 has 11 significant bits. If w/u is 2^11 = 2048 or more, w + u can
round back to w; above 4094 it always does. Without a master the weight never moves, however many such updates come.
The master keeps them, and the 16-bit weight moves when they have added up.
Micikevicius et al., 2018, "Mixed Precision Training", section 3.1.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from precision.scaling import as_float

BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}


class MasterWeights(torch.optim.Optimizer):
    """An optimizer over FP32 masters of `parameters`; after each step the parameters are the masters, rounded.

    parameters, kwargs: as `optimizer_class`, any class of torch.optim, takes them, groups included. Parameters are
    float16 or bfloat16; a parameter in FP32 (a norm's, say) is its own master. `.masters`: FP32 tensors in the
    parameters' order and shapes; `.param_groups` holds them. `.optimizer` does the step. Who sets weights later writes
    to the masters, under `torch.no_grad()`: the step rounds them back.
    `ValueError` for other dtypes, a parameter given twice, a learning rate that is not finite.

        weights = MasterWeights(model.parameters(), torch.optim.AdamW, lr=1e-3)
        scaler.scale(loss).backward()
        scaler.unscale_(weights)                           # copies the gradients up, then divides
        torch.nn.utils.clip_grad_norm_(weights.masters, 1.0)    # the masters', which the step reads
        scaler.step(weights)
        scaler.update()
        weights.zero_grad()
    """

    def __init__(self, parameters: Iterable[Any], optimizer_class: type[torch.optim.Optimizer], **kwargs: Any) -> None:
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
            raise TypeError(f"MasterWeights: optimizer_class must be a class of torch.optim, not {optimizer_class!r}")
        self.parameters: list[torch.Tensor] = []
        self.masters: list[torch.Tensor] = []
        self.rounded: list[int] = []  # the masters' versions when the parameters last were these, rounded
        self.taken: list[tuple[torch.Tensor | None, int]] | None = None  # gradients that were copied, and versions
        super().__init__(parameters, {})  # PyTorch's own checks; comes back through add_param_group
        _check_learning_rates([kwargs, *self.param_groups])
        self.optimizer = optimizer_class(self.param_groups, **kwargs)
        self._share()

    def _share(self) -> None:
        """Share groups and state with the inner optimizer: a learning rate that a scheduler sets here is its, too."""
        self.defaults, self.state = self.optimizer.defaults, self.optimizer.state
        self.param_groups = self.optimizer.param_groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch.optim. The group then holds the masters, in place of the parameters."""
        super().add_param_group(dict(param_group))
        group = self.param_groups.pop()
        together = [*self.parameters, *group["params"]]
        for dtype in {parameter.dtype for parameter in together}:
            if dtype not in BITS:
                raise ValueError(f"MasterWeights: parameters must be float16, bfloat16 or float32, not {dtype}")
        if any(map(_overlaps, together)):
            raise ValueError("MasterWeights: a parameter's elements share memory (expand?): give its contiguous()")
        if len({id(parameter) for parameter in together}) < len(together):
            raise ValueError("MasterWeights: a parameter is given twice, and would have two masters")
        group["params"] = [parameter.detach().float() for parameter in group["params"]]
        self.parameters, self.masters = together, [*self.masters, *group["params"]]
        self.rounded += [master._version for master in group["params"]]
        self.param_groups.append(group)

    def copy_gradients(self) -> None:
        """Give each master its parameter's gradient as FP32. A scaler calls this before it unscales."""
        self._check_parameters()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()  # itself if it is FP32 already
        self.taken = [(p.grad, -1 if p.grad is None else p.grad._version) for p in self.parameters]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Copy the gradients up, unless that was done since the last step; step; round back.

        closure: for an optimizer that evaluates the loss several times (LBFGS); may call zero_grad() here.
        `RuntimeError` when a gradient or a parameter was written to behind the masters' back.
        """
        _check_learning_rates(self.param_groups)
        self._check_parameters()
        if closure is not None:
            result: Any = self.optimizer.step(lambda: self._evaluate(closure))
        else:
            if self.taken is None:
                self.copy_gradients()
            else:
                self._check_gradients(self.taken)
            result = self.optimizer.step()
        self.taken = None
        self._round_back()
        return result

    def __getstate__(self) -> dict[str, Any]:
        """What a copy, or a pickle, is made of: torch.optim's own entries, and what this class adds."""
        mine = ("optimizer", "parameters", "masters", "taken")
        return super().__getstate__() | {name: getattr(self, name) for name in mine}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.rounded = [master._version for master in self.masters]  # copies count their writes anew

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the parameters' gradients, and the masters'."""
        for tensor in [*self.parameters, *self.masters]:
            if set_to_none:
                tensor.grad = None
            elif tensor.grad is not None:
                tensor.grad.detach_().zero_()
        self.taken = None

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, and the masters, which hold more than the 16-bit weights do."""
        return {**self.optimizer.state_dict(), "masters": list(self.masters)}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, and round the parameters from it. `ValueError` if the shapes differ."""
        shapes = [tuple(master.shape) for master in state_dict.get("masters", [])]
        mine = [tuple(master.shape) for master in self.masters]
        if shapes != mine:
            raise ValueError(f"MasterWeights: the state has masters of shapes {shapes}, expected {mine}")
        self.optimizer.load_state_dict({k: v for k, v in state_dict.items() if k != "masters"})
        self._share()
        for master, loaded in zip(self.masters, state_dict["masters"], strict=True):
            master.copy_(loaded)
        self.taken = None
        self._round_back()

    @torch.no_grad()
    def _round_back(self) -> None:
        """The parameters become the masters, rounded."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)  # which rounds to the nearest
        self.rounded = [master._version for master in self.masters]

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """The loss at the masters as they are now, and its gradients."""
        self._round_back()
        with torch.enable_grad():
            loss = closure()
        self.copy_gradients()
        return loss

    def _check_parameters(self) -> None:
        # The bits are compared, not PyTorch's counts of writes: writing through `.data` or NumPy is not counted.
        for i, (parameter, master, version) in enumerate(zip(self.parameters, self.masters, self.rounded, strict=True)):
            if master._version != version:
                continue  # somebody wrote to the master: this step rounds it back
            if parameter.device != master.device or not _same(parameter, master.to(parameter.dtype)):
                raise RuntimeError(
                    f"MasterWeights: parameter {i} was written to, or moved, and is not masters[{i}], rounded: the "
                    "step would undo that. Load or move weights before MasterWeights is made; or write to the master, "
                    f"with torch.no_grad(): weights.masters[{i}].copy_(…), and not through .data"
                )

    def _check_gradients(self, taken: list[tuple[torch.Tensor | None, int]]) -> None:
        for i, (parameter, (gradient, version)) in enumerate(zip(self.parameters, taken, strict=True)):
            now = parameter.grad
            if now is None or now.dtype == torch.float32:  # an FP32 gradient is the master's too
                continue
            if now is not gradient or now._version != version:
                raise RuntimeError(
                    f"MasterWeights: the gradient of parameter {i} changed after copy_gradients(): "
                    "clip masters[…].grad, and call zero_grad() here before the next backward"
                )


def _same(parameter: torch.Tensor, rounded: torch.Tensor) -> bool:
    """Bit for bit, so that -0 is not 0. Any NaN is NaN: rounding keeps no payload."""
    integers = BITS.get(parameter.dtype, parameter.dtype)
    bits, wanted = parameter.view(integers), rounded.view(integers)
    if bits.shape != wanted.shape or torch.equal(bits, wanted):
        return bits.shape == wanted.shape
    return bool(((bits == wanted) | (parameter.isnan() & rounded.isnan())).all())


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements share memory: whether a stride is no longer than what the shorter ones reach (0: expanded)."""
    steps = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size > 1)
    reach = [0, *itertools.accumulate((size - 1) * stride for stride, size in steps)]
    return any(stride <= before for (stride, _), before in zip(steps, reach))


def _check_learning_rates(groups: Iterable[dict[str, Any]]) -> None:
    for group in groups:
        if not math.isfinite(as_float(group.get("lr", 0.0))):
            raise ValueError(f"MasterWeights: the learning rate must be finite, not {group['lr']!r}")
