"""What notebook 04b draws and prints of a card, from the figures of the part "train"."""

from minizero.pictures import FONT
from minizero.pictures.mixed import GREY, PINK
from minizero.pictures.style import draw_bars, label_axes, new_axes
from notebooks.tools.card import GIB
from notebooks.tools.card_steps import COLUMNS, DTYPES, ROWS


def draw_steps(run):
    """A step's time and the bytes that it takes, in each format that was measured."""
    steps = {name: run.figures["step"][name] for name in DTYPES if name in run.figures["step"]}
    panels = new_axes(16, 1 + 1.2 * len(steps), 1, 2)
    parts = {"seconds": (1e3, 1, "a training step (ms)"), "bytes": (1 / GIB, 2, "peak beside the states (GiB)")}
    colors = [GREY if DTYPES[name] is None else PINK for name in steps]
    for axes, (key, (scale, digits, label)) in zip(panels, parts.items()):
        amounts = {name: scale * found[key] for name, found in steps.items()}
        draw_bars(axes, amounts, [f"{amount:.{digits}f}" for amount in amounts.values()], color=colors)
        label_axes(axes, label, "", xlim=(0, 1.18 * axes.dataLim.x1))
    panels[1].set_yticks([])
    panels[0].figure.suptitle(run.card, fontsize=FONT + 2)


def tell_rates(run):
    """Prints the rates of matrix products, and the times of softmax and batch norm with both arithmetics."""
    rates = run.figures["matmul rates"]
    each = (f"{name} {rates[name] / 1e12:.0f}" if name in rates else f"{name} not recorded" for name in DTYPES)
    print(f"{run.card}\na large matrix product, TFLOP/s: {', '.join(each)}")
    moved = 2 * 2 * ROWS * COLUMNS  # bytes: each number is read once and written once
    for name, found in run.figures["arithmetic"].items():
        (full, exact), (half, wrong) = (found[kind].values() for kind in ("FP32", "FP16"))
        share = moved / full / run.figures["copy bandwidth"]
        times = f"FP32 arithmetic {1e3 * full:.4f} ms; FP16 {1e3 * half:.4f} ms, {wrong / exact:.1f} times the error"
        print(f"{name + ':':12}{times}; moves {share:.0%} of a copy's bytes a second")
