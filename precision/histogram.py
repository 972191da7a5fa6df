"""Where numbers sit on the exponent axis: how many values lie in each [2^e, 2^(e+1)), counted from their bits.

    e = floor(log2 |x|)      of a normal number: its exponent field less the bias
                             of a subnormal one: the place of its highest mantissa bit

FP16 holds magnitudes from 2^-24 (from 2^-14 on with full precision) to 65504. A network's gradients lie at the lower
end of that range and below it, and the upper end is empty. A loss scale of 2^k moves all of them k places to the
right: it saves many, and costs nothing. Micikevicius et al., 2018, "Mixed Precision
Training", section 3.2 and Figure 3.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from precision.exact import exact
from precision.fast import FLOAT32, FLOAT64

LOWEST, HIGHEST = -1074, 1023  # exponents of FP64, the widest
NORMAL, SMALLEST, END = -14, -24, 16  # FP16: exponents of its smallest normal and subnormal; 2^16 overflows

# Okabe and Ito's tones, as in the other pictures: parameters blue, gradients yellow.
WEIGHTS, GRADIENTS, LIMIT = "#0072B2", "#F0E442", "#D55E00"
FONT = 16


@dataclass(frozen=True)
class Histogram:
    """How many values have which exponent. Histograms add up: `a + b`, `sum(list_of_them, Histogram())`.

    counts: {e: how many x have 2^e ≤ |x| < 2^(e+1)}, in order of e, without empty bins. nonfinite: inf and NaN.
    """

    counts: Mapping[int, int] = field(default_factory=dict)
    zeros: int = 0
    nonfinite: int = 0

    @property
    def total(self) -> int:
        """All values: those in `counts`, the zeros, the inf and NaN."""
        return sum(self.counts.values()) + self.zeros + self.nonfinite

    def share(self, low: float, high: float) -> float:
        """The fraction of all values, zeros included, with an exponent in [low, high). ±math.inf: no bound."""
        if not low <= high:
            raise ValueError(f"share: low ({low}) must be at most high ({high})")
        if self.total == 0:
            raise ValueError("share: the histogram is empty: collect some values first")
        return sum(count for e, count in self.counts.items() if low <= e < high) / self.total

    def __add__(self, other: "Histogram") -> "Histogram":
        exponents = sorted(self.counts.keys() | other.counts.keys())
        counts = {e: self.counts.get(e, 0) + other.counts.get(e, 0) for e in exponents}
        return Histogram(counts, self.zeros + other.zeros, self.nonfinite + other.nonfinite)

    def plot(self, ax: Any = None, *, scale: float | None = None, color: str = GRADIENTS) -> Any:
        """Draw the percentage of values in each bin, the zeros beside them, and FP16's range; returns the Axes.

        scale: a loss scale. A second band then shows which values FP16 holds after they are multiplied by it.
        "Below" counts the values below 2^-24; rounding to nearest saves those above 2^-25.
        """
        if self.total == 0:
            raise ValueError("plot: the histogram is empty: collect some values first")
        if scale is not None and not 0 < scale < math.inf:
            raise ValueError(f"plot: scale must be positive and finite, not {scale!r}")
        if ax is None:
            from matplotlib import pyplot  # notebooks show the figures that pyplot knows

            ax = pyplot.figure(figsize=(14, 7), layout="constrained").add_subplot()
        _draw(self, ax, scale, color)
        return ax


def exponent_histogram(tensors: torch.Tensor | Iterable[torch.Tensor]) -> Histogram:
    """Count the values of a tensor, or of several together: any floating dtype, shape and device.

    `TypeError` for anything but tensors, and for integer and complex ones.
    """
    counted: torch.Tensor | None = None
    several = hasattr(tensors, "__iter__") and not hasattr(tensors, "dtype")  # and no NumPy array
    for tensor in tensors if several else [tensors]:
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.is_meta:
            kind = f"{tensor.dtype} on {tensor.device}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise TypeError(f"exponent_histogram: needs tensors of a floating dtype, not {kind}")
        here = torch.bincount(bins(tensor), minlength=HIGHEST - LOWEST + 3)
        counted = here if counted is None else counted + here.to(counted.device)
    if counted is None:
        return Histogram()
    zeros, *counts, nonfinite = counted.tolist()
    return Histogram({e: count for e, count in enumerate(counts, start=LOWEST) if count}, zeros, nonfinite)


@exact()
@torch.no_grad()
def bins(tensor: torch.Tensor) -> torch.Tensor:
    """The bin of each value, (n,): 0 for zeros, e - LOWEST + 1 for exponent e, the last for inf and NaN."""
    values = tensor.to_dense().resolve_neg().flatten()
    carrier = FLOAT64 if values.dtype == torch.float64 else FLOAT32
    values = values.to(getattr(torch, carrier.floating))  # of 16 bits and fewer: widened, exactly
    integers, mantissa_bits, bias = getattr(torch, carrier.integer), carrier.mantissa_bits, carrier.bias
    magnitude = values.view(integers) & torch.iinfo(integers).max  # without the sign
    exponent_field = magnitude >> mantissa_bits
    # A subnormal number is mantissa · 2^(1 - bias - mantissa_bits). Converted to a float, the mantissa alone is a
    # normal number, whose exponent field tells the place of its highest bit.
    highest_bit = (magnitude.to(values.dtype).view(integers) >> mantissa_bits) - bias
    subnormal = highest_bit + 1 - bias - mantissa_bits
    exponent = torch.where(exponent_field == 0, subnormal, exponent_field - bias)
    result = (exponent - LOWEST + 1).masked_fill(exponent_field == 2 * bias + 1, HIGHEST - LOWEST + 2)
    return result.masked_fill(magnitude == 0, 0)


@dataclass
class Collected:
    """The histograms of a training run, all steps together: see `collect`."""

    weights: Histogram = Histogram()
    gradients: Histogram = Histogram()
    activation_gradients: Histogram = Histogram()
    updates: Histogram = Histogram()


@contextlib.contextmanager
def collect(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Collected]:
    """Watch training while the block runs, by hooks.

    weights, gradients   the optimizer's parameters that have a gradient, and these, as each step finds them:
                         so unscaled and clipped, and of `MasterWeights` the FP32 masters'
    updates              what each step changed them by
    activation_gradients   of the outputs of the model's innermost modules, as each backward brings them:
                         so scaled, if the loss was

        with collect(model, optimizer) as found:
            train(model, optimizer)
        found.activation_gradients.plot(scale=8)
    """
    found = Collected()
    before: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameters, and copies from before the step

    def see_step(*_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        found.weights += exponent_histogram(parameters)
        found.gradients += exponent_histogram(p.grad for p in parameters)
        before[:] = [(p, p.detach().clone()) for p in parameters]

    def see_updates(*_: Any) -> None:
        found.updates += exponent_histogram(p.detach().double() - old.double() for p, old in before)
        before.clear()

    def see_gradient(gradient: torch.Tensor) -> None:
        found.activation_gradients += exponent_histogram(gradient)

    def see_output(_: nn.Module, __: Any, output: Any) -> None:
        for tensor in output if isinstance(output, tuple | list) else [output]:
            if not isinstance(tensor, torch.Tensor) or tensor.grad_fn is None:
                continue
            # A module may hand on what another one made, as a dropout does in evaluation: counted once.
            key, notes = (id(found), tensor.output_nr), cast(dict, tensor.grad_fn.metadata)
            if key not in notes:
                notes[key] = True
                tensor.register_hook(see_gradient)

    innermost = [module for module in model.modules() if next(module.children(), None) is None]
    hooks: list[Any] = [module.register_forward_hook(see_output) for module in innermost]
    hooks += [optimizer.register_step_pre_hook(see_step), optimizer.register_step_post_hook(see_updates)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _draw(histogram: Histogram, ax: Any, scale: float | None, color: str) -> None:
    shift = 0.0 if scale is None else math.log2(scale)
    lowest = min([*histogram.counts, SMALLEST, math.floor(SMALLEST - shift)])
    highest = max([*(e + 1 for e in histogram.counts), END, math.ceil(END - shift)])
    inches = ax.get_window_extent().width / ax.figure.dpi
    gap = (highest - lowest) * min(0.3, 0.6 / inches)  # to the bars that stand apart: room for their names
    left, right = lowest - 1.75 * gap, highest + 1.75 * gap
    per_inch = (right - left) / inches

    percent = {e: 100 * count / histogram.total for e, count in histogram.counts.items()}
    look: dict[str, Any] = {"color": color, "edgecolor": "black", "linewidth": 0.8, "zorder": 2}
    ax.bar(list(percent), list(percent.values()), width=1, align="edge", **look)
    apart = {"zero": (lowest - gap, histogram.zeros), "inf\nNaN": (highest + gap, histogram.nonfinite)}
    apart = {name: (where, count) for name, (where, count) in apart.items() if count}
    for where, count in apart.values():
        height = 100 * count / histogram.total
        ax.bar(where, height, width=gap / 2, hatch="//", **look)
        words = _percent(count / histogram.total)
        ax.annotate(words, (where, height), (0, 5), textcoords="offset points", ha="center", fontsize=FONT)

    # A logarithmic axis of whole decades, with room above 100 % for the bands.
    rarest = min(count for count in [*histogram.counts.values(), histogram.zeros, histogram.nonfinite] if count)
    bottom = min(math.floor(math.log10(100 * rarest / histogram.total) - 0.1), -1)
    ax.set_yscale("log")
    ax.set_ylim(10.0**bottom, 10 ** (2 + (2 - bottom) * (0.16 if scale is None else 0.32)))
    decades = {10.0**p: f"{10.0**p:g} %" if p > -4 else f"$10^{{{p}}}$ %" for p in range(bottom, 3)}
    ax.set_yticks(list(decades), list(decades.values()))
    ax.minorticks_off()
    step = next(2**k for k in range(2, 12) if 2**k > 0.8 * per_inch)
    ticks = {e: f"$2^{{{e}}}$" for e in range(-(-lowest // step) * step, highest + 1, step)}
    ticks |= {where: name for name, (where, _) in apart.items()}
    ax.set_xticks(list(ticks), list(ticks.values()))
    ax.set_xlim(left, right)
    ax.set_xlabel("magnitude of the value", fontsize=FONT)
    ax.set_ylabel("share of all values", fontsize=FONT)
    ax.tick_params(labelsize=FONT)
    ax.spines[["top", "right"]].set_visible(False)

    _draw_band(histogram, ax, 0.0, 0.9, ["FP16"], per_inch)
    if scale is not None:
        factor = f"{scale:g}" if scale < 1e5 or shift % 1 else f"$2^{{{shift:g}}}$"
        _draw_band(histogram, ax, shift, 0.78, [f"FP16 after scaling by {factor}", f"FP16, × {factor}"], per_inch)


def _draw_band(histogram: Histogram, ax: Any, shift: float, y: float, names: list[str], per_inch: float) -> None:
    """FP16's range on the axis of values that are multiplied by 2^shift, and the shares outside of it.

    names: the first that fits is written, or the last; per_inch: so many exponents are an inch.
    """
    across = ax.get_xaxis_transform()  # x in data, y as a fraction of the height
    smallest, normal, end = SMALLEST - shift, NORMAL - shift, END - shift
    line: dict[str, Any] = {"color": LIMIT, "linewidth": 2, "linestyle": "dashed" if shift else "solid"}
    ax.vlines([smallest, end], 0, y, transform=across, zorder=2.5, **line)
    words: dict[str, Any] = {"va": "center", "fontsize": FONT - 1, "transform": across, "zorder": 4}
    boxes = [(smallest, normal, "#C4C4C4", "black", ["subnormal", ""]), (normal, end, "#4D4D4D", "white", names)]
    for low, high, color, ink, texts in boxes:
        look: dict[str, Any] = {"align": "edge", "edgecolor": "black", "transform": across, "zorder": 3}
        ax.barh(y, high - low, height=0.07, left=low, color=color, **look)
        fitting = [text for text in texts if len(text) * 0.14 * per_inch < high - low] or texts[-1:]
        ax.text((low + high) / 2, y + 0.035, fitting[0], color=ink, ha="center", **words)
    words["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    about = "" if shift % 1 == 0 else "about "  # then a bin lies across each end
    below, above = histogram.share(-math.inf, smallest), histogram.share(end, math.inf)
    ax.text(smallest - 0.1 * per_inch, y + 0.035, f"{about}{_percent(below)} below", ha="right", **words)
    if above:
        ax.text(end + 0.1 * per_inch, y + 0.035, f"{about}{_percent(above)}\ntoo large", ha="left", **words)


def _percent(fraction: float) -> str:
    return "< 0.01 %" if 0 < fraction < 1e-4 else f"{100 * fraction:.3g} %"
