"""python -m flash.compile: compile every kernel for GPUs that need not be there, and show what each takes.

    registers       of a thread
    spilled         bytes of a thread that did not fit into registers, and go to HBM's cache
    shared          bytes of shared memory
    copies          warps that compute each number of a product: 1, unless a block has too few rows for its warps
    instructions    that multiply matrices: wgmma (Hopper), mma (Ampere, Ada), mfma (AMD)

For NVIDIA, registers and spills come from `ptxas`, which is part of Triton; for AMD, from the compiled code itself.
TRITON_CACHE_DIR is respected.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from triton import knobs, runtime
from triton.backends.compiler import GPUTarget

from flash import kernels
from flash.gpus import PROCESSORS
from flash.launch import Launch
from flash.options import Options

TARGETS = {name: GPUTarget(*kind.target) for name, kind in PROCESSORS.items() if kind.target}
HEAD_DIMS = (16, 32, 64, 128, 256)
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
# Sets of options: the keys are names in the table.
COMBINATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": dict(right=0),
    "everything": dict(left=100, right=0, bottom_right=True, dropout_p=0.1, packed=True, kv_heads=2),
}


class Compiled(NamedTuple):
    """One kernel for one GPU."""

    gpu: str
    kernel: str
    head_dim: int
    dtype: str
    options: str
    registers: int
    spilled: int  # bytes a thread
    shared: int  # bytes
    copies: int  # warps that compute the same number of a product
    instructions: str  # of matrix multiplication: name × number, "-" where there are none


class NoGpu:
    """Tells Triton which GPU to compile for, as its driver would."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_current_device(self) -> str:
        return self.name

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.name]


def launches(
    head_dim: int,
    dtype: torch.dtype,
    *,
    left: int = -1,
    right: int = -1,
    bottom_right: bool = False,
    dropout_p: float = 0.0,
    packed: bool = False,
    kv_heads: int = 4,
) -> list[Launch]:
    """Forward and backward, as `flash.kernels` would launch them, on tensors without data."""
    n = 4096
    with torch.device("meta"):
        q, k = torch.empty(1, 4, n, head_dim, dtype=dtype), torch.empty(1, kv_heads, n, head_dim, dtype=dtype)
        lse = torch.empty(1, 4, n)
        seed = torch.empty((), dtype=torch.int64) if dropout_p else None
        starts = torch.empty(4, dtype=torch.int32) if packed else None
    options = Options(0.1, left, right, bottom_right, dropout_p, seed, starts, starts, max_q=n, max_k=n)
    forward = kernels.forward_launch(q, k, k, q, lse, options)
    return [forward, *kernels.backward_launches(q, lse, q, k, k, q, lse, lse, q, k, k, options)]


def compile_all(
    gpus: list[str], head_dims: list[int], dtypes: list[str], combinations: list[str]
) -> Iterator[Compiled]:
    """Every kernel for every combination of these, in this order."""
    for gpu in gpus:
        runtime.driver.set_active(NoGpu(gpu))
        for dtype in dtypes:
            for head_dim in head_dims:
                for options in combinations:
                    for launch in launches(head_dim, DTYPES[dtype], **COMBINATIONS[options]):
                        compiled = launch.kernel.warmup(*launch.all_arguments(), grid=(1,), **launch.arguments)
                        yield Compiled(gpu, launch.name, head_dim, dtype, options, *inspect(gpu, compiled))


def inspect(gpu: str, compiled: Any) -> tuple[int, int, int, int, str]:
    """Registers, spilled bytes, shared memory, copies, matrix instructions."""
    shared = compiled.metadata.shared
    if gpu.startswith("sm_"):
        assembly = compiled.asm["ptx"]
        registers, spilled = ask_ptxas(gpu, assembly)
        names = {"wgmma": r"\bwgmma\.mma_async", "mma": r"\bmma\.sync"}
    else:
        assembly = compiled.asm["amdgcn"]

        def number(field: str) -> int:
            return int(re.search(rf"\.{field}:\s*(\d+)", assembly)[1])  # type: ignore[index]

        registers, spilled = number("vgpr_count"), 4 * number("vgpr_spill_count")
        shared = max(shared, number("group_segment_fixed_size"))
        names = {"mfma": r"\bv_mfma_"}
    counts = {name: len(re.findall(pattern, assembly)) for name, pattern in names.items()}
    copies = count_copies(compiled.asm["ttgir"])
    return registers, spilled, shared, copies, " ".join(f"{name} × {n}" for name, n in counts.items() if n) or "-"


def count_copies(ttgir: str) -> int:
    """How many warps compute each number, in the product where they are most. Read from Triton's own layouts.

    A layout such as `warpsPerCTA = [8, 1], instrShape = [16, 8]` covers 8 * 16 rows and 8 columns. If the product has
    64 rows, two warps stand on each of them. Without a matrix unit the threads of a warp make the instruction.
    """
    covered = {}
    for name, body in re.findall(r"^(#\w+) = #ttg\.(?:nvidia_mma|amd_mfma|blocked)<\{(.*)\}>", ttgir, re.MULTILINE):
        numbers = {field: json.loads(value) for field, value in re.findall(r"(\w+) = (\[[\d, ]+\])", body)}
        warps = numbers["warpsPerCTA"]
        if "instrShape" in numbers:
            tile = [1] * (len(warps) - 2) + numbers["instrShape"][:2]  # of three numbers the last is the inner size
        else:
            tile = [a * b for a, b in zip(numbers["sizePerThread"], numbers["threadsPerWarp"], strict=True)]
        covered[name] = [a * b for a, b in zip(warps, tile, strict=True)]
    products = re.findall(r"= (?:tt\.dot|ttng\.warp_group_dot) .*-> tensor<([\dx]+)x\w+, (#\w+)>", ttgir)
    counts = (
        math.prod(max(1, reach // size) for reach, size in zip(covered[name], map(int, shape.split("x")), strict=True))
        for shape, name in products
    )
    return max(counts, default=1)


def ask_ptxas(gpu: str, ptx: str) -> tuple[int, int]:
    """Registers of a thread, and bytes that it spills: the larger of what it stores and what it loads again."""
    target = re.search(r"\.target (sm_\w+)", ptx)[1]  # type: ignore[index]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.ptx")
        with open(path, "w") as file:
            file.write(ptx)
        command = [knobs.nvidia.ptxas.path, "-v", "--gpu-name", target, path, "-o", os.path.join(folder, "kernel.o")]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    stores, loads = map(int, re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report).groups())  # type: ignore[union-attr]
    return int(re.search(r"Used (\d+) registers", report)[1]), max(stores, loads)  # type: ignore[index]


def main() -> None:
    """The command line: compiles in a process of its own, where Triton is not its interpreter, and prints the table."""
    layout = argparse.RawDescriptionHelpFormatter  # keeps the lines of the list above
    parser = argparse.ArgumentParser(prog="python -m flash.compile", description=__doc__, formatter_class=layout)
    parser.add_argument("--gpus", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--head-dims", nargs="+", type=int, default=list(HEAD_DIMS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float16"])
    parser.add_argument("--options", nargs="+", choices=COMBINATIONS, default=list(COMBINATIONS))
    parser.add_argument("--json", action="store_true", help="a line of JSON for each kernel instead of the table")
    arguments = parser.parse_args()
    if kernels.INTERPRETED:  # chosen when Triton was imported: compile in a process that chooses otherwise
        environment = os.environ | {"TRITON_INTERPRET": "0"}
        sys.exit(subprocess.call([sys.executable, "-m", "flash.compile", *sys.argv[1:]], env=environment))
    start, count = time.perf_counter(), 0
    line = "{:8} {:8} {:>8} {:9} {:11} {:>9} {:>8} {:>8} {:>6}  {}"
    titles = [name.replace("_", " ") for name in Compiled._fields]
    if not arguments.json:
        print(line.format(*titles))
    for row in compile_all(arguments.gpus, arguments.head_dims, arguments.dtypes, arguments.options):
        print(json.dumps(row._asdict()) if arguments.json else line.format(*row), flush=True)
        count += 1
    if not arguments.json:
        print(f"{count} kernels in {time.perf_counter() - start:.0f} s; spilled and shared in bytes")


if __name__ == "__main__":
    main()
