"""Who holds the peak, in rows that a person can read.

34 tensors of 32 layers      one row, "32 alike": layers are the same but for their number
aten._log_softmax.default    "log-softmax of the logits: 4 × 2,048 × 32,000"
born in                      the line of the user's code, backward's too
"""

import dataclasses
import re

from minizero.memory import Ledger
from minizero.memory.tape import at_peak
from minizero.xray.lines import Birth

NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")
STATES = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer states", "buffers": "buffers"}
# What makes a tensor, in words. An operator that is not here is called by its own name.
WORDS = {
    "_log_softmax": "log-softmax",
    "mm addmm": "matrix product",
    "bmm baddbmm": "batched matrix product",
    "_grouped_mm": "products of the experts",
    "clone contiguous copy _to_copy": "copy",
    "cat": "concatenation",
    "mul": "product",
    "add": "sum",
    "native_layer_norm _fused_rms_norm": "norm",
    "native_dropout bernoulli_": "dropout",
    "_scaled_dot_product_flash_attention_for_cpu": "attention",
    "nll_loss_forward nll_loss": "loss",
    "embedding embedding_dense": "embeddings",
    "native_batch_norm": "batch norm",
    "empty new_empty zeros new_zeros zeros_like empty_like full": "new memory",
}
NAMES = {operator: words for operators, words in WORDS.items() for operator in operators.split()}


@dataclasses.dataclass
class Row:
    """Tensors that are alike: born in the same line, of the same shape, in layers of the same name."""

    what: str
    category: str
    module: str
    line: str
    alike: int  # modules
    tensors: int
    bytes: int
    phase: str


def rows_at_peak(ledger: Ledger, vocabulary: int = 0) -> list[Row]:
    """Everything that is alive when the total is largest, the most bytes first, and then by name."""
    rows: dict[tuple[str, ...], Row] = {}
    modules: dict[tuple[str, ...], set[str]] = {}
    for record, size, _ in at_peak(ledger.tape, ledger.start).alive.values():
        category = record.category or "temporary"
        if category == "host":  # no part of the peak
            continue
        birth: Birth | None = getattr(record, "birth", None)
        if category in STATES or birth is None:
            what, module, line = STATES.get(category, category), record.module, ""
        else:
            what, module, line = in_words(birth, vocabulary), birth.module, birth.line
        key = what, category, NUMBER.sub("*", module), line
        row = rows.setdefault(key, Row(*key, 0, 0, 0, record.phase))
        modules.setdefault(key, set()).add(module)
        row.alike, row.tensors, row.bytes = len(modules[key]), row.tensors + 1, row.bytes + size
    held = (row for row in rows.values() if row.bytes)
    return sorted(held, key=lambda row: (-row.bytes, row.category, row.what, row.module, row.line))


def in_words(birth: Birth, vocabulary: int = 0) -> str:
    """What a tensor is: what made it, and its shape. What has a column for each word of `vocabulary` is logits."""
    name = birth.operator.removeprefix("aten.").split(".")[0].removesuffix("_").removesuffix("_data")
    plain = name.removesuffix("_backward")
    words = NAMES.get(plain, plain.strip("_").replace("_", " "))
    if vocabulary and birth.shape[-1:] == (vocabulary,) and plain not in ("embedding", "embedding_dense"):
        words = "logits" if words == "matrix product" else f"{words} of the logits"
    if name != plain:
        words = f"gradient through {words}"
    elif birth.again:
        words = f"recomputed {words}"
    size = " × ".join(f"{length:,}" for length in birth.shape) or "one number"
    return f"{words}: {size}"
