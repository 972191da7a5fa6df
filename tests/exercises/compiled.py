"""Compile the kernel of an answer for a GPU that need not be there: `python -m tests.exercises.compiled forward FILE`.

Triton's interpreter runs what no GPU could, and multiplies in FP32 whatever `tl.dot` is asked for. The compiler finds
both: an error, or `tf32` among the instructions for a kernel on FP32 numbers. The last line on standard output is the
secret that came by standard input, and the name of a diagnosis with its words, or null.
"""

import json
import linecache
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
from triton import runtime
from triton.compiler.errors import CompilationError

from flash.compile import COMBINATIONS, NoGpu, launches
from tests.exercises.course import find
from tests.exercises.machine.runner import load
from tests.exercises.patch import patched

GPU = "sm_80"  # an A100: the oldest that the kernels run on
# In FP32 with all options, and in FP16 without any: branches and dtypes that one of them has are compiled once.
WAYS = ((torch.float32, "everything"), (torch.float16, "plain"))


def diagnosis(kernel: str, path: Path) -> tuple[str, str] | None:
    """The name and the words of what is wrong with the kernel in the file; None if nothing is.

    None, too, where Triton compiles nothing for this GPU, not even the package's own kernel.
    """
    exercise = find(f"triton_{kernel}")
    runtime.driver.set_active(NoGpu(GPU))
    with patched(exercise, getattr(load(path), exercise.function)):
        found = fault(kernel)
    return found if found and not fault(kernel) else None


def fault(kernel: str) -> tuple[str, str] | None:
    """What is wrong with the kernel that now stands in the package."""
    for dtype, options in WAYS:
        launch = next(each for each in launches(16, dtype, **COMBINATIONS[options]) if each.name == kernel)
        try:
            compiled: Any = launch.kernel.warmup(*launch.all_arguments(), grid=(1,), **launch.arguments)
        except Exception as error:
            words = f"Here an interpreter runs the kernel; for a GPU it does not compile: {explain(error)}"
            return "does-not-compile", words
        if dtype == torch.float32 and "tf32" in compiled.asm["ptx"]:
            line = line_of("tf32", compiled.asm["ptx"])
            return "multiplies-in-tf32", (
                "On a GPU FP32 numbers lose 13 of their 23 bits before they are multiplied, unless tl.dot has "
                f"input_precision=PRECISION; else it takes TF32, and is off by about 1e-3. {line}"
            )
    return None


def explain(error: Exception) -> str:
    """The compiler's message, and the line of the kernel that it is about."""
    line = ""
    cause: BaseException = error
    if isinstance(error, CompilationError) and error.src and hasattr(error.node, "lineno"):
        line = f", in {error.src.splitlines()[error.node.lineno - 1].strip()}"
    while cause.__cause__ is not None:  # an error in a function that the kernel calls
        cause = cause.__cause__
    message = re.sub(r'^\w+Error\("(.*)"\)$', r"\1", getattr(cause, "error_message", None) or str(cause))
    return f"{' '.join(message.split())[:300] or type(cause).__name__}{line}"


def line_of(word: str, ptx: str) -> str:
    """The line of source from which the first instruction with this word comes, as the compiler notes it."""
    before = ptx[: ptx.index(word)]
    files = dict(re.findall(r'^\s*\.file\s+(\d+) "([^"]+)"', ptx, re.M))
    number, line = re.findall(r"^\s*\.loc\s+(\d+) (\d+)", before, re.M)[-1]
    return f"Line {line}: {linecache.getline(files.get(number, ''), int(line)).strip()}"


def main() -> None:
    secret = sys.stdin.read()
    channel = os.dup(1)
    os.dup2(2, 1)  # what the answer prints is no verdict
    found = diagnosis(sys.argv[1], Path(sys.argv[2]))
    os.write(channel, f"{secret}{json.dumps(found)}\n".encode())


if __name__ == "__main__":
    main()
