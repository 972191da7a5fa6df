"""python -m tests.bench.flash_gpu: attention on this GPU, beside PyTorch's backends and FlexAttention.

TFLOP/s of forward and of backward, the ratio to SDPA's FLASH, the share of the measured matmul rate, and the memory
that one forward and backward takes beyond its inputs. 16,384 rows in all, 2,048 numbers each, in heads of 64 or 128.
Multiplications and additions are counted as usual: 4 N² d for each head forward, 2.5 times that backward, half of it
under a causal mask. Each figure is the best of several rounds in which all take turns. FLASH_AUTOTUNE=1 tries block
shapes first. JSON and PNG go to notebooks/results/, under the name of the card.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

TOKENS, WIDTH = 16384, 2048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
BACKENDS = {
    "FLASH": SDPBackend.FLASH_ATTENTION,
    "CUDNN": SDPBackend.CUDNN_ATTENTION,
    "EFFICIENT": SDPBackend.EFFICIENT_ATTENTION,
    "MATH": SDPBackend.MATH,
}
NAMES = ("flash", *BACKENDS, "flex")
RESULTS = Path(__file__).parents[2] / "notebooks" / "results"


def make_attention(name, n, causal):
    """A function of q, k, v."""
    if name == "flash":
        from flash import flash_attention

        return lambda q, k, v: flash_attention(q, k, v, causal=causal)
    if name == "flex":
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device="cuda") if causal else None
        torch.compiler.reset()  # after 8 compilations of one function PyTorch would run it as it is, with all scores
        torch._functorch.config.donated_buffer = False  # else its backward could run only once
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        return lambda q, k, v: compiled(q, k, v, block_mask=mask)

    def pinned(q, k, v):
        with sdpa_kernel(BACKENDS[name]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return pinned


def seconds(function, repetitions):
    """Of one call, on average over some in a row."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repetitions):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / repetitions


def repetitions_for(function, wanted=0.03):
    """How many calls take about `wanted` seconds. The first call, which may compile, does not count."""
    function()
    return max(3, min(100, math.ceil(wanted / max(1e-5, seconds(function, 2)))))


def matmul_rate(dtype):
    """The most operations a second that a large square matmul reaches."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=dtype) for _ in range(2))
    repetitions = repetitions_for(lambda: a @ b)
    return 2 * 8192**3 / min(seconds(lambda: a @ b, repetitions) for _ in range(5))


def attempt(name, function):
    """What `function()` returns; None, and a line that says why, where this one cannot: no kernel, no memory."""
    try:
        return function()
    except Exception as error:  # of whatever kind: the others are measured all the same
        print(f"    {name}: {(str(error).splitlines() or [repr(error)])[0][:90]}")
    torch.cuda.empty_cache()
    return None


def best_times(functions, rounds):
    """{name: seconds of a call}, the best of several rounds in which all take turns."""
    repetitions = {name: attempt(name, lambda f=function: repetitions_for(f)) for name, function in functions.items()}
    best = {name: math.inf for name, count in repetitions.items() if count}
    for _ in range(rounds):
        for name in best:
            spent = attempt(name, lambda name=name: seconds(functions[name], repetitions[name]))
            best[name] = min(best[name], spent or math.inf)
    return {name: time for name, time in best.items() if time < math.inf}


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
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = attention(*inputs)

    def backward():
        torch.autograd.grad(out, inputs, dout, retain_graph=True)

    backward()
    torch.cuda.synchronize()
    return backward, torch.cuda.max_memory_allocated() - before


def measure(n, head_dim, causal, dtype, names, rounds):
    """For each name {forward, backward: TFLOP/s, memory: bytes}; what could not be measured is not there."""
    heads, batch = WIDTH // head_dim, max(1, TOKENS // n)
    tensors = [torch.randn(batch, heads, n, head_dim, device="cuda", dtype=dtype) for _ in range(4)]
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


def draw(report, path):
    """A panel for each pass, head dim and mask: TFLOP/s against N."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = [(d, causal, which) for d in (64, 128) for causal in (False, True) for which in ("forward", "backward")]
    figure, axes = plt.subplots(2, 4, figsize=(18, 8), sharex=True)
    styles = dict(zip(NAMES, ("-", "--", "-.", ":", (0, (1, 3)), (0, (5, 1, 1, 1)))))
    for ax, (d, causal, which) in zip(axes.flat, panels):
        rows = [row for row in report["rows"] if row["head_dim"] == d and row["causal"] == causal]
        for name in NAMES:
            points = [(row["n"], row["results"][name][which]) for row in rows if which in row["results"].get(name, {})]
            if points:
                width = 2.5 if name == "flash" else 1.3
                ax.plot(*zip(*points), linestyle=styles[name], marker="o", ms=3, lw=width, label=name)
        ax.axhline(report["matmul"], color="gray", lw=0.8)
        ax.set(xscale="log", title=f"{which}, d = {d}{', causal' if causal else ''}")
        ax.set_xticks(LENGTHS, [str(n) for n in LENGTHS])
    axes[0, 0].legend()
    for ax in axes[:, 0]:
        ax.set_ylabel("TFLOP/s")
    figure.suptitle(f"{report['card']}, {report['dtype']}, torch {report['torch']}; gray: measured matmul rate")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.bench.flash_gpu", description=__doc__)
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="default: notebooks/results/<card>")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("flash_gpu: this benchmark needs a CUDA GPU, and there is none here")
    import triton

    dtype, card = getattr(torch, arguments.dtype), torch.cuda.get_device_name()
    folder = arguments.output or RESULTS / card.replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    report = dict(card=card, dtype=arguments.dtype, torch=torch.__version__, triton=triton.__version__)
    report |= dict(matmul=matmul_rate(dtype) / 1e12, rows=[])
    print(f"{card}, torch {torch.__version__}, triton {triton.__version__}, matmul {report['matmul']:.0f} TFLOP/s")
    for head_dim in (64, 128):
        for causal in (False, True):
            for n in arguments.lengths:
                results = measure(n, head_dim, causal, dtype, arguments.only, arguments.rounds)
                report["rows"].append(dict(n=n, head_dim=head_dim, causal=causal, results=results))
                (folder / "flash.json").write_text(json.dumps(report, indent=1) + "\n")  # what is there is kept
                print(f"d {head_dim}, {'causal' if causal else 'full'}, N {n}")
                for name in results:
                    print(line_of(name, results, report["matmul"]), flush=True)
    from flash import launch

    report["autotuned"] = {str(key): blocks for key, blocks in launch.fastest.items()}  # FLASH_AUTOTUNE=1
    (folder / "flash.json").write_text(json.dumps(report, indent=1) + "\n")
    draw(report, folder / "flash.png")
    print(f"written to {folder}")


if __name__ == "__main__":
    main()
