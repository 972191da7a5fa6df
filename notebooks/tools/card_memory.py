"""Where the memory of a large GPT goes on a GPU: what the ledger itemises, beside what the card's allocator says.

stages      four ranks on one card, each under a ZeRO stage
timeline    one step that fills the card, allocation by allocation
limited     a step that a limit on the card's memory forbids, and the one that X-ray says will fit
"""

import contextlib
import dataclasses
import gc
from unittest import mock

import torch
from torch import nn

from minizero import DDP, GPT, GPTConfig, World, Zero1, Zero2, Zero3
from minizero.memory import CATEGORIES, Ledger
from minizero.pictures import COLORS, MIB
from minizero.pictures.memory import draw_panels
from minizero.pictures.style import label_axes, sheet
from minizero.ranks.collectives import barrier
from minizero.ranks.timing import best_seconds
from minizero.torch_private import allocator_history
from minizero.xray import Plan
from notebooks.tools.card import CUDA, DEVICE, GIB, figures, recorded, synchronize
from notebooks.tools.together import case
from notebooks.tools.zero import table

POINTS = 300  # of a curve that is kept


def initial_values_by_the_device():
    """Any will do here, and a billion of them from one generator on the CPU take half a minute."""
    return mock.patch.object(nn.init, "normal_", lambda parameter, std=1.0, **_: parameter.data.normal_(std=std))


def training(comm, config, stage, batch_size, scaler=None, **options):
    """An engine, its optimizer, and a step of theirs as a function without arguments."""
    with torch.device(comm.device):
        module = GPT(config)
    model = stage(module, comm, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(config.vocabulary, (batch_size, config.sequence_length + 1), device=comm.device)

    def step():
        loss = model(tokens[:, :-1], tokens[:, 1:])
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()

    return model, optimizer, step


def steps(comm, config, stage, options):
    """One rank's bytes in the last of its steps, watched, and the seconds of the best of two that nobody watches."""
    model, optimizer, step = training(comm, config, stage, 1, **options)
    seconds = best_seconds(step, comm, rounds=2)
    if CUDA and comm.rank == 0:
        torch.cuda.reset_peak_memory_stats()
    barrier(comm)
    with Ledger(model, optimizer) as ledger:
        step()
    synchronize()
    barrier(comm)
    return {"peak": ledger.peak, "seconds": seconds, "curve": columns(ledger.curve)}


def columns(curve):
    """A ledger's curve as plain data: bytes by category, and the phase, of at most POINTS moments."""
    kept = thinned(curve, key=lambda sample: sample["total"])
    keys = (*CATEGORIES, "total")
    return {key: [sample[key] for sample in kept] for key in keys} | {"phase": [sample.phase for sample in kept]}


def thinned(curve, key=None):
    """Of so many values that at most POINTS remain, the largest each."""
    every = -(-len(curve) // POINTS) or 1
    return [max(curve[i : i + every], key=key) for i in range(0, len(curve), every)]


def measure(config, stage, options, ranks):
    """Rank 0's bytes, the sum of all ranks' peaks, and what the card's allocator had handed out at most."""
    before = torch.cuda.memory_allocated() if CUDA else 0
    with initial_values_by_the_device():
        results = World(ranks, DEVICE, timeout=300).run(steps, config, stage, options)
    together = sum(result["peak"]["total"] for result in results)
    allocated = torch.cuda.max_memory_allocated() - before if CUDA else None
    if CUDA:
        torch.cuda.empty_cache()
    return results[0] | {"all ranks": together, "allocated": allocated}


# Four ranks on one card.

HALF_BILLION = GPTConfig(sequence_length=1024, width=1536, layers=20, heads=24)
STAGES = (DDP, Zero1, Zero2, Zero3)
ALLOCATOR = {"label": "allocator's most / 4", "color": "black", "linewidth": 2.5}


def cases(config):
    """{name: the arguments of `measure`}."""
    half = {"dtype": torch.float16}
    return {stage.__name__: (config, stage, {}) for stage in STAGES} | {
        "Zero3, recompute": (dataclasses.replace(config, recompute="full"), Zero3, {}),
        "Zero3, flash": (dataclasses.replace(config, attention="flash"), Zero3, {}),
        "Zero3, FP16": (config, Zero3, half),
    }


def runs(names):
    """{name: rank 0's bytes, those of all ranks, the allocator's}, of as many layers as this card has memory for."""
    usable = torch.cuda.mem_get_info()[0] if CUDA else 2**30
    layers = min(20, int(usable / (2.6 * GIB)))  # DDP's four ranks take 2.2 GiB a layer
    if not layers:
        raise MemoryError(f"{usable / GIB:.1f} GiB are free; four ranks with one layer each need 2.6")
    these = cases(dataclasses.replace(HALF_BILLION, layers=layers))
    return {name: measure(*these[name], 4) for name in names}


def show_stages():
    """A table: what rank 0 holds at its peak, the peaks of all ranks, what the allocator handed out at most."""
    names = [stage.__name__ for stage in STAGES]
    if (found := figures("memory", lambda: runs(names), names)) is None:
        return None
    head = [f"{found.card} (GiB)", "rank 0, ledger", "four ranks' peaks", "allocator", "allocator / peaks"]
    rows = []
    for name in names:
        each = found.figures[name]
        total, together, allocated = each["peak"]["total"], each["all ranks"], each["allocated"]
        rows.append([name, total / GIB, together / GIB, allocated / GIB, allocated / together])
    return table(head, rows)


# One step that fills the card.

PHASES = ("forward", "backward", "optimizer")


def xray_of(config, batch_size):
    """The bytes of one step, by the X-ray."""
    return case(config, batch_size, False).run(Plan()).peak["total"]


def filling(usable, depths=(20, 10, 5, 2)):
    """The GPT, of the first depth that fits, and the batch of which a step takes about `usable` bytes: X-ray's word."""
    for layers in depths:
        config = dataclasses.replace(HALF_BILLION, layers=layers)
        one, two = (xray_of(config, batch_size) for batch_size in (1, 2))
        if one <= usable:
            return config, 1 + int((usable - one) / (two - one))
    raise MemoryError(f"{usable / GIB:.1f} GiB may be used; the smallest step that this shows takes {one / GIB:.1f}")


def watched(config, batch_size, between=lambda: None):
    """The ledger of the second step on this card. `between` is called at its start, and after each phase."""
    with torch.device(DEVICE), initial_values_by_the_device():
        model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tokens = torch.zeros(2, batch_size, config.sequence_length, dtype=torch.long, device=DEVICE)
    for ledger in (None, Ledger(model, optimizer)):
        optimizer.zero_grad()
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        with ledger or contextlib.nullcontext():
            between()
            loss = model(*tokens)
            between()
            loss.backward()
            between()
            optimizer.step()
            between()
        synchronize()
    return ledger


def timeline():
    """One step that fills the card: the ledger's curve; {allocated, reserved: {phase: bytes after each event}}."""
    torch.cuda.empty_cache()
    config, batch_size = filling(0.85 * torch.cuda.mem_get_info()[0])
    seen = []  # at each border of a phase: bytes handed out and reserved, and how many events there were
    with allocator_history() as events:
        now = lambda: (torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), len(events()))  # noqa: E731
        ledger = watched(config, batch_size, lambda: seen.append(now()))
        happened = events()
    found = {"ledger": columns(ledger.curve), "allocated": {}, "reserved": {}}
    for phase, (allocated, reserved, first), (_, _, last) in zip(PHASES, seen[-4:], seen[-3:]):
        found["allocated"][phase] = thinned(levels(allocated, happened[first:last], "alloc", "free_requested"))
        found["reserved"][phase] = thinned(levels(reserved, happened[first:last], "segment_alloc", "segment_free"))
    what = f"GPT of {config.count_parameters()[0] / 1e6:,.0f} million parameters, FP32, {batch_size} × 1,024 tokens"
    return found | {"what": what}


def levels(held, events, grows, shrinks):
    """Bytes after each event. An allocator hands out blocks of 512 bytes."""
    curve = [held]
    for event in events:
        size = -(-event["size"] // 512) * 512
        held += size * ((event["action"] == grows) - (event["action"] == shrinks))
        curve.append(held)
    return curve


def draw_timeline():
    """This card's timeline. Without one: a recorded rank."""
    run = figures("memory", lambda: {"timeline": timeline()}, ["DDP"])
    if run is None or "timeline" not in run.figures:
        return draw_runs("DDP")
    axes, found = sheet(16, 7), run.figures["timeline"]
    for name, style in (("allocated", "solid"), ("reserved", "dashed")):
        words = "the allocator: handed out" if name == "allocated" else "the allocator: reserved"
        places = [k + i / len(found[name][p]) for k, p in enumerate(PHASES) for i in range(len(found[name][p]))]
        held = [b / GIB for p in PHASES for b in found[name][p]]
        axes.plot(places, held, color="black", lw=2, linestyle=style, label=words)
    curve = found["ledger"]
    at = [[i for i, phase in enumerate(curve["phase"]) if phase == p] for p in PHASES]
    places = [k + i / len(moments) for k, moments in enumerate(at) for i in range(len(moments))]
    kept = [name for name in COLORS if any(curve[name])]
    parts = [[curve[name][i] / GIB for moments in at for i in moments] for name in kept]
    axes.stackplot(places, parts, colors=[COLORS[name] for name in kept], labels=kept)
    for place in (1, 2):
        axes.axvline(place, color="black", linestyle="dotted")
    look = {"xlim": (0, 3), "ylim": 0, "title": f"{run.card}: {found['what']}", "legend": "beside"}
    label_axes(axes, "one step", "GiB", at=dict(zip((0.5, 1.5, 2.5), PHASES)), **look)
    return axes.figure


def draw_runs(*names):
    """A panel for each of these `cases`: rank 0's bytes by the ledger, and a quarter of the allocator's most.

    On this GPU if there is one, else as it was recorded; the title names the card.
    """
    run = figures("memory", lambda: runs(names), names)
    if run is None:
        return None
    panels = [(name, (each := run.figures[name])["curve"], each["allocated"] / 4) for name in names]
    return draw_panels(f"{run.card}: rank 0 of four that share the card", panels, ALLOCATOR)


# Each switch: the run without it, and the run with it. Offload was recorded on one rank.
PAIRS = {
    "ZeRO-1": ("DDP", "Zero1"),
    "ZeRO-2": ("DDP", "Zero2"),
    "ZeRO-3": ("DDP", "Zero3"),
    "recompute": ("Zero3", "Zero3, recompute"),
    "FlashAttention": ("Zero3", "Zero3, flash"),
    "16 bits": ("Zero3", "Zero3, FP16"),
    "offload": ("resident", "offload"),
    "offload, prefetch": ("resident", "offload, prefetch"),
}


def prices():
    """{switch: (card, the run without it, its seconds a step, the seconds with it)}; {} if no run is recorded."""
    names = list(cases(HALF_BILLION))
    four, one = figures("memory", lambda: runs(names), names), recorded("train", needs=["offload"])
    if four is None or one is None:
        return {}
    seconds = {name: run.get("seconds") for name, run in (four.figures | one.figures["offload"]).items()}
    return {name: (four.card, without, seconds[without], seconds[its]) for name, (without, its) in PAIRS.items()}


def show_prices(found):
    """A table of `prices`: the seconds of a step without and with each switch, and how many times as long it takes."""
    if not found:
        return None
    rows = [[name, without, f"{a:.3f}", f"{b:.3f}", b / a] for name, (_, without, a, b) in found.items()]
    card = next(iter(found.values()))[0]
    return table([card, "beside", "seconds a step without", "with", "times as long"], rows)


GAPS = {"gpt2, fp32, no dropout": "GPT-2, 8 × 1,024 tokens", "vit-b": "ViT-B, 32 pictures"}
GAPS |= {"resnet50": "ResNet-50, 64 pictures"}


def show_gap():
    """A table of models: X-ray's tensors, what they asked the allocator for, what it handed out, what it reserved."""
    if (xray := recorded("xray", needs=GAPS)) is None:
        return None
    keys = ("xray", "requested", "peak", "reserved")
    rows = [[words, *(f"{xray.figures[name][key] / MIB:,.0f}" for key in keys)] for name, words in GAPS.items()]
    return table([f"{xray.card} (MiB)", "tensors, X-ray", "asked for", "handed out", "reserved"], rows)


# Why the X-ray as on a CPU is off, if it is.
REASONS = {
    "gpt2, fp32, dropout": "on a CPU dropout keeps numbers, and attention its scores",
    "gpt2, fp32, no dropout": "workspaces",
    "gpt2, autocast bf16, no dropout": "on a GPU autocast computes more in FP32",
    "llama 300M, fp32": "FP32 with grouped heads has no fused kernel on a GPU: scores are kept",
    "llama 300M, bf16 weights": "workspaces",
    "llama, autocast bf16": "workspaces",
    "llama, gradient checkpointing": "the scores of one layer at a time",
    "bert mlm, fp32, dropout": "as GPT-2 with dropout",
    "vit-b": "workspaces, a second copy of the batch, scratch",
    "resnet50": "workspaces, a second copy of the batch",
}


def show_all():
    """A table of all models: the X-ray as on a CPU, what the card's allocator was asked for, and why they differ."""
    if (xray := recorded("xray", needs=REASONS)) is None:
        return None
    rows = []
    for name, why in REASONS.items():
        counted, asked = (xray.figures[name][key] for key in ("xray", "requested"))
        rows.append([name, f"{counted / MIB:,.0f}", f"{asked / MIB:,.0f}", f"{counted / asked:.2f}", why])
    return table([f"{xray.card} (MiB)", "X-ray, as on a CPU", "asked for", "ratio", "what differs"], rows)


# A limit that stops a step.

SHALLOW = (5, 2)  # so few layers that activations, not states, are most of what a step holds


def limited():
    """{plain, recompute: X-ray, ledger, allocator}, in bytes, under a limit between the two; and the error of plain."""
    free, total = torch.cuda.mem_get_info()
    config, batch_size = filling(min(0.6 * free, 12 * GIB), SHALLOW)
    configs = with_and_without(config)
    found = {name: {"X-ray": xray_of(each, batch_size)} for name, each in configs.items()}
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(sum(each["X-ray"] for each in found.values()) / 2 / total)
    try:
        for name, each in configs.items():
            try:
                found[name]["ledger"] = watched(each, batch_size).peak["total"]
                found[name]["allocator"] = torch.cuda.max_memory_allocated()
            except torch.OutOfMemoryError as error:
                found[name]["error"] = str(error).split(". ")[0]
            gc.collect()  # what the failed step held
            torch.cuda.empty_cache()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return found


def show_limited():
    """A table of `limited`: what was said before, what happened. If no card has recorded it: the X-ray's word alone."""
    run = figures("memory", lambda: {"limited": limited()})
    if run is None or "limited" not in run.figures:
        config, batch_size = filling(12 * GIB, SHALLOW)
        rows = [[name, xray_of(each, batch_size) / GIB] for name, each in with_and_without(config).items()]
        return table(["not run on a card (GiB)", "X-ray"], rows)
    rows = []
    for name, each in run.figures["limited"].items():
        columns = [f"{each[key] / GIB:.2f}" if key in each else "–" for key in ("X-ray", "ledger", "allocator")]
        rows.append([name, *columns, each.get("error", "runs")])
    return table([f"{run.card} (GiB)", "X-ray", "ledger", "allocator", "what happened"], rows)


def with_and_without(config):
    """The same GPT without and with recompute."""
    return {"plain": config, "recompute": dataclasses.replace(config, recompute="full")}
