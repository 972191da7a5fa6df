"""What others measured on their clusters, as data. Each row says how it was run, and whether a fit may look at it.

If a publication does not say how it was run, the run is chosen here and marked "assumed". Figures read off a chart
are "about".
"""

import dataclasses
from collections.abc import Mapping

from minizero.simulate.clusters import CLUSTERS, GIB, Cluster
from minizero.simulate.strategy import Strategy

TFLOPS, TOKENS, RATIO = "TFLOP/s per GPU", "tokens/s per GPU", "ratio of TFLOP/s"


@dataclasses.dataclass(frozen=True)
class Row:
    """One published figure. against: the run that a ratio compares with. fitted: may a fit look at it?"""

    model: str
    plan: Strategy
    value: float
    fitted: bool
    unit: str = TFLOPS
    about: bool = False
    against: Strategy | None = None
    precision: str = ""  # runs of one model and precision share an efficiency


@dataclasses.dataclass(frozen=True)
class Publication:
    """A publication's rows.

    shared: constants fitted for all rows together, beside the efficiencies. carried: constants that the fit of
    llm-foundry found. note: how the rows were run, and what is assumed.
    """

    name: str
    source: str
    cluster: Cluster
    rows: tuple[Row, ...]
    shared: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()
    note: str = ""


def _llm_foundry() -> Publication:
    runs = {  # micro-batch, recompute, reshard_after_forward; tokens/s at 128, 256, 512
        "mpt-70b": (8, "full", True, (1058, 1035, 1007)),
        "mpt-30b": (8, "full", True, (2199, 2148, 2115)),
        "mpt-13b": (16, "full", True, (5080, 4989, 4952)),
        "mpt-7b": (6, "none", True, (10475, 10119, 9670)),
        "mpt-3b": (8, "none", False, (23422, 22772, 21664)),
        "mpt-1b": (12, "none", False, (44123, 42555, 39837)),
    }
    rows = []
    for name, (batch, recompute, reshard, values) in runs.items():
        for gpus, value in zip((128, 256, 512), values):
            plan = Strategy(gpus, batch_size=batch, recompute=recompute, flash=True, reshard_after_forward=reshard)
            rows.append(Row(name, plan, value, gpus < 512, TOKENS))
    return Publication(
        "llm-foundry",
        "MosaicML, llm-foundry, scripts/train/benchmarking/README.md, H100 80 GB, BF16, at least 128 GPUs",
        CLUSTERS["h100"],
        tuple(rows),
        shared=("interference", "jitter"),
        note="3b and 1b with SHARD_GRAD_OP, which keeps gathered parameters from forward to backward.",
    )


def _megatron() -> Publication:
    runs = {
        "megatron-175b": {(384, 4): 144, (768, 2): 88, (1536, 1): 44},
        "megatron-530b": {(640, 4): 138, (1120, 2): 98, (2240, 1): 48},
    }
    rows = tuple(
        Row(name, Strategy(gpus, batch_size=batch, dtype="float16", recompute="full"), value, name == "megatron-175b")
        for name, values in runs.items()
        for (gpus, batch), value in values.items()
    )
    return Publication(
        "Megatron-LM, ZeRO-3",
        "Narayanan et al., 2021, Table 2: DeepSpeed's ZeRO-3 without model parallelism, A100 80 GB",
        CLUSTERS["a100-80"],
        rows,
        shared=("network",),
        carried=("interference",),
        note="Sequences of 2048; micro-batches 4, 2, 1. One efficiency for both models.",
    )


def _fsdp() -> Publication:
    def t5(gpus: int, **options: object) -> Strategy:
        return Strategy(gpus, **({"batch_size": 8, "recompute": "full"} | options))  # type: ignore[arg-type]

    def fp32(stage: int) -> Strategy:
        return t5(16, stage=stage, dtype="float32")

    about = {"about": True, "precision": "float32"}
    large = {batch: Strategy(512, batch_size=batch, recompute="full") for batch in (1, 2)}
    rows = (
        Row("t5-611m", fp32(3), 15.18, True, **about),  # type: ignore[arg-type]
        Row("t5-611m", fp32(0), 14.61, False, **about),  # type: ignore[arg-type]
        Row("t5-2.28b", fp32(3), 27.40, True, **about),  # type: ignore[arg-type]
        Row("t5-2.28b", fp32(0), 25.76, False, **about),  # type: ignore[arg-type]
        Row("t5-11b", t5(16), 148.48, True, about=True),
        Row("t5-11b", t5(16, sharding_factor=8), 145.81, False, about=True),
        Row("t5-11b", t5(512), 0.93, True, RATIO, against=t5(8)),
        Row("t5-11b", t5(512, batch_size=16), 0.93, False, RATIO, against=t5(8, batch_size=16)),
        Row("gpt-175b", large[1], 173, True),
        Row("gpt-175b", large[2], 186, False),
        Row("gpt-175b", large[1], 1.0, False, RATIO, against=dataclasses.replace(large[1], ranks=128)),
    )
    return Publication(
        "PyTorch FSDP",
        "Zhao et al., 2023, arXiv 2304.11277, Figures 6 and 7: A100 80 GB, 2 Tb/s RoCE",
        CLUSTERS["a100-80-roce"],
        rows,
        shared=("jitter",),
        carried=("interference",),
        note="Assumed: 16 GPUs and batch 8 for T5 against size, full recomputation, TF32 for FP32, and that FLOPs "
        "count what is computed twice.",
    )


def _torchtitan() -> Publication:
    h100 = dataclasses.replace(CLUSTERS["h100"].gpu, name="H100 96 GB", memory=96 * GIB, memory_bandwidth=2.4e12)
    plans = {n: Strategy(n, batch_size=2, recompute="selective", flash=True) for n in (8, 128)}
    return Publication(
        "torchtitan",
        "PyTorch, torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, Tables 1 and 3: FSDP, Llama 3.1 8B",
        dataclasses.replace(CLUSTERS["h100"], gpu=h100),
        (Row("llama3-8b", plans[8], 5762, True, TOKENS), Row("llama3-8b", plans[128], 5605, False, TOKENS)),
        carried=("interference", "jitter"),
        note="H100 with 96 GB at 500 W; a selective recomputation of its own.",
    )


PUBLICATIONS: Mapping[str, Publication] = {
    one.name: one for one in (_llm_foundry(), _megatron(), _fsdp(), _torchtitan())
}
TORCHTITAN_GIB = {8: 82.4, 128: 67.0}  # the memory of torchtitan's runs, by GPUs

# Rajbhandari et al., 2019, Table 1: decimal GB of model states, {GPUs: {parameters: (stage 1, stage 2, stage 3)}}, as
# printed: some cells are rounded and some cut off.
ZERO_TABLE_1: Mapping[int, Mapping[str, tuple[str, str, str]]] = {
    1: {"7.5e9": ("120", "120", "120"), "128e9": ("2048", "2048", "2048"), "1e12": ("16000", "16000", "16000")},
    4: {"7.5e9": ("52.5", "41.3", "30"), "128e9": ("896", "704", "512"), "1e12": ("7000", "5500", "4000")},
    16: {"7.5e9": ("35.6", "21.6", "7.5"), "128e9": ("608", "368", "128"), "1e12": ("4750", "2875", "1000")},
    64: {"7.5e9": ("31.4", "16.6", "1.88"), "128e9": ("536", "284", "32"), "1e12": ("4187", "2218", "250")},
    256: {"7.5e9": ("30.4", "15.4", "0.47"), "128e9": ("518", "263", "8"), "1e12": ("4046", "2054", "62.5")},
    1024: {"7.5e9": ("30.1", "15.1", "0.12"), "128e9": ("513", "257", "2"), "1e12": ("4011", "2013", "15.6")},
}
