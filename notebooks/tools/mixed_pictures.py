"""What notebook 04b draws and prints of a card, from the figures of the part "train"."""

import matplotlib.pyplot as plt

from minizero.pictures import FONT
from minizero.pictures.mixed import GREY, PINK
from minizero.pictures.style import label_axes
from notebooks.tools.card import GIB
from notebooks.tools.card_steps import COLUMNS, DTYPES, ROWS


def draw_steps(run):
    """A step's time and the bytes that it takes, in each format. What the run did not measure is named."""
    figure, both = plt.subplots(1, 2, figsize=(16, 4.6), layout="constrained", sharey=True)
    parts = {"seconds": (1e3, 1, "a training step (ms)"), "bytes": (1 / GIB, 2, "what a step takes in passing (GiB)")}
    for axes, (key, (scale, digits, label)) in zip(both, parts.items()):
        for row, (name, dtype) in enumerate(DTYPES.items()):
            found = run.figures["step"].get(name)
            amount = scale * found[key] if found else 0
            axes.barh(row, amount, color=GREY if dtype is None else PINK)
            words = f" {amount:.{digits}f}" if found else " not recorded"
            axes.text(amount, row, words, va="center", fontsize=FONT + 2)
        axes.set_yticks(range(len(DTYPES)), DTYPES)
        axes.set_xlim(0, 1.18 * axes.dataLim.x1)
        label_axes(axes, label, "")
    both[0].invert_yaxis()
    figure.suptitle(run.card, fontsize=FONT + 2)


def tell_rates(run):
    """Prints the rates of matrix products, and the times of softmax and batch norm with both arithmetics."""
    rates = run.figures["matmul rates"]
    each = (f"{name} {rates[name] / 1e12:.0f}" if name in rates else f"{name} not recorded" for name in DTYPES)
    print(f"{run.card}\na large matrix product, TFLOP/s: {', '.join(each)}")
    moved = 2 * 2 * ROWS * COLUMNS  # bytes: each number is read once and written once
    for name, found in run.figures["arithmetic"].items():
        full, half = (found[kind]["seconds"] for kind in ("FP32", "FP16"))
        share = moved / full / run.figures["copy bandwidth"]
        times = f"arithmetic in FP32 {1e3 * full:.4f} ms, in FP16 {1e3 * half:.4f} ms"
        print(f"{name + ':':12}{times}; moves {share:.0%} of the bytes a second of a copy")
