"""python -m tests.bench.flash_gpu: attention on this GPU, beside PyTorch's backends and FlexAttention.

TFLOP/s of forward and of backward, the ratio to SDPA's FLASH, the share of the measured matmul rate, and the memory
that one forward and backward takes beyond its inputs. 16,384 rows in all, 2,048 numbers each, in heads of 64 or 128.
Multiplications and additions are counted as usual: 4 N² d for each head forward, 2.5 times that backward, half of it
under a causal mask. Each figure is the best of several rounds in which all take turns. FLASH_AUTOTUNE=1 tries block
shapes first.
"""

import itertools
import math

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.bench.gpu_tools import CUDA, DEVICE, attempt, best_times, card, main, matmul_rate, most_bytes, picture

TOKENS, WIDTH = 16384, 2048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
BACKENDS = {
    "FLASH": SDPBackend.FLASH_ATTENTION,
    "CUDNN": SDPBackend.CUDNN_ATTENTION,
    "EFFICIENT": SDPBackend.EFFICIENT_ATTENTION,
    "MATH": SDPBackend.MATH,
}
NAMES = ("flash", *BACKENDS, "flex")


def make_attention(name, n, causal):
    """A function of q, k, v."""
    if name == "flash":
        from flash import flash_attention

        return lambda q, k, v: flash_attention(q, k, v, causal=causal)
    if name == "flex":
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device=DEVICE) if causal else None
        torch.compiler.reset()  # after 8 compilations of one function PyTorch would run it as it is, with all scores
        torch._functorch.config.donated_buffer = False  # else its backward could run only once
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        return lambda q, k, v: compiled(q, k, v, block_mask=mask)

    def pinned(q, k, v):
        with sdpa_kernel(BACKENDS[name]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return pinned


def forward_of(attention, tensors):
    """The forward pass alone, as a function without arguments."""

    def forward():
        with torch.no_grad():
            attention(*tensors[:3])

    return forward


def backward_of(attention, tensors):
    """The backward pass as a function without arguments, and the bytes that one forward and backward takes."""
    *inputs, dout = tensors
    attention(*inputs)  # compiles, where it must

    def forward_and_backward():
        out = attention(*inputs)
        torch.autograd.grad(out, inputs, dout, retain_graph=True)
        return out

    out, taken = most_bytes(forward_and_backward)
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True), taken


def measure(n, head_dim, causal, dtype, names, rounds, tokens=TOKENS, width=WIDTH):
    """For each name {forward, backward: TFLOP/s, memory: bytes}; what could not be measured is not there."""
    heads, batch = width // head_dim, max(1, tokens // n)
    tensors = [torch.randn(batch, heads, n, head_dim, device=DEVICE, dtype=dtype) for _ in range(4)]
    tensors[:3] = (x.requires_grad_() for x in tensors[:3])
    work = 4 * n * n * head_dim * heads * batch / (2 if causal else 1) / 1e12
    result = {name: {} for name in names}
    attentions = {name: attempt(name, lambda name=name: make_attention(name, n, causal)) for name in names}
    attentions = {name: attention for name, attention in attentions.items() if attention}
    # Forward first: what backward needs, of MATH all scores, is not there yet.
    forward = {name: forward_of(attention, tensors) for name, attention in attentions.items()}
    for name, time in best_times(forward, rounds).items():
        result[name]["forward"] = work / time
    backward = {}
    for name, attention in attentions.items():
        made = attempt(name, lambda attention=attention: backward_of(attention, tensors))
        if made is not None:
            backward[name], result[name]["memory"] = made
    for name, time in best_times(backward, rounds).items():
        result[name]["backward"] = 2.5 * work / time
    backward.clear()
    if CUDA:
        torch.cuda.empty_cache()
    return {name: figures for name, figures in result.items() if figures}


def line_of(name, results, matmul):
    """What is printed of one name."""
    line = f"    {name:10}"
    for which in ("forward", "backward"):
        rate, flash = results[name].get(which), results.get("FLASH", {}).get(which)
        if rate:
            ratio = f", {rate / flash:.2f} × FLASH" if flash else ""
            line += f"  {which} {rate:6.1f} TFLOP/s ({rate / matmul:4.0%} of matmul{ratio})"
    return f"{line}  {results[name].get('memory', math.nan) / 2**20:8.0f} MiB"


def panels(rows, matmul, title):
    """TFLOP/s against N: a panel for each head dim, mask and pass. rows: {(head dim, causal, N): results}."""
    from matplotlib.figure import Figure

    cases = list(itertools.product(sorted({(d, causal) for d, causal, _ in rows}), ("forward", "backward")))
    figure = Figure(figsize=(18, 4 * -(-len(cases) // 4)))
    styles = dict(zip(NAMES, ("-", "--", "-.", ":", (0, (1, 3)), (0, (5, 1, 1, 1)))))
    for place, ((d, causal), which) in enumerate(cases, start=1):
        ax = figure.add_subplot(-(-len(cases) // 4), 4, place)
        lengths = sorted(n for *kind, n in rows if tuple(kind) == (d, causal))
        for name in NAMES:
            points = [(n, rows[d, causal, n].get(name, {}).get(which)) for n in lengths]
            points = [point for point in points if point[1]]
            if points:
                width = 2.5 if name == "flash" else 1.3
                ax.plot(*zip(*points), linestyle=styles[name], marker="o", ms=3, lw=width, label=name)
        ax.axhline(matmul, color="gray", lw=0.8)
        ax.set(xscale="log", title=f"{which}, d = {d}{', causal' if causal else ''}", ylabel="TFLOP/s")
        ax.set_xticks(lengths, [str(n) for n in lengths])
        ax.minorticks_off()
        if place == 1:
            ax.legend()
    figure.suptitle(f"{title}; gray: measured matmul rate")
    figure.tight_layout()
    return figure


def against_math(rows, head_dim):
    """The line that says how much faster flash is than plain attention, forward and backward, at each N."""
    ratios = []
    for (d, causal, n), results in sorted(rows.items()):
        flash, plain = results.get("flash", {}), results.get("MATH", {})
        if d == head_dim and not causal and flash.keys() >= {"forward", "backward"} <= plain.keys():
            times = [1 / x["forward"] + 2.5 / x["backward"] for x in (flash, plain)]
            ratios.append(f"{times[1] / times[0]:.1f} × at {n:,}")
    return f"flash / MATH, forward + backward, d {head_dim}: {', '.join(ratios) or 'not measured'}"


def run(report, tiny):
    """Measure, draw, and return the lines of the short table."""
    lengths, head_dims, rounds = ((32, 64), (64,), 1) if tiny else (LENGTHS, (64, 128), 5)
    names = ("flash", "MATH") if tiny else NAMES
    sizes = dict(tokens=64, width=128) if tiny else {}
    rate = report.measure("matmul", lambda: matmul_rate(torch.float16, 64 if tiny else 8192) / 1e12)
    rows, lines = {}, []
    for d, causal, n in itertools.product(head_dims, (False, True), lengths):
        name = f"d {d}, {'causal' if causal else 'full'}, N {n}"
        found = report.measure(name, lambda: measure(n, d, causal, torch.float16, names, rounds, **sizes))  # noqa: B023
        if found:
            rows[d, causal, n] = found
            print("\n".join(line_of(each, found, rate) for each in found), flush=True)
            if n == min(max(lengths), 4096):
                lines += [f"{name}: {line_of('flash', found, rate).strip()}"] if "flash" in found else []
    from flash import launch

    if launch.fastest:  # FLASH_AUTOTUNE=1
        report.figures["autotuned"] = {str(key): blocks for key, blocks in launch.fastest.items()}
    title = f"{card()}, float16, torch {torch.__version__}"
    picture(report.path.parent / "flash.png", panels, rows, rate, title)
    return lines + [against_math(rows, d) for d in head_dims]


if __name__ == "__main__":
    main("flash", __doc__, run)
