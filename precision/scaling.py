"""Loss scaling: move small gradients into FP16's range, and skip the step when large ones leave it.

    L' = s · L          scale: by the chain rule every gradient of the backward is s times as large
    g  = g' / s         unscale: in FP32, once, before anything looks at the gradients' size (clipping)
    s  = s · growth     after `growth_interval` updates in a row without inf or NaN
    s  = s · backoff    after an inf or NaN, for which the step is skipped

A larger scale saves more small gradients from rounding to zero, until the large ones overflow. The dynamic
scaler tries: it grows until something overflows, gives up that one step, and goes back.
Micikevicius et al., 2018, "Mixed Precision Training", section 3.2. The calls, what they do to scale and
parameters, and the types of errors are those of torch.amp.GradScaler; its scale can decay to zero, this
one has bounds.
"""

import ctypes
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Combine = Callable[[torch.Tensor], torch.Tensor]
ENTRIES = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")  # of GradScaler's state


@dataclass
class Progress:
    """How far an optimizer has come since the last update."""

    stage: str = "ready"  # then "unscaled", then "stepped"
    found: torch.Tensor | None = None  # 0-dim: 1 where a gradient was inf or NaN, else 0; None: no gradient yet


class LossScaler:
    """What both scalers share: scale the loss, unscale the gradients, step unless something overflowed.

    combine: from this rank's found-inf tensor (0-dim FP32, 0 or 1) to all ranks', so that all skip a step or
    none does: `lambda flag: all_reduce(flag, comm, op="max")`. Called once for each optimizer and update.
    """

    def __init__(self, scale: float, combine: Combine | None = None) -> None:
        self._scale = _positive("scale", scale)
        self.combine = combine
        self._has_scaled = False
        self._progress: dict[Any, Progress] = {}  # by optimizer

    def scale(self, outputs: Any) -> Any:
        """`outputs` times the scale: a tensor, or a list, (named) tuple, dict or other iterable of them, nested or not.

        Of a dict the values are scaled, and a plain dict is returned.
        """
        if isinstance(outputs, torch.Tensor):
            self._has_scaled = True
            # An FP32 tensor, since FP16 times a Python number would stay FP16, where 65536 is inf.
            return outputs * torch.full((), self._scale, dtype=torch.float32, device=outputs.device)
        if not isinstance(outputs, Iterable) or isinstance(outputs, str | bytes):
            raise ValueError(f"scale: outputs must be a tensor or an iterable of tensors, not {outputs!r}")
        if isinstance(outputs, Mapping):
            return {name: self.scale(output) for name, output in outputs.items()}
        scaled = map(self.scale, outputs)
        if hasattr(outputs, "_fields"):  # a namedtuple, which takes its values one by one
            return type(outputs)(*scaled)  # type: ignore[call-arg]
        return type(outputs)(scaled) if isinstance(outputs, list | tuple) else scaled  # type: ignore[call-arg]

    @torch.no_grad()
    def unscale_(self, optimizer: Any) -> None:
        """Divide the gradients of the optimizer's parameters by the scale, in place, and look for inf and NaN.

        optimizer: a torch.optim.Optimizer; a `MasterWeights` first copies its 16-bit gradients to the masters.
        `RuntimeError` when called twice, or after step(); `ValueError` for FP16 gradients, since a small one
        would round to zero when it is divided.
        """
        self._check_has_scaled("unscale_")
        progress = self._progress.setdefault(optimizer, Progress())
        if progress.stage == "unscaled":
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update()")
        if progress.stage == "stepped":
            raise RuntimeError("unscale_() is called after step(): unscale first, then clip, then step")
        if hasattr(optimizer, "copy_gradients"):
            optimizer.copy_gradients()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError("unscale_: FP16 gradients would underflow again: use FP32 weights, or MasterWeights")
        gradients = [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]
        if gradients:
            found = found_inf(gradients)
            progress.found = found if self.combine is None else self.combine(found)
        inverse = _float32(1 / self._scale)  # a Python number: multiplied in FP32 for BF16 gradients, too
        for gradient in gradients:
            gradient.mul_(inverse)
        progress.stage = "unscaled"

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """`optimizer.step(*args, **kwargs)`, and what it returns; skipped, and None, if a gradient was inf or NaN.

        Unscales first unless that has been done. `RuntimeError` for a closure (it would bring new, scaled
        gradients), or for a second step before update(); `AssertionError` if no parameter has a gradient.
        """
        if "closure" in kwargs or any(callable(argument) for argument in args):
            raise RuntimeError("step: a closure is not supported: its gradients would not be unscaled")
        self._check_has_scaled("step")
        progress = self._progress.setdefault(optimizer, Progress())
        if progress.stage == "stepped":
            raise RuntimeError("step() has already been called on this optimizer since the last update()")
        if progress.stage == "ready":
            self.unscale_(optimizer)
        if progress.found is None:
            raise AssertionError("step: no gradients to check for this optimizer: call backward() on the scaled loss")
        result = None if progress.found.item() else optimizer.step(*args, **kwargs)
        progress.stage = "stepped"
        return result

    def update(self) -> None:
        """End of the iteration, after all optimizers' steps: adapts the scale once, whatever their number.

        `AssertionError` when no gradient has been checked since the last update.
        """
        found = [progress.found for progress in self._progress.values() if progress.found is not None]
        if not found:
            raise AssertionError("update: no gradients were checked since the last update: call step() first")
        self._adapt(any(flag.item() for flag in found))
        self._progress = {}

    def get_scale(self) -> float:
        """The scale that the next `scale` multiplies by."""
        return self._scale

    def _adapt(self, overflow: bool) -> None:
        """Choose the next scale; here it stays. overflow: whether a gradient was inf or NaN since the last update."""

    def _check_has_scaled(self, call: str) -> None:
        if not self._has_scaled:
            raise AssertionError(
                f"{call}: nothing was scaled yet: call scale(loss).backward() earlier in the iteration"
            )


class StaticLossScaler(LossScaler):
    """The same scale throughout. scale: positive and finite; combine: see `LossScaler`."""

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self._scale}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the scale from any scaler's state."""
        self._scale = _positive("scale", _entries(state_dict, "scale")[0])


class DynamicLossScaler(LossScaler):
    """Doubles the scale after `growth_interval` updates in a row without overflow, and halves it after an overflow.

    growth_factor > 1 > backoff_factor > 0; min_scale ≤ init_scale ≤ max_scale, positive and finite.
    `AssertionError` for the factors, as torch.amp.GradScaler raises; `ValueError` for the others.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
        combine: Combine | None = None,
    ) -> None:
        super().__init__(init_scale, combine)
        self._set(init_scale, growth_factor, backoff_factor, growth_interval, min_scale, max_scale, tracker=0)

    def _set(
        self, scale: float, growth: float, backoff: float, interval: int, low: float, high: float, tracker: int
    ) -> None:
        if not 1 < as_float(growth) < math.inf:
            raise AssertionError(f"growth_factor must be above 1 and finite, not {growth!r}")
        if not 0 < backoff < 1:
            raise AssertionError(f"backoff_factor must be between 0 and 1, not {backoff!r}")
        if not isinstance(interval, int) or interval < 1:
            raise ValueError(f"growth_interval must be a whole number of at least 1, not {interval!r}")
        if not isinstance(tracker, int) or tracker < 0:
            raise ValueError(f"_growth_tracker must be a whole number, not below 0, not {tracker!r}")
        scale, low, high = _positive("scale", scale), _positive("min_scale", low), _positive("max_scale", high)
        if not low <= scale <= high:
            raise ValueError(f"the scale must be from min_scale ({low:g}) to max_scale ({high:g}), not {scale:g}")
        self._scale, self.min_scale, self.max_scale = scale, low, high
        self.growth_factor, self.backoff_factor, self.growth_interval = growth, backoff, interval
        self._growth_tracker = tracker  # updates in a row without overflow

    def _adapt(self, overflow: bool) -> None:
        self._growth_tracker = 0 if overflow else self._growth_tracker + 1
        if overflow:
            self._scale = max(_float32(self._scale * self.backoff_factor), self.min_scale)
        elif self._growth_tracker >= self.growth_interval:
            self._scale = min(_float32(self._scale * self.growth_factor), self.max_scale)
            self._growth_tracker = 0

    def state_dict(self) -> dict[str, Any]:
        """The entries of GradScaler's state, which loads this one, and the bounds. Save it after update()."""
        values = (self._scale, self.growth_factor, self.backoff_factor, self.growth_interval, self._growth_tracker)
        return dict(zip(ENTRIES, values)) | {"min_scale": self.min_scale, "max_scale": self.max_scale}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, or one of GradScaler. That has no bounds: this scaler keeps its own.

        `ValueError` for a scale outside the bounds, `KeyError` for entries that are missing.
        """
        scale, growth, backoff, interval, tracker = _entries(state_dict, *ENTRIES)
        low, high = state_dict.get("min_scale", self.min_scale), state_dict.get("max_scale", self.max_scale)
        self._set(scale, growth, backoff, interval, low, high, tracker)


def found_inf(tensors: list[torch.Tensor]) -> torch.Tensor:
    """1 where any value is inf or NaN, else 0: 0-dim, FP32, on the device of the first tensor."""
    found = torch.zeros((), device=tensors[0].device)
    for tensor in tensors:
        if tensor.numel():
            # All values are finite exactly if the largest magnitude is; this needs no memory for a mask.
            largest = torch.linalg.vector_norm(tensor, math.inf)
            found = torch.maximum(found, (~largest.isfinite()).to(found))
    return found


def _float32(value: float) -> float:
    """The nearest FP32 number. The scale is an FP32 number, as in GradScaler."""
    return ctypes.c_float(value).value


def as_float(value: float) -> float:
    """The number as a float; a whole number beyond float64, such as 10**400, is infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _positive(name: str, value: float) -> float:
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, not {value!r}")
    if not 0 < _float32(as_float(value)) < math.inf:
        raise ValueError(f"{name} must be a positive, finite FP32 number, not {value!r}")
    return _float32(float(value))


def _entries(state: dict[str, Any], *names: str) -> list[Any]:
    if not state:
        raise RuntimeError("load_state_dict: the state is empty: was it saved from a disabled GradScaler?")
    if missing := [name for name in names if name not in state]:
        raise KeyError(f"load_state_dict: the state lacks {', '.join(missing)}: is it another scaler's?")
    return [state[name] for name in names]
