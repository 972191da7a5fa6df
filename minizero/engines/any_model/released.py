"""A parameter of the module while its unit is away, or old: it is empty, and who computes with it is told what to do.

DeepSpeed#3570, torchtitan#3724: a weight is used by another module. pytorch#82070, DeepSpeed#2056: a moving average of
stale or empty weights.
"""

import sys
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from minizero import torch_private


class Released(nn.Parameter):
    """A parameter of the module while its unit is not gathered, or old. It is empty: to compute with it is an error.

    PyTorch's `UninitializedParameter` refuses in the same way.
    """

    wrapped_in: tuple[str, str, str, int]  # its name, unit and stage; the elements that it has while it is there
    QUESTIONS = ["__repr__", "__hash__", "size", "dim", "is_floating_point", "is_complex", "untyped_storage"]
    QUESTIONS += ["data_ptr", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_"]
    # Of Module.to(), if it changes nothing.
    QUESTIONS += ["to", "float", "half", "bfloat16", "cpu", "cuda", "_has_compatible_shallow_copy_type"]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        of_attribute = type(function).__name__ == "method-wrapper"
        attribute = getattr(function.__self__, "__name__", "property") if of_attribute else ""
        if function.__name__ in ("numel", "nelement"):
            return args[0].wrapped_in[-1]
        drops = function.__name__ == "__set__" or sys._getframe(1).f_code is nn.Module.zero_grad.__code__
        if attribute == "grad" and drops and torch_private.current_backward() == -1:
            name, _, stage, _ = args[0].wrapped_in
            raise RuntimeError(f"{stage}: {name} has no .grad, the shards have: call zero_grad() of the {stage} itself")
        writes = attribute == "data" and function.__name__ == "__set__" and args[1] is not args[0]
        if not writes and (attribute or function.__name__ in cls.QUESTIONS):
            answer = super().__torch_function__(function, types, args, kwargs or {})
            if not isinstance(answer, torch.Tensor) or answer is args[0] or attribute == "grad":
                return answer
        name, unit, stage, _ = next(p for p in tree_leaves((args, kwargs)) if isinstance(p, cls)).wrapped_in
        if stage == "Zero3":
            when = "outside the forward of its unit"
            way = "call the unit, choose as unit a module that contains it (units=), or set reshard_after_forward=False"
        else:
            when, way = "from optimizer.step() to the next forward of the whole model", "run that forward first"
        raise RuntimeError(
            f"{stage}: {name}, of the unit {unit}, is empty {when}. To compute with it, {way}. To copy the weights, "
            f"call gather_state_dict() on all ranks. To average them, or for a penalty, take {stage}.parameters(). To "
            "initialise them, do so before wrapping, or call load_full_state_dict(state) on all ranks"
        )
