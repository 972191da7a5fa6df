"""Islands: the parts of a 16-bit model that compute in FP32, because the model says so.

    def rms_norm(x):                                                    # Llama's
        wide = x.to(torch.float32)                                      # the island begins
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * wide.to(x.dtype)                                # and ends

If x is 0.01, the derivative of the rsqrt is 500,000: FP16 has no such number. Under `emulate` x is an FP32 tensor whose
values are those of FP16, and both conversions would do nothing. A function mode sees the calls before that. It marks
what comes out of the first as wide. From there on PyTorch's own rules hold, those of 16-bit tensors beside FP32 ones:
wide with narrow gives wide, and the gradient is wide inside the island and rounded where it leaves.

`x.float()`, `softmax(dtype=torch.float32)`, `type_as` and `to(other)` say what they want. `x.to(torch.float32)` and
`x.to(input_dtype)` are the same call here: it widens what is narrow, and rounds what is wide. So
`x.to(self.weight.dtype)` of a narrow x, which does nothing in a 16-bit model, begins an island here. Write
`x.type_as(self.weight)`, or `x.to(self.weight)`, which keep x narrow.

Integers have no width. `positions.float()` and `torch.arange(n, dtype=torch.float32)` are wide: 2049 is no number of
FP16. `mask.to(torch.float32)` and `torch.zeros(n, dtype=torch.float32)` are narrow, since most models write
`mask.to(x.dtype)` and `dtype=x.dtype`. Parameters and buffers are narrow, as `.half()` would make them.
"""

import math
import re
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from precision.exact import exact, is_exact

CONVERSIONS = frozenset({"float", "to", "type", "type_as"})
# PyTorch refuses these if the dtypes differ. A model that meets them here has left its island without a word.
ONE_DTYPE = re.compile(
    r"linear|bilinear|(__r?)?matmul(__)?|mm|bmm|mv|dot|add(mm|mv|bmm)|baddbmm|einsum|conv\w*|(layer|group|batch|instance)"
    r"_norm|prelu|scaled_dot_product_attention|multi_head_attention_forward"
)


class Islands(TorchFunctionMode):
    """Sees every call of PyTorch's functions, and converts their tensors as a 16-bit model would."""

    def __init__(self, emulation: Any) -> None:  # emulate's, which knows what is wide
        super().__init__()
        self.emulation = emulation

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "__get__" or is_exact() or not self.emulation.rounds():
            return func(*args, **kwargs)
        if self.begins_wide(name, args, kwargs):
            with exact():
                result = func(*args, **kwargs)
            self.emulation.wide.add(result.untyped_storage())
            return result
        if name == "rms_norm":
            return self.rms_norm(func, args, kwargs)
        asks_for_fp32 = name != "view" and any(each is torch.float32 for each in (*args, *kwargs.values()))
        if name in CONVERSIONS:
            args = [self.converted(name, *args, **kwargs), *args[1:]]
        elif asks_for_fp32 and args and isinstance(args[0], torch.Tensor):  # softmax, sum, ... which convert first
            args = [_each(args[0], lambda x: self.convert(x, True)), *args[1:]]
        else:
            args, kwargs = self.promoted(name, args, kwargs)
        return func(*args, **kwargs)

    def convert(self, x: torch.Tensor, wide: bool) -> torch.Tensor:
        """x as wide, or as narrow; x itself if it is that already. Autograd converts the gradient back."""
        return x if self.emulation.is_wide(x) == wide else _Convert.apply(x, self.emulation, wide)

    def begins_wide(self, name: str, args: Any, kwargs: Any) -> bool:
        """Whether the call makes FP32 values that were never narrow: torch.arange(n, dtype=torch.float32), or x.float()
        of integers or of a tensor that really has 16 bits."""
        if name == "float":
            return args[0].dtype != torch.float32 and args[0].layout == torch.strided
        return name == "arange" and kwargs.get("dtype") == torch.float32 and "out" not in kwargs

    def rms_norm(self, func: Any, args: Any, kwargs: Any) -> Any:
        """PyTorch's operator, in FP32: in FP16 the square of 256 is infinite. The result has the input's width."""
        x = args[0] if args else kwargs["input"]
        wide = self.emulation.is_wide(x)
        args, kwargs = _each((args, kwargs), lambda each: self.convert(each, True))
        return _each(func(*args, **kwargs), lambda result: self.convert(result, wide))

    def converted(self, name: str, x: Any, *args: Any, **kwargs: Any) -> Any:
        """The tensor of x.float(), x.to(dtype), x.to(other), x.type_as(other), converted."""
        if x.dtype != torch.float32:
            return x
        for target in (torch.float32, *args, *kwargs.values()) if name == "float" else (*args, *kwargs.values()):
            if target is torch.FloatTensor or (isinstance(target, str) and target == "torch.FloatTensor"):
                return self.convert(x, True)
            if target is torch.float32:
                return self.convert(x, name == "float" or not self.emulation.is_wide(x))
            if isinstance(target, torch.Tensor) and target.dtype == torch.float32:
                return self.convert(x, self.emulation.is_wide(target))
        return x

    def promoted(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments; if wide and narrow ones meet, all converted to one width, as PyTorch would promote them."""
        found: list[torch.Tensor] = []
        _each((args, kwargs), found.append)
        wide = [x for x in found if self.emulation.is_wide(x)]
        in_place = (
            (name.endswith("_") and not name.endswith("__")) or name.startswith(("__i", "__set")) or "out" in kwargs
        )
        if not wide:
            args, kwargs = [self.limit(x) for x in args], {key: self.limit(x) for key, x in kwargs.items()}
        if not wide or len(wide) == len(found) or in_place:
            return args, kwargs
        # A number in a tensor without dimensions takes the dtype of a tensor that has some.
        only_numbers = all(x.dim() == 0 for x in wide) and any(x.dim() for x in found)
        to_wide = not ONE_DTYPE.fullmatch(name) and not only_numbers
        return _each((args, kwargs), lambda x: self.convert(x, to_wide))

    def limit(self, x: Any) -> Any:
        """The format's own limit, if x is FP32's: a 16-bit model reads -65504 from torch.finfo(x.dtype).min.

        Its mask holds that number. FP32's is infinite in FP16, and a softmax of nothing but -inf is NaN.
        """
        is_limit = isinstance(x, float) and abs(x) == torch.finfo(torch.float32).max
        return math.copysign(self.emulation.fmt.max, x) if is_limit else x


class _Convert(torch.autograd.Function):
    """From narrow to wide or back. Its gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, emulation: Any, wide: bool) -> torch.Tensor:
        ctx.emulation, ctx.wide = emulation, wide
        return emulation.convert(x, wide)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _Convert.apply(gradients[0], ctx.emulation, not ctx.wide), None, None


def _each(value: Any, change: Any) -> Any:
    """`value` with `change` applied to each FP32 tensor in it."""
    if isinstance(value, dict):
        return {key: _each(each, change) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_each(each, change) for each in value)
    is_fp32 = isinstance(value, torch.Tensor) and value.dtype == torch.float32 and value.layout == torch.strided
    return change(value) if is_fp32 else value
