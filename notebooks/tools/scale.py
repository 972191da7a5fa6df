"""What notebooks 08 and 08b compute, measure and print beside their pictures; and the sliders."""

import dataclasses
import itertools

import matplotlib.pyplot as plt
from IPython.display import display

from minizero import DDP, World, Zero1, Zero2, Zero3
from minizero.memory import predict
from minizero.simulate import CLUSTERS, MODELS, Strategy, model, simulate, tables
from minizero.simulate.fits import fit, run
from minizero.simulate.published import PUBLICATIONS, RATIO, ZERO_TABLE_1
from notebooks.tools.scale_pictures import STRATEGIES
from notebooks.tools.zero import one_step, table


def table_1():
    """Table 1 of the ZeRO paper, computed; and how many of its cells are within the last digit that is printed."""
    rows, within = [], 0
    for gpus, printed in ZERO_TABLE_1.items():
        row = [str(gpus)]
        for parameters, cells in printed.items():
            values = [predict(int(float(parameters)), gpus, s, convention="paper")["total"] / 1e9 for s in (1, 2, 3)]
            digits = [len(cell.partition(".")[2]) for cell in cells]
            within += sum(abs(v - float(c)) <= 10.0**-d for v, c, d in zip(values, cells, digits))
            row.append(" / ".join(f"{value:.{digit}f}" for value, digit in zip(values, digits)))
        rows.append(row)
    return table(["GPUs", "7.5B, stages 1 / 2 / 3", "128B", "1T"], rows), within


def measured_bytes(config, sizes):
    """{(stage, ranks): (bytes held after a step, bytes sent in it)}, of our own engines, run."""
    found = {}
    for ranks, (number, stage) in itertools.product(sizes, enumerate((DDP, Zero1, Zero2, Zero3))):
        options = {"prefetch": 0} if stage is Zero3 else {}
        step = World(ranks).run(one_step, stage, config, (1, config.sequence_length), **options)[0]
        found[number, ranks] = step["states"], step["sent"]
    return found


def strategies(one):
    """T5 of three sizes under four strategies: what `draw_strategies` draws, twice, and the published TFLOP/s."""
    cases = {  # model, format, whose efficiency, and where it comes from
        "T5-611M, FP32": ("t5-611m", "float32", "t5-611m float32", "fitted"),
        "T5-2.28B, FP32": ("t5-2.28b", "float32", "t5-2.28b float32", "fitted"),
        "T5-11B, FP32": ("t5-11b", "float32", "t5-11b", "assumed"),
        "T5-11B, BF16": ("t5-11b", "bfloat16", "t5-11b", "fitted"),
    }
    options = dict(zip(STRATEGIES, ({}, {"sharding_factor": 8}, {"sharding_factor": 1}, {"stage": 0})))
    groups, published = {}, {}
    for label, (name, dtype, whose, kind) in cases.items():
        plans = {s: Strategy(16, batch_size=8, recompute="full", dtype=dtype, **more) for s, more in options.items()}
        groups[label] = {
            strategy: (
                run(one.publication.cluster, name, plan, one.efficiencies[whose], one.shared),
                "predicted" if kind == "fitted" and strategy != "full shard" else kind,
            )
            for strategy, plan in plans.items()
        }
        for row in one.publication.rows:
            published |= {(label, s): row.value for s, plan in plans.items() if (row.model, row.plan) == (name, plan)}
    return groups, published


def lost_without(one, name, plans, switched_off):
    """The share of TFLOP/s that is lost from the first plan to each, without these fitted constants; and the steps."""
    shared = {constant: value for constant, value in one.shared.items() if constant not in switched_off}
    steps = [run(one.publication.cluster, name, plan, one.efficiencies[name], shared) for plan in plans]
    return [1 - step.tflops / steps[0].tflops for step in steps], steps


def communication_seconds(step):
    """How long all collectives of a step last."""
    return sum(
        end - start for lane, _, start, end in step.spans if lane in ("all-gather", "reduce-scatter", "all-reduce")
    )


def all_predicted():
    """Every published number that no fit looked at, as (error, cells of a row), the worst first."""
    rows = []
    for one in map(fit, PUBLICATIONS):
        for row, value in zip(one.publication.rows, one.values):
            if not row.fitted:
                name = f"{row.model}, {row.plan.ranks:,}{f' : {row.against.ranks}' if row.against else ''} GPUs"
                name += f", batch {row.plan.batch_size}"
                name += ", DDP" if row.plan.stage == 0 else f", F = {f}" if (f := row.plan.sharding_factor) else ""
                unit = "(ratio)" if row.against else row.unit.removesuffix(" per GPU")
                digits = 2 if row.unit == RATIO else 0 if value > 1000 else 1
                published, predicted = (f"{number:,.{digits}f} {unit}" for number in (row.value, value))
                error = value / row.value - 1
                rows.append((error, [name, "about " * row.about + published, predicted, f"{100 * error:+.1f} %"]))
    return sorted(rows, key=lambda pair: -abs(pair[0]))


# The sliders.


def calculate(name, cluster, gpus, stage, factor, batch, recompute):
    """Draws the memory of a plan beside DDP's, and prints its speed. What cannot be is said in words."""
    try:
        factor = factor if stage == 3 and factor else None
        plan = Strategy(gpus, stage, batch, sharding_factor=factor, recompute=recompute, flash=True)
        ddp = dataclasses.replace(plan, stage=0, sharding_factor=None)
        steps = [simulate(model(name), CLUSTERS[cluster], one) for one in (plan, ddp)]
    except ValueError as error:
        print(f"This choice is impossible. {error}.")
        return None
    _, axes = plt.subplots(figsize=(13, 2.8), layout="constrained")
    tables.draw_memory(steps, axes)
    plt.show()
    step = steps[0]
    exposed, speed = step.exposed_seconds / step.seconds, step.tokens_per_second
    print(f"{step.seconds:.3g} s a step, {exposed:.0%} of it exposed; {speed:,.0f} tokens/s per GPU (predicted)")
    return step


def show_sliders():
    """Shows the sliders of `calculate`. A page without a kernel has a sentence in their place."""
    try:
        import ipywidgets
    except ImportError:
        print("The sliders need ipywidgets: python -m pip install ipywidgets")
        return
    wide = {"layout": {"width": "330px"}, "style": {"description_width": "80px"}}
    powers = [2**i for i in range(13)]

    def slider(label, options, value):
        return ipywidgets.SelectionSlider(options=options, value=value, description=label, **wide)

    def menu(label, options, value):
        return ipywidgets.Dropdown(options=options, value=value, description=label, **wide)

    knobs = {
        "name": menu("model", list(MODELS), "mpt-7b"),
        "cluster": menu("cluster", [name for name in CLUSTERS if name != "v100"], "a100-80"),
        "recompute": menu("recompute", ["none", "selective", "full"], "full"),
        "gpus": slider("GPUs", powers, 64),
        "stage": slider("stage", [0, 1, 2, 3], 3),
        "factor": slider("F", [("all", 0), *((str(count), count) for count in [*powers[:3], 6, *powers[3:]])], 0),
        "batch": slider("batch", list(range(1, 33)), 4),
    }
    rows = [ipywidgets.HBox(list(knobs.values())[:3]), ipywidgets.HBox(list(knobs.values())[3:6])]
    panel = ipywidgets.VBox([*rows, knobs["batch"], ipywidgets.interactive_output(calculate, knobs)])
    words = "*Here are seven sliders, if the notebook runs. Below is one of their pictures.*"
    display(panel._repr_mimebundle_() | {"text/plain": words, "text/markdown": words}, raw=True)
