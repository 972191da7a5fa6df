"""The parts of `make gpu`: `python -m tests.bench.gpu_parts flash --output results/gpu` runs one of them.

    tests       tests/gpu: attention, ranks that share the card, the ledger, offload, 16 bits, tensors past 2^31
    flash       attention beside PyTorch's backends and FlexAttention; FLASH_AUTOTUNE=1 tries block shapes first
    memory      where the memory of a large GPT goes, by stage and technique; one step by two meters; a limit
    train       the card's rates; steps, conversions and arithmetic in 16 bits beside them
    xray        the X-ray's peaks beside the allocator's
    notebooks   executed on the card, four at once

A part measures by `report.measure`. What needs Jupyter is imported in its part, so that the others run without it.
"""

import argparse
import dataclasses
import functools
import gc
import importlib.util
import itertools
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from minizero import GPT, GPTConfig, Zero3
from minizero.xray.case import case_of
from minizero.xray.plan import Plan
from notebooks.tools import card_attention
from notebooks.tools.card import CUDA, DEVICE, best_times, copy_bandwidth, matmul_rate, synchronize
from precision import FP16
from tests.bench.gpu import PARTS, Report


def tests(report, tiny):
    """What is red is run again next time."""
    report.measure("tests", run_tests)


def run_tests():
    """What pytest says at the end, on several cores where pytest-xdist is there. `RuntimeError` if a test is red."""
    workers = ["-n", str(min(12, os.cpu_count()))] if CUDA and importlib.util.find_spec("xdist") else []
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "-q", "-p", "no:cacheprovider", *workers]
    environment = os.environ | ({} if CUDA else {"GPU_TESTS_ON": "cpu"})
    line = "it printed nothing"
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
    if process.returncode:
        raise RuntimeError(f"{line.strip()}: is pytest there, with pytest-timeout and hypothesis?")
    return line.strip()


def flash(report, tiny):
    """TFLOP/s and memory: `card_attention` says how."""
    lengths, head_dims, rounds = ((32, 64), (64,), 1) if tiny else (card_attention.LENGTHS, (64, 128), 5)
    names = ("flash", "MATH") if tiny else card_attention.NAMES
    sizes = dict(tokens=64, width=128) if tiny else {}
    report.measure("matmul", lambda: matmul_rate(torch.float16, 64 if tiny else 8192) / 1e12)
    for d, causal, n in itertools.product(head_dims, (False, True), lengths):
        case = functools.partial(card_attention.measure, n, d, causal, torch.float16, names, rounds, **sizes)
        report.measure(f"d {d}, {'causal' if causal else 'full'}, N {n}", case)
    from flash import launch

    if launch.fastest:  # FLASH_AUTOTUNE=1
        report.figures["autotuned"] = {str(key): blocks for key, blocks in launch.fastest.items()}


def memory(report, tiny):
    """Four ranks on one card, as threads: every stage in FP32, then stage 3 with techniques; a GPT of 1.2 billion.

    The ledger itemises what a rank holds; beside it stands what the allocator has handed out to all ranks together.
    """
    from notebooks.tools import card_memory

    config, ranks = card_memory.HALF_BILLION, 4
    largest = GPTConfig(sequence_length=1024, width=2048, layers=24, heads=32, attention="flash", recompute="full")
    if tiny:
        config, ranks = GPTConfig(sequence_length=16, width=32, layers=2, heads=2), 2
        largest = config
    everything, half = dataclasses.replace(config, attention="flash", recompute="full"), {"dtype": torch.float16}
    cases = card_memory.cases(config)
    cases["Zero3, all three"] = everything, Zero3, half
    cases["Zero3, all three, offload"] = everything, Zero3, half | {"offload": True}
    cases[f"{largest.count_parameters()[0] / 1e6:,.1f} M, Zero3, all three"] = largest, Zero3, half
    for name, case in cases.items():
        report.measure(name, functools.partial(card_memory.measure, *case, ranks))
    for name in ("timeline", "limited") if CUDA else ():
        report.measure(name, getattr(card_memory, name))


def train(report, tiny):
    """The card's own rates, and beside them what our code reaches: steps, offload, conversions, arithmetic."""
    from notebooks.tools import card_steps

    rounds = 1 if tiny else 5
    small = GPTConfig(width=32, layers=1)
    step = functools.partial(card_steps.steps, *((small, 1) if tiny else (card_steps.LARGE, card_steps.BATCH)), rounds)
    ways = {"resident": {}, "offload": {"offload": True, "prefetch": 0}}
    ways["offload, prefetch"] = {"offload": True, "prefetch": 1}
    bf16 = {name: {"dtype": torch.bfloat16} | more for name, more in ways.items()}
    sizes = (4, 64) if tiny else (card_steps.ROWS, card_steps.COLUMNS)
    report.measure("copy bandwidth", lambda: copy_bandwidth(2**12 if tiny else 2**30, rounds))
    report.measure("matmul rates", lambda: card_steps.matmul_rates(64 if tiny else 8192, rounds))
    report.measure("step", lambda: step({name: {"dtype": dtype} for name, dtype in card_steps.DTYPES.items()}))
    report.measure("offload", lambda: step(bf16))
    report.measure("conversions", lambda: conversions(2**12 if tiny else 2**28, rounds))
    report.measure("arithmetic", lambda: card_steps.arithmetic(*sizes, rounds))


def conversions(elements, rounds):
    """Bytes a second, read and written, of FP16's encode and decode, as they are and compiled."""
    x = torch.randn(elements, device=DEVICE)
    bits = FP16.encode(x)
    functions = {"encode": lambda: FP16.encode(x), "decode": lambda: FP16.decode(bits), "half()": lambda: x.half()}
    if CUDA:
        encode, decode = torch.compile(FP16.encode), torch.compile(FP16.decode)
        functions |= {"encode, compiled": lambda: encode(x), "decode, compiled": lambda: decode(bits)}
    return {name: 6 * elements / spent for name, spent in best_times(functions, rounds).items()}


LLAMA = dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=16, num_attention_heads=16, vocab_size=32000)
QUIET = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
# {name: (model, configuration, its options, batch, length)}
MODELS = {
    "gpt2, fp32, dropout": ("GPT2LMHeadModel", "GPT2Config", {}, 8, 1024),
    "gpt2, fp32, no dropout": ("GPT2LMHeadModel", "GPT2Config", QUIET, 8, 1024),
    "llama 300M, fp32": ("LlamaForCausalLM", "LlamaConfig", LLAMA | {"num_key_value_heads": 4}, 4, 2048),
    "llama 300M, fp32, no groups": ("LlamaForCausalLM", "LlamaConfig", LLAMA, 4, 2048),
    "bert mlm, fp32, dropout": ("BertForMaskedLM", "BertConfig", {}, 16, 512),
    "t5-small": ("T5ForConditionalGeneration", "T5Config", {}, 8, 512),
}


def xray(report, tiny):
    """Models of Hugging Face where transformers is there, and our GPT."""
    makes = {"our GPT": functools.partial(our_gpt, tiny)}
    if not tiny and importlib.util.find_spec("transformers"):
        makes |= {name: functools.partial(hugging_face, *arguments) for name, arguments in MODELS.items()}
    for name, make in makes.items():
        report.measure(name, functools.partial(beside, make))
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()


def hugging_face(model, configuration, options, batch, length):
    """A model, and a batch of tokens which are also its labels."""
    import transformers

    config = getattr(transformers, configuration)(**options)
    config.use_cache = False
    tokens = torch.zeros(batch, length, dtype=torch.long)
    return getattr(transformers, model)(config), {"input_ids": tokens, "labels": tokens}


def our_gpt(tiny):
    config = GPTConfig(width=32, layers=1) if tiny else GPTConfig(sequence_length=1024, width=1024, layers=12, heads=16)
    tokens = torch.zeros(1 if tiny else 8, config.sequence_length, dtype=torch.long)
    return GPT(config), {"x": tokens, "y": tokens}


def beside(make):
    """Bytes of the second step, the first with AdamW's states: of the X-ray, as it stands, and of the allocator."""
    adamw = functools.partial(torch.optim.AdamW, foreach=True)
    found = {"xray": case_of(make, adamw).run(Plan()).peak["total"]}
    model, inputs = make()
    model = model.to(DEVICE).train()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        output = model(**{name: tensor.to(DEVICE) for name, tensor in inputs.items()})
        loss = getattr(output, "loss", output)
        del output
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize()
    if CUDA:
        found |= {"requested": torch.cuda.memory_stats()["requested_bytes.all.peak"]}
        found |= {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    return found


LONGEST_FIRST = ("09", "06", "05", "08", "07", "02")


def notebooks(report, tiny):
    """Every notebook executed into the folder. It notices a GPU by itself. Cells run on after one that fails."""
    import nbformat

    from notebooks.tools.run import FOLDER

    paths = sorted(FOLDER.glob("*.ipynb"), key=lambda path: (path.name[:2] not in LONGEST_FIRST, path.name))
    if tiny:  # one that shows whether this works at all
        paths = [report.path.parent / "tiny.ipynb"]
        cells = [nbformat.v4.new_code_cell("import torch; torch.ones(2).sum()")]
        nbformat.write(nbformat.v4.new_notebook(cells=cells), paths[0])
    folder = report.path.parent / "notebooks"
    folder.mkdir(exist_ok=True)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda path: report.measure(path.stem, lambda: run_notebook(path, folder)), paths))


def run_notebook(path, folder):
    """Seconds that it took. `RuntimeError` if a cell fails: its assertions are in the notebook."""
    import nbformat

    from notebooks.tools.run import execute

    start = time.perf_counter()
    notebook = execute(path, allow_errors=True)
    nbformat.write(notebook, folder / path.name)
    outputs = ((number, output) for number, cell in enumerate(notebook.cells) for output in cell.get("outputs", []))
    errors = [f"cell [{n}] {x.ename}: {x.evalue}"[:150] for n, x in outputs if x.output_type == "error"]
    if errors:
        raise RuntimeError("; ".join(errors).replace("\n", " "))
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu_parts")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    report = Report(arguments.output, arguments.part)
    globals()[arguments.part](report, arguments.tiny)
    report.finish()


if __name__ == "__main__":
    main()
