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

from tests.exercises import triton_kit
from tests.exercises.kit import wrong

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
    wrong("rescales-the-sum-only", "The sum l is rescaled and the output is not: both were measured against the old "
          "maximum.", ("v, o * rescale[:, None], input", "v, o, input")),
    wrong("rescales-the-output-only", "The output is rescaled and the sum l is not: both were measured against the old "
          "maximum.", ("l = l * rescale + tl.sum(p, 1)", "l = l + tl.sum(p, 1)")),
    wrong("forgets-the-mask", "With causal=True rows see keys in their future: -∞ where not visible(…).",
          ("            if part != 1:\n                s = tl.where",
           "            if part == 7:\n                s = tl.where")),
    wrong("forgets-to-divide", "The output is l times too large: divide by l at the end.", ("o / l[:, None]", "o")),
    wrong("forgets-the-maximum", "Only the last block of keys counts. If m stays where it began, each rescale is 0: m "
          "becomes `larger`.", ("            m = larger\n", "")),
    wrong("each-head-its-own-keys", "Head 0 is right, and head 1 is not. The two share one key/value head: K and V of "
          "head // GROUP.",
          ("K = head_of(k_ptr, k_strides, batch, head // GROUP", "K = head_of(k_ptr, k_strides, batch, head"),
          ("V = head_of(v_ptr, v_strides, batch, head // GROUP", "V = head_of(v_ptr, v_strides, batch, head")),
    wrong("multiplies-in-tf32", "", ("o * rescale[:, None], input_precision=PRECISION)", "o * rescale[:, None])")),
    wrong("wrong-base", "The weights are those of 2^x: exp(x) is exp2(x · LOG2_E).",
          ("p = tl.exp2(s * (scale * LOG2_E) - tl.maximum(larger * (scale * LOG2_E), -3.4e38)[:, None])",
           "p = tl.exp2(s * scale - tl.maximum(larger * scale, -3.4e38)[:, None])"),
          ("(m - larger) * (scale * LOG2_E)", "(m - larger) * scale")),
]  # fmt: skip


def draw(random: Random) -> list[triton_kit.Case]:
    """In one case the scores are so far below 0 that only the lowest finite number lies below them."""
    spoilt = {"all scores": "all scores, and they are one"}
    return [case._replace(spoilt=spoilt.get(case.spoilt, case.spoilt)) for case in triton_kit.draw(random)]


def result(case: triton_kit.Case) -> dict[str, Any]:
    """What the kernel stores, and what it loads: nothing from beside the tensors, and no block twice."""
    return triton_kit.run_forward(case)


def check() -> None:
    triton_kit.compiles("forward")


tolerance = triton_kit.tolerance
