"""Models as the simulator sees them: a row of units, each with parameters, FLOPs and what it keeps for backward.

A layer of width h on s tokens, with attention of inner width i and a perceptron of width f:

    parameters    4 h i + 2 h f                        12 h² if i = h and f = 4h
    forward       2 s (4 h i + 2 h f) + 4 s² i FLOPs   the last term: scores, and their product with v
    backward      twice as many
    kept          s (6h + 4i + 2f) + a s² elements     a: heads; the last term: the softmax
                  s (6h + 4i + 2f)                     with flash attention or selective recomputation
                  s h                                  with full recomputation

Vaswani et al., 2017 (GPT's layers); Raffel et al., 2020, "T5"; Korthikanti et al., 2022, section 4 (FLOPs, memory).
"""

import dataclasses
from collections.abc import Callable, Mapping

from minizero.simulate.clusters import choose
from minizero.simulate.strategy import check_counts


@dataclasses.dataclass(frozen=True)
class Layer:
    """What is gathered, computed and reduced together. All but `parameters` is for one sequence.

    flops: of forward. core_flops: the part of them in attention's scores and their product with v.
    kept, core_kept: elements in the dtype from forward to backward. masks, core_masks: those of dropout, a byte each.
    `core_…` is what the scores add, and flash attention does not keep. boundary: elements of the unit's input.
    """

    name: str
    parameters: int
    flops: float
    core_flops: float = 0.0
    kept: float = 0.0
    core_kept: float = 0.0
    masks: float = 0.0
    core_masks: float = 0.0
    boundary: float = 0.0

    def activations(self, itemsize: int, recompute: str = "none", flash: bool = False) -> float:
        """Bytes that one sequence keeps from forward to backward."""
        if recompute == "full":
            return itemsize * self.boundary
        core = 0.0 if flash or recompute == "selective" else itemsize * self.core_kept + self.core_masks
        return itemsize * self.kept + self.masks + core

    def recomputed(self, recompute: str) -> float:
        """FLOPs that run a second time in backward. What flash attention recomputes by itself is not counted."""
        return {"none": 0.0, "selective": self.core_flops, "full": self.flops}[recompute]


@dataclasses.dataclass(frozen=True)
class Model:
    """root: embeddings, final norm and head, which are gathered once. units: the blocks, in order of forward."""

    name: str
    root: Layer
    units: tuple[Layer, ...]
    tokens: int  # of one sequence, as tokens per second count them

    @property
    def parameters(self) -> int:
        return self.root.parameters + sum(unit.parameters for unit in self.units)

    def flops(self, recompute: str = "none") -> float:
        """FLOPs of one sequence: forward, what runs again, and backward."""
        blocks = sum(3 * unit.flops + unit.recomputed(recompute) for unit in self.units)
        return 3 * self.root.flops + blocks


def layer(
    name: str,
    width: int,
    heads: int,
    inner: int,
    hidden: int,
    sequence: int,
    *,
    kv_inner: int | None = None,
    gated: bool = False,
    biases: bool = False,
    dropout: bool = False,
    cross: int = 0,
) -> Layer:
    """A transformer layer.

    kv_inner: width of k and v if several heads share them. gated: the perceptron has three matrices. cross: length
    of the encoder's sequence, to which a decoder's layer attends too; 0 for none.
    """
    kv = kv_inner or inner
    attention = width * (2 * inner + 2 * kv)
    perceptron = width * hidden * (3 if gated else 2)
    norms = 2 + (cross > 0)
    vectors = (inner + 2 * kv + hidden + (2 + norms) * width if biases else 0) + norms * width
    flops = 2 * sequence * (attention + perceptron)
    core = 4 * sequence**2 * inner
    kept = sequence * (4 * width + 2 * inner + 2 * kv + (4 if gated else 2) * hidden)
    scores = heads * sequence**2
    drops = 2 * sequence * width  # what dropout masks, the scores aside
    if cross:  # a second attention, whose k and v come from the encoder
        flops += 2 * 2 * width * inner * (sequence + cross)
        core += 4 * sequence * cross * inner
        kept += 2 * sequence * (width + inner) + 2 * cross * inner
        scores += heads * sequence * cross
        drops += sequence * width
    return Layer(
        name,
        parameters=attention * (2 if cross else 1) + perceptron + vectors,
        flops=flops + core,
        core_flops=core,
        kept=kept,
        core_kept=scores * (2 if dropout else 1),
        masks=drops if dropout else 0,
        core_masks=scores if dropout else 0,
        boundary=sequence * width,
    )


def head(width: int, vocabulary: int, sequence: int, positions: int, tied: bool) -> Layer:
    """Embeddings, final norm and the matrix to the logits."""
    parameters = width * (vocabulary * (1 if tied else 2) + positions + 1)
    kept = sequence * (2 * width + vocabulary)  # inputs of norm and matrix, and the softmax
    return Layer("root", parameters, 2 * sequence * width * vocabulary, kept=kept)


def gpt(
    layers: int,
    width: int,
    heads: int,
    sequence: int = 2048,
    vocabulary: int = 50257,
    *,
    name: str = "GPT",
    hidden: int | None = None,
    kv_heads: int | None = None,
    gated: bool = False,
    biases: bool = False,
    dropout: bool = False,
    positions: int | None = None,
    tied: bool = True,
) -> Model:
    """A decoder. Raises `ValueError` for a shape that cannot be."""
    check_counts(layers=layers, width=width, heads=heads, sequence=sequence, vocabulary=vocabulary)
    if layers > 10_000:
        raise ValueError(f"layers must be at most 10,000, not {layers:,}: each is gone through")
    if width % heads:
        raise ValueError(f"width ({width}) must be divisible by heads ({heads})")
    kv_inner = width // heads * (kv_heads or heads)
    options = {"kv_inner": kv_inner, "gated": gated, "biases": biases, "dropout": dropout}
    block = layer("block", width, heads, width, hidden or 4 * width, sequence, **options)  # type: ignore[arg-type]
    blocks = tuple(dataclasses.replace(block, name=f"block {i}") for i in range(layers))
    places = sequence if positions is None else positions
    return Model(name, head(width, vocabulary, sequence, places, tied), blocks, sequence)


def t5(
    layers: int,
    width: int,
    heads: int,
    head_width: int,
    hidden: int,
    sequence: int = 512,
    *,
    name: str = "T5",
) -> Model:
    """An encoder of `layers` layers on `sequence` tokens, and a decoder of as many layers on `sequence` more."""
    check_counts(layers=layers, width=width, heads=heads, sequence=sequence)
    shape = (width, heads, heads * head_width, hidden, sequence)
    encoder, decoder = layer("encoder", *shape), layer("decoder", *shape, cross=sequence)
    units = [dataclasses.replace(encoder, name=f"encoder {i}") for i in range(layers)]
    units += [dataclasses.replace(decoder, name=f"decoder {i}") for i in range(layers)]
    return Model(name, head(width, 32128, sequence, 0, True), tuple(units), sequence)


# Each is a function of the sequence's length. MPT: mosaicml/llm-foundry, scripts/train/yamls/pretrain; Megatron:
# Narayanan et al., 2021, table 1; T5: the shapes of Raffel et al. and of version 1.1, which give the counts of Zhao et
# al., 2023.
MODELS: dict[str, Callable[[int], Model]] = {
    "gpt-mini": lambda s: gpt(4, 256, 4, s, 256, name="gpt-mini"),
    "gpt2-xl": lambda s: gpt(48, 1600, 25, s, biases=True, positions=1024, name="gpt2-xl"),
    "mpt-1b": lambda s: gpt(24, 2048, 16, s, 50368, name="mpt-1b"),
    "mpt-3b": lambda s: gpt(32, 2560, 20, s, 50368, name="mpt-3b"),
    "mpt-7b": lambda s: gpt(32, 4096, 32, s, 50368, name="mpt-7b"),
    "mpt-13b": lambda s: gpt(40, 5120, 40, s, 50368, name="mpt-13b"),
    "mpt-30b": lambda s: gpt(48, 7168, 56, s, 50368, name="mpt-30b"),
    "mpt-70b": lambda s: gpt(80, 8192, 64, s, 50368, name="mpt-70b"),
    "llama3-8b": lambda s: gpt(
        32, 4096, 32, s, 128256, hidden=14336, kv_heads=8, gated=True, positions=0, tied=False, name="llama3-8b"
    ),
    "gpt-175b": lambda s: gpt(96, 12288, 96, s, biases=True, name="gpt-175b"),
    "megatron-175b": lambda s: gpt(96, 12288, 96, s, 51200, biases=True, name="megatron-175b"),
    "megatron-530b": lambda s: gpt(105, 20480, 128, s, 51200, biases=True, name="megatron-530b"),
    "megatron-1t": lambda s: gpt(128, 25600, 160, s, 51200, biases=True, name="megatron-1t"),
    "t5-611m": lambda s: t5(24, 1024, 16, 64, 2816, s, name="t5-611m"),
    "t5-2.28b": lambda s: t5(24, 2048, 32, 64, 5120, s, name="t5-2.28b"),
    "t5-11b": lambda s: t5(24, 1024, 128, 128, 65536, s, name="t5-11b"),
}
SEQUENCE: Mapping[str, int] = {"gpt-mini": 64, "gpt2-xl": 1024, "llama3-8b": 8192} | {
    name: 512 for name in MODELS if name.startswith("t5")
}


def model(name: str, sequence: int | None = None) -> Model:
    """A known model. sequence: tokens; None for the length that it is usually trained with."""
    length = SEQUENCE.get(name, 2048) if sequence is None else sequence
    return choose(MODELS, name, "model")(length)
