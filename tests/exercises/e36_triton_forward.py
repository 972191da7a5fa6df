"""The forward pass as a GPU runs it: one program for each block of rows of each head. It loads its block of
queries once, keeps it on the chip, and goes over the keys. On this machine Triton's interpreter runs it,
operation by operation.

    s = q kᵀ      m' = max(m, rowmax s)      p = exp(scale (s - m'))      l = … + rowsum p      o = … + p v

A GPU has an instruction for 2^x, none for e^x: exp(x) = exp2(x · LOG2_E). In flash/device_functions.py place
says which rows, head and batch this program has; head_of gives a pointer, and move moves it on by so many rows;
load_block and store_block move (rows, BLOCK_D); visible is the mask. spans gives four bounds a ≤ b ≤ c ≤ d: blocks
of keys in a … b and c … d need a mask, those in b … c none.
"""

from random import Random
from typing import Any

import torch

from tests.exercises import triton_kit
from tests.exercises.kit import fail, same, wrong
from tests.exercises.triton_kit import compiles, expect, small_blocks, tensors, with_options

PLAN = [
    "Where am I? place(n_q, heads, BLOCK_Q, right is not None); lengths (packed sequences); return if start >= "
    "n_q. rows, and pointers to the head's Q, K, V: query head h uses key/value head h // GROUP. state = "
    "start_hash(seed, batch, head).",
    "Load q. m (-3.4e38), l, o: FP32, on the chip.",
    "low, high = band(…); bounds = spans(start, last row, n_k, low, high, BLOCK_K). K and V move to the first block.",
    "For part in tl.static_range(0 if left is not None else 1, 3), for start_k from bounds[part] to bounds[part "
    "+ 1] by BLOCK_K: load k, of whose rows n_k - start_k exist; s = q kᵀ; unless part == 1, -∞ where not visible. "
    "At the end K and V move on by a block.",
    "Online softmax in base 2: scale · LOG2_E multiplies the differences. Rescale l and o. p times dropout(…) "
    "goes into o.",
    "Store o / l, and lse = m · scale + ln l. Where l is 0: output 0, lse -∞.",
]
HINTS = [
    "When the maximum rises from m to `larger`, both sums, l and o, were measured against m: rescale both.",
    "rescale = tl.exp2((m - larger) * (scale * LOG2_E)); it multiplies l, and o as rescale[:, None].",
    "tl.dot(p.to(v.dtype), v, o * rescale[:, None], input_precision=PRECISION) adds the product to the rescaled "
    "output.",
    "ln l = tl.log2(l) / LOG2_E.",
]
AFTER = (
    "Only blocks at the edge of the mask or of the tensor are masked. `spans` sorts the blocks into three parts, and "
    "`tl.static_range` makes code for each, so whole blocks pay nothing. scale · LOG2_E is one factor: base 2 costs "
    "no multiplication of its own. m begins at -3.4e38, since -∞ - -∞ is NaN. Read next: flash/launch.py, which "
    "chooses the blocks."
)
WRONG = [
    wrong("rescales-the-sum-only", "", ("v, o * rescale[:, None], input", "v, o, input")),
    wrong("rescales-the-output-only", "", ("l = l * rescale + tl.sum(p, 1)", "l = l + tl.sum(p, 1)")),
    wrong("forgets-the-mask", "",
          ("            if part != 1:\n                s = tl.where",
           "            if part == 7:\n                s = tl.where")),
    wrong("forgets-to-divide", "", ("o / l[:, None]", "o")),
    wrong("forgets-the-maximum", "", ("            m = larger\n", "")),
    wrong("each-head-its-own-keys", "",
          ("K = head_of(k_ptr, k_strides, batch, head // GROUP", "K = head_of(k_ptr, k_strides, batch, head"),
          ("V = head_of(v_ptr, v_strides, batch, head // GROUP", "V = head_of(v_ptr, v_strides, batch, head")),
    wrong("multiplies-in-tf32", "", ("o * rescale[:, None], input_precision=PRECISION)", "o * rescale[:, None])")),
    wrong("stores-outside", "", ("out_strides, rows, n_q, o / l", "out_strides, rows, n_q + BLOCK_Q, o / l")),
]  # fmt: skip


def check() -> None:
    for causal in (False, True):
        (q, k, v, _), (want, want_lse, *_), options = tensors(causal, n=40 if causal else 48)
        out, lse = small_blocks(_forward, q, k, v, options)
        s = q.double() @ k.double().repeat_interleave(2, 1).mT / 4
        values = v.double().repeat_interleave(2, 1)
        if causal:
            if not torch.allclose(out.double(), want, atol=1e-4):
                fail("forgets-the-mask", "With causal=True rows see keys in their future: -∞ where not visible(…).")
            continue
        total = (s - s.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True)
        mistakes = {
            "forgets-to-divide": (want * total, "The output is l times too large: divide by l at the end."),
            "wrong-base": (
                (s * torch.log(torch.tensor(2.0))).softmax(-1) @ values,
                "The weights are those of 2^s: exp(x) is exp2(x · LOG2_E).",
            ),
            "rescales-the-sum-only": (
                online(s, values, rescale_sum=True),
                "The sum l is rescaled and the output is not: both were measured against the old maximum.",
            ),
            "rescales-the-output-only": (
                online(s, values, rescale_output=True),
                "The output is rescaled and the sum l is not: both were measured against the old maximum.",
            ),
            "forgets-to-rescale": (
                online(s, values),
                "Blocks are measured against different maxima: when m rises to `larger`, rescale l and o.",
            ),
            "forgets-the-maximum": (
                s[..., -16:].softmax(-1) @ values[..., -16:, :],
                "Only the last block of keys counts. If m stays where it began, each rescale is 0: m becomes `larger`.",
            ),
            "the-first-keys-again": (
                s[..., :16].softmax(-1) @ values[..., :16, :],
                "Only the first block of keys counts: move K and V on.",
            ),
        }
        if same(out[:, :1].double(), want[:, :1], 1e-4) and not same(out[:, 1:].double(), want[:, 1:], 1e-4):
            fail(
                "each-head-its-own-keys",
                "Head 0 is right, and head 1 is not. The two share one key/value head: K and V of head // GROUP.",
            )
        expect(out, want, mistakes, "The output")
        if not torch.allclose(lse.double(), want_lse, atol=1e-4):
            fail("lse-in-base-2", f"lse is {lse[0, 0, 0]:.3f}, expected {want_lse[0, 0, 0]:.3f}: m · scale + ln l.")
    with_options((0, 4))
    compiles("forward")


def online(s, values, rescale_sum=False, rescale_output=False):
    """Attention with blocks of 16 keys, of which some sum is not rescaled when the maximum rises."""
    m, l, o = torch.tensor(-torch.inf), torch.tensor(0.0), torch.tensor(0.0)
    for start in range(0, s.shape[-1], 16):
        block = s[..., start : start + 16]
        larger = torch.maximum(m, block.amax(-1, keepdim=True))
        rescale, p = torch.exp(m - larger), torch.exp(block - larger)
        l = l * (rescale if rescale_sum else 1) + p.sum(-1, keepdim=True)
        o = o * (rescale if rescale_output else 1) + p @ values[..., start : start + 16, :]
        m = larger
    return o / l


def _forward(q, k, v, options):
    from flash import kernels

    return kernels.forward(q, k, v, options)


def draw(random: Random) -> list[triton_kit.Case]:
    """In one case the scores are so far below 0 that only the lowest finite number lies below them."""
    spoilt = {"all scores": "all scores, and they are one"}
    return [case._replace(spoilt=spoilt.get(case.spoilt, case.spoilt)) for case in triton_kit.draw(random)]


def result(case: triton_kit.Case) -> dict[str, Any]:
    """What the kernel stores, and what it loads: nothing from beside the tensors, and no block twice."""
    return triton_kit.run_forward(case)


tolerance = triton_kit.tolerance
