"""The X-ray of large models: how long it takes, and its peaks beside published ones.

    python -m tests.bench.xray

Models are built from configurations that stand here. Nothing is downloaded, and nothing is trained: on fake tensors a
step only computes shapes. Published: torchtitan's table of Llama 3 8B (H100, FSDP2, two sequences of 8,192, selective
recompute), what a GPU's allocator had reserved; and Zhao et al., 2023, "PyTorch FSDP": T5-11B trains at batches of 8
and 16 of 512 tokens on A100s of 80 GB.
"""

import resource
import sys
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from minizero import GPT, GPTConfig
from minizero.ranks.one_of_many import one_of_many
from minizero.recompute import checkpoint_selective, keep_matmuls
from minizero.xray.case import Case, case_of
from minizero.xray.fake import pretend
from minizero.xray.hugging_face import batch_for, switch_caches_off
from minizero.xray.plan import Plan
from minizero.xray.report import GIB, Report
from minizero.xray.step import measure

BF16 = torch.bfloat16
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3 8B": (
        "Llama",
        dict(
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=128256,
            max_position_embeddings=8192,
        ),
    ),
    "T5-11B": (
        "T5",
        dict(d_model=1024, d_kv=128, d_ff=65536, num_layers=24, num_heads=128, decoder_start_token_id=0),
    ),
    "a GPT of 65 B": ("GPT2", dict(n_embd=8192, n_layer=80, n_head=64, n_positions=2048)),
}


def model_of(name: str, batch: int, length: int) -> Case:
    """A case of one of the configurations, on "meta"."""
    import transformers

    transformers.logging.set_verbosity_error()
    kind, options = CONFIGS[name]
    config = getattr(transformers, f"{kind}Config")(**options)

    def make() -> Any:
        wanted = "ForConditionalGeneration" if kind == "T5" else "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
        model = getattr(transformers, kind + wanted)(config)
        return model, batch_for(model, batch, length)

    return case_of(make)


class Selective(nn.Module):
    """A block that keeps its matrix products, and computes the rest again. (torchtitan keeps every second.)"""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint_selective(keep_matmuls, self.block, *args, **kwargs)


def timed(name: str, ranks: int) -> list[str]:
    """Seconds and MiB of this process for the picture, and then for the whole table."""
    start = time.perf_counter()
    report = Report(model_of(name, 1, 2048), ranks, name)
    picture = time.perf_counter() - start
    rows = report.outcomes
    whole = time.perf_counter() - start
    refused = sum(row.result is None for row in rows)
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    peak = report.peak["total"] / GIB
    return [name, f"{peak:,.1f}", f"{picture:.0f}", f"{whole:.0f}", f"{len(rows)} ({refused} refused)", f"{held:.0f}"]


def peak_of(case: Case, plan: Plan) -> float:
    return case.run(plan).peak["total"] / GIB


def published() -> list[list[str]]:
    """What, how, measured here, published."""
    rows = []
    case = model_of("Llama 3 8B", 2, 8192)
    switch_caches_off(case.model)
    for path in [f"model.layers.{number}" for number in range(32)]:
        case.model.set_submodule(path, Selective(case.model.get_submodule(path)))
    for ranks, printed in ((8, 82.4), (128, 67.0)):
        ours = peak_of(case, Plan(stage=3, ranks=ranks, dtype=BF16, foreach=True))
        words = f"ZeRO-3 on {ranks}, BF16, matrix products kept"
        rows.append(["Llama 3 8B, 2 × 8,192", words, f"{ours:.1f}", f"{printed} ({ours / printed - 1:+.1%})"])
    for batch in (8, 16):
        case = model_of("T5-11B", batch, 512)
        for recompute in (False, True):
            plan = Plan(stage=3, ranks=8, dtype=BF16, recompute=recompute, foreach=True)
            words = "ZeRO-3 on 8, BF16" + ", recompute" * recompute
            rows.append([f"T5-11B, {batch} × 512", words, f"{peak_of(case, plan):.1f}", "trains in 74.5 (80 GB)"])
    return rows


def others() -> list[list[str]]:
    """A GPT's step: real, by the X-ray, by PyTorch's private MemTracker on the same fake tensors, and by formulas.

    The formulas: accelerate's `estimate-memory`, 16 bytes a parameter; vram-check 0.1.1, and 8 more for each sample.
    """
    rows = []
    for words, batch, options in (
        ("the demo's", 2, {}),
        ("vocabulary 32,000", 4, {"vocabulary": 32_000, "sequence_length": 256}),
        ("512 tokens", 4, {"sequence_length": 512}),
    ):
        config = GPTConfig(**options)
        tokens = torch.zeros(2, batch, config.sequence_length, dtype=torch.long).unbind()
        case = Case(GPT(config), tokens)
        start = time.process_time()
        ours = case.run(Plan()).peak["total"]
        seconds = time.process_time() - start
        start = time.process_time()
        tracked = by_mem_tracker(case)
        ratio = (time.process_time() - start) / seconds
        real = measure(GPT(config), tokens, Plan(), torch.optim.AdamW, one_of_many(1)).ledger.peak["total"]
        formulas = (16 * case.parameters, (16 + 8 * batch) * case.parameters)
        figures = (real, ours, tracked, *formulas)
        rows.append([words, *(f"{held / 2**20:,.1f}" for held in figures), f"{ratio:.1f}"])
    return rows


def by_mem_tracker(case: Case) -> int:
    """The peak that PyTorch's own tracker finds in two steps."""
    with pretend() as mode:
        model = mode.copy(case.model)
        optimizer = torch.optim.AdamW(model.parameters())
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            for _ in range(2):
                tracker.reset_mod_stats()
                batch = [tensor.clone() for tensor in mode.copy(case.inputs)]
                model(*batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


def main() -> None:
    torch.set_num_threads(2)
    console = Console(width=120)
    table = Table("a GPT's step", title="Peak, MiB; fake tensors but for the first")
    for heading in (
        "real step",
        "X-ray",
        "MemTracker",
        "accelerate's formula",
        "vram-check's",
        "time, MemTracker / X-ray",
    ):
        table.add_column(heading, justify="right")
    for row in others():
        table.add_row(*row)
    console.print(table)
    table = Table("model, 1 × 2,048", title=f"A step on fake tensors, torch {torch.__version__}")
    for heading in ("peak, GiB", "picture, s", "table, s", "rows", "this process, MiB"):
        table.add_column(heading, justify="right")
    for name in sys.argv[1:] or CONFIGS:
        table.add_row(*timed(name, 8))
    console.print(table)
    table = Table("model", "how", title="Peak of a rank, GiB")
    table.add_column("measured here", justify="right")
    table.add_column("published")
    for row in published():
        table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    main()
