"""python -m tests.portable: the quick tests that compute with floating-point numbers, as other processors compute.

NumPy's OpenBLAS, PyTorch, oneDNN and MKL each choose among kernels for many processors, and sum in other orders. By
environment variables they take another one's; each ignores a value that it does not know, so what can be seen of a
setting is checked first. Which tests have the mark `numbers`: `tests/conftest.py`.
"""

import argparse
import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path

SETTINGS = {
    "an old laptop, one thread": dict(
        OPENBLAS_CORETYPE="Haswell", ATEN_CPU_CAPABILITY="default", ONEDNN_MAX_CPU_ISA="SSE41",
        MKL_CBWR="COMPATIBLE", OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", TEST_THREADS="1",
    ),
    "a laptop, two threads": dict(
        OPENBLAS_CORETYPE="Sandybridge", ATEN_CPU_CAPABILITY="avx2", ONEDNN_MAX_CPU_ISA="AVX2",
        OMP_NUM_THREADS="2", OPENBLAS_NUM_THREADS="2", TEST_THREADS="2",
    ),
    "a server": dict(OPENBLAS_CORETYPE="SkylakeX", TEST_THREADS="1"),
}  # fmt: skip
MARKS = "numbers and (accuracy or not slow) and not apart"


def openblas_core() -> str:
    """The processor that NumPy's OpenBLAS takes this one for; "" where NumPy has another library."""
    import numpy

    for path in Path(numpy.__file__).parent.parent.glob("numpy.libs/*openblas*"):
        name = getattr(ctypes.CDLL(str(path)), "scipy_openblas_get_corename64_", None)
        if name is not None:
            name.restype = ctypes.c_char_p
            return name().decode()
    return ""


def check() -> None:
    """In a process with the settings: have those taken effect that can be seen? oneDNN's and MKL's cannot."""
    import torch

    core, wanted = openblas_core(), os.environ["OPENBLAS_CORETYPE"]
    assert core in ("", wanted), f"OPENBLAS_CORETYPE={wanted}, but OpenBLAS computes as on {core}"
    found, wanted = torch.backends.cpu.get_cpu_capability(), os.environ.get("ATEN_CPU_CAPABILITY")
    assert wanted in (None, found.lower()), f"ATEN_CPU_CAPABILITY={wanted}, but PyTorch computes with {found}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.portable", description=__doc__)
    parser.add_argument("pytest", nargs="*", help="arguments for pytest instead of all tests on two workers")
    arguments = parser.parse_args().pytest or ["-n", "2"]
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        print("tests.portable: only Linux on x86-64 has kernels for other processors to choose from")
        return 0
    has_avx512 = "avx512f" in Path("/proc/cpuinfo").read_text()
    for name, settings in SETTINGS.items():
        words = f"{name}: {' '.join(f'{key}={value}' for key, value in settings.items())}"
        if settings["OPENBLAS_CORETYPE"] == "SkylakeX" and not has_avx512:
            print(f"\n{words}\nleft out: this processor has no AVX-512", flush=True)
            continue
        print(f"\n{words}", flush=True)
        environment = os.environ | settings
        subprocess.run([sys.executable, "-c", "from tests.portable import check; check()"], env=environment, check=True)
        # 5 is "no tests": a selection that has become empty is red, too.
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", MARKS, *arguments], env=environment)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
