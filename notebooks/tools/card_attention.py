"""Attention on a GPU, beside PyTorch's backends and FlexAttention.

    measure(n, head_dim, causal, …)    one case of the recorded run
    against_length()                   what lessons 07 and 07b show of it, measured on this card

TFLOP/s of forward and of backward, and the memory that both take beyond the inputs: 16,384 rows in all, 2,048 numbers
each, in heads of 64 or 128. Multiplications and additions are counted as usual: 4 N² d for each head forward, 2.5 times
that backward, half of it under a causal mask. Each figure is the best of several rounds in which all take turns.
"""

import math
from functools import partial

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from notebooks.tools.card import CUDA, DEVICE, attempt, best_times, copy_bandwidth, matmul_rate, most_bytes, recorded

TOKENS, WIDTH = 16384, 2048
LENGTHS = (1024, 4096, 16384)
BACKENDS = {
    "FLASH": SDPBackend.FLASH_ATTENTION,
    "CUDNN": SDPBackend.CUDNN_ATTENTION,
    "EFFICIENT": SDPBackend.EFFICIENT_ATTENTION,
    "MATH": SDPBackend.MATH,
}
NAMES = ("flash", *BACKENDS, "flex")
LABELS = {
    "CUDNN": "CUDNN, NVIDIA's",
    "flex": "FlexAttention",
    "flash": "our kernels",
    "FLASH": "FLASH, FlashAttention-2",
    "EFFICIENT": "EFFICIENT",
    "plain": "plain, in two lines",
    "MATH": "MATH, plain in FP32",
}


def make_attention(name, n, causal):
    """A function of q, k, v."""
    if name == "flash":
        from flash import flash_attention

        return lambda q, k, v: flash_attention(q, k, v, causal=causal)
    if name == "plain":
        return lambda q, k, v: (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v
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


def operations(n, numbers=TOKENS * WIDTH):
    """Of forward without a mask, over all heads. numbers: how many q has."""
    return 4 * n * numbers


def measure(n, head_dim, causal, dtype, names, rounds, tokens=TOKENS, width=WIDTH):
    """For each name {forward, backward: TFLOP/s, memory: bytes}; what could not be measured is not there."""
    heads, batch = width // head_dim, max(1, tokens // n)
    tensors = [torch.randn(batch, heads, n, head_dim, device=DEVICE, dtype=dtype) for _ in range(4)]
    tensors[:3] = (x.requires_grad_() for x in tensors[:3])
    work = operations(n, tensors[0].numel()) / (2 if causal else 1) / 1e12
    result = {name: {} for name in names}
    attentions = {name: attempt(name, lambda name=name: make_attention(name, n, causal)) for name in names}
    attentions = {name: attention for name, attention in attentions.items() if attention}
    # Forward first: what backward needs, of MATH all scores, is not there yet.
    forward = {name: torch.no_grad()(partial(attention, *tensors[:3])) for name, attention in attentions.items()}
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


def against_length():
    """Figures like the recorded ones: heads of 64, no mask, float16.

    FlexAttention compiles for seconds, so it has one length.
    """
    if CUDA and torch.cuda.get_device_capability() < (8, 0):
        raise RuntimeError("our kernels need a GPU of compute capability 8.0 or newer")
    from flash import launch
    from notebooks.tools.attention import NO_OPTIONS

    found = {"matmul": matmul_rate(torch.float16) / 1e12, "matmul FP32": matmul_rate(torch.float32) / 1e12}
    found["copy bandwidth"] = copy_bandwidth(2**28)
    found["rows"] = launch.choose("forward", 64, 2, NO_OPTIONS).rows
    for n in LENGTHS:
        names = [name for name in LABELS if name != "flex" or n == LENGTHS[1]]
        found[f"d 64, full, N {n}"] = measure(n, 64, False, torch.float16, names, rounds=2)
    return found


def by_length(run, which, lengths=None):
    """{label: {N: figure}} without a mask, with heads of 64; what was not measured is not there.

    which: "forward" or "backward", in TFLOP/s; "memory", in bytes.
    """
    cases = {n: run.figures.get(f"d 64, full, N {n}", {}) for n in lengths or LENGTHS}
    found = {label: {n: case.get(name, {}).get(which) for n, case in cases.items()} for name, label in LABELS.items()}
    return {label: {n: its[n] for n in its if its[n]} for label, its in found.items() if any(its.values())}


def searched(*rows):
    """Of the recorded search of blocks: by name, the rows of a block of 64 keys, and the most operations a second.

    Forward of heads of 64, 4,096 tokens, no mask.
    """
    timed, case = recorded("sweep", "h200").figures["rows"], ["forward", 64, False]
    names = {its: f"{LABELS['flash']}, {its}×64" for its in rows}
    best = {its: max(each[-2] or 0 for each in timed if each[:3] == case and each[3][:2] == [its, 64]) for its in rows}
    return {names[its]: its for its in rows}, {names[its]: 1e12 * best[its] for its in rows}


def milliseconds(rates, products=2):
    """Rows of a table, from TFLOP/s by length. products: those that are counted, 2 of forward, 5 of backward."""
    work = {n: products / 2 * operations(n) / 1e9 for n in LENGTHS}
    return [[label, *(work[n] / its[n] if n in its else "–" for n in LENGTHS)] for label, its in rates.items()]


def ceilings(run):
    """On the card of `run`: a copy's bytes a second, operations a second of a matmul in FP16 and in FP32; or None."""
    matmul, of_this_run = 1e12 * run.figures["matmul"], run.figures.get("copy bandwidth")
    if of_this_run:
        return of_this_run, matmul, 1e12 * run.figures["matmul FP32"]
    train = recorded("train")  # recorded in another part
    same = train and train.card == run.card
    return (train.figures["copy bandwidth"], matmul, train.figures["matmul rates"]["FP32"]) if same else None
