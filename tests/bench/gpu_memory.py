"""python -m tests.bench.gpu_memory: where the memory of a GPT of half a billion parameters goes.

Four ranks on one card, as threads: every ZeRO stage in FP32 with plain attention, then stage 3 with recompute, with
flash attention, in FP16, with all of them, and with its states in the CPU's memory; last a GPT of 1.2 billion. The
ledger itemises what a rank holds; beside it stands what the card's allocator has handed out to all ranks together.
"""

import dataclasses
import functools

import torch

from minizero import GPT, GPTConfig, Zero3
from minizero.memory import CATEGORIES
from notebooks.tools.card import CUDA, GIB, card
from notebooks.tools.card_memory import HALF_BILLION, STAGES, initial_values_by_the_device, limited, measure, timeline
from tests.bench.gpu_tools import main, picture

RANKS = 4
BILLION = GPTConfig(sequence_length=1024, width=2048, layers=24, heads=32, attention="flash", recompute="full")
TINY = GPTConfig(sequence_length=16, width=32, layers=2, heads=2)


def cases(config, largest):
    """{name: (config, stage, its options)}."""
    variant = functools.partial(dataclasses.replace, config)
    half = {"dtype": torch.float16}
    found = {stage.__name__: (config, stage, {}) for stage in STAGES}
    found["Zero3, recompute"] = variant(recompute="full"), Zero3, {}
    found["Zero3, flash"] = variant(attention="flash"), Zero3, {}
    found["Zero3, FP16"] = config, Zero3, half
    everything = variant(attention="flash", recompute="full")
    found["Zero3, all three"] = everything, Zero3, half
    found["Zero3, all three, offload"] = everything, Zero3, half | {"offload": True}
    found[f"{millions(largest)}, Zero3, all three"] = largest, Zero3, half
    return found


def millions(config):
    """How many parameters, in words."""
    with torch.device("meta"), initial_values_by_the_device():
        return f"{sum(p.numel() for p in GPT(config).parameters()) / 1e6:,.1f} M"


def draw(found, title):
    """Bars of what rank 0 holds at its peak, and its curves over one step."""
    from matplotlib.figure import Figure

    from minizero.pictures import COLORS, OTHER

    figure = Figure(figsize=(18, 8))
    bars, curves = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    shown = [name for name in CATEGORIES if name != "host" and any(each["peak"][name] for each in found.values())]
    for row, (name, each) in enumerate(found.items()):
        curve, left = each["curve"], 0
        moment = max(range(len(curve["total"])), key=curve["total"].__getitem__)
        for category in shown:
            width = curve[category][moment] / GIB
            bars.barh(row, width, left=left, color=COLORS.get(category, OTHER), label=None if row else category)
            left += width
        places = [i / len(curve["total"]) for i in range(len(curve["total"]))]
        style = ("-", "--", "-.", ":")[row % 4]
        curves.plot(places, [total / GIB for total in curve["total"]], linestyle=style, label=name)
    bars.set_yticks(range(len(found)), list(found))
    bars.invert_yaxis()
    bars.set(xlabel="GiB of rank 0 at its peak")
    bars.legend()
    curves.set(xlabel="one training step, allocation by allocation", ylabel="GiB of rank 0")
    curves.legend(fontsize=8)
    figure.suptitle(title)
    figure.tight_layout()
    return figure


def run(report, tiny):
    """Measure, draw, and return the lines of the short table."""
    config, largest, ranks = (TINY, TINY, 2) if tiny else (HALF_BILLION, BILLION, RANKS)
    found, lines = {}, []
    for name, (shapes, stage, options) in cases(config, largest).items():
        each = report.measure(name, lambda: measure(shapes, stage, options, ranks))  # noqa: B023
        if each:
            found[name] = each
            peak, card_says = each["peak"], each["allocated"]
            beside = f", allocator {card_says / each['all ranks']:.3f} of all ranks' peaks" if card_says else ""
            kept = f", {peak['host'] / GIB:.2f} on the host" if peak["host"] else ""
            lines.append(f"{name:28} {peak['total'] / GIB:6.2f} GiB a rank{kept}, {each['seconds']:.3f} s{beside}")
    for name, function in (("timeline", timeline), ("limited", limited)) if CUDA else ():
        report.measure(name, function)
    title = (
        f"{card()}, torch {torch.__version__}: GPT of {millions(config)} parameters, {ranks} ranks, FP32 unless named"
    )
    picture(report.path.parent / "memory.png", draw, found, title)
    return lines


if __name__ == "__main__":
    main("memory", __doc__, run)
