"""Attention on a GPU, beside PyTorch's backends and FlexAttention.

TFLOP/s of forward and of backward, and the memory that both take beyond the inputs: 16,384 rows in all, 2,048 numbers
each, in heads of 64 or 128. Multiplications and additions are counted as usual: 4 N² d for each head forward, 2.5 times
that backward, half of it under a causal mask. Each figure is the best of several rounds in which all take turns.
"""

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from notebooks.tools.card import CUDA, DEVICE, attempt, best_times, most_bytes

TOKENS, WIDTH = 16384, 2048
LENGTHS = (1024, 4096, 16384)
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
