"""The GPUs: kinds of processors, with the block shapes of the kernels on them, and products that are made of these.

A new GPU is entered here: its product in `GPUS`, and, if its kind of processor is not there, that in `PROCESSORS` and
its block shapes in `TABLE`. `python -m flash.compile` then says what the kernels take on it, without having one.
(`minizero.simulate.clusters` has whole clusters.)

Sources. Shared memory: NVIDIA, CUDA Programming Guide, section 5.1 "Compute Capabilities", and AMD, "GPU hardware
specifications" (LDS). The products: the makers' data sheets.
"""

from typing import NamedTuple

KIB = 1024


class Processor(NamedTuple):
    """A kind of processor: one of the many in a GPU that run a program each."""

    sram: int  # bytes of shared memory, at most, that one program may use
    blocks: str  # a row of TABLE
    # For `flash.compile`: Triton's backend and architecture, and the threads of a warp.
    target: tuple[str, int | str, int] | None = None


# NVIDIA's compute capabilities, and AMD's instruction sets.
PROCESSORS = {
    "sm_70": Processor(96 * KIB, "small"),
    "sm_75": Processor(64 * KIB, "small"),
    "sm_80": Processor(163 * KIB, "sm_80", ("cuda", 80, 32)),
    "sm_86": Processor(99 * KIB, "small"),
    "sm_87": Processor(163 * KIB, "sm_80"),
    "sm_89": Processor(99 * KIB, "small", ("cuda", 89, 32)),
    "sm_90": Processor(227 * KIB, "sm_90", ("cuda", 90, 32)),
    "sm_100": Processor(227 * KIB, "sm_90"),
    "sm_103": Processor(227 * KIB, "sm_90"),
    "sm_120": Processor(99 * KIB, "small"),
    "gfx942": Processor(64 * KIB, "amd", ("hip", "gfx942", 64)),
}


class Gpu(NamedTuple):
    """A product."""

    kind: str  # of PROCESSORS
    processors: int  # streaming multiprocessors, compute units
    hbm_bytes_per_second: float
    matmul_flops: float  # dense, 16-bit inputs, FP32 sums

    @property
    def sram(self) -> int:
        """Bytes of shared memory, at most, that one program may use."""
        return PROCESSORS[self.kind].sram


GPUS = {
    "V100 SXM2": Gpu("sm_70", 80, 0.9e12, 125e12),
    "T4": Gpu("sm_75", 40, 0.32e12, 65e12),
    "A100 SXM 40GB": Gpu("sm_80", 108, 1.555e12, 312e12),
    "A100 SXM 80GB": Gpu("sm_80", 108, 2.039e12, 312e12),
    "RTX 3090": Gpu("sm_86", 82, 0.936e12, 71e12),
    "RTX 4090": Gpu("sm_89", 128, 1.008e12, 165e12),
    "H100 SXM": Gpu("sm_90", 132, 3.35e12, 989e12),
    "H200 SXM": Gpu("sm_90", 132, 4.8e12, 989e12),
    "MI300X": Gpu("gfx942", 304, 5.3e12, 1307e12),
}


class Blocks(NamedTuple):
    """The shape of one program: rows and keys of its blocks, and how many threads and loads work on them."""

    rows: int
    keys: int
    warps: int  # of 32 threads (AMD: 64), which share the block
    stages: int  # blocks that the loop loads ahead


# For 16-bit numbers: for each kernel {head dim, at most: its blocks}. A window or dropout takes registers, so with
# these options dK and dV have blocks that need fewer.
TABLE: dict[str, dict[str, dict[int, Blocks]]] = {
    "sm_90": {  # 227 KiB of shared memory
        "forward": {64: Blocks(128, 128, 8, 3), 128: Blocks(128, 128, 8, 2), 256: Blocks(128, 64, 8, 2)},
        "dkdv": {64: Blocks(64, 128, 8, 3), 128: Blocks(64, 128, 8, 2), 256: Blocks(64, 32, 8, 2)},
        "dkdv, options": {64: Blocks(32, 128, 8, 3), 128: Blocks(16, 128, 8, 2), 256: Blocks(64, 32, 8, 1)},
        "dq": {64: Blocks(128, 64, 8, 3), 128: Blocks(128, 64, 8, 3), 256: Blocks(128, 32, 8, 2)},
    },
    "sm_80": {  # 163 KiB
        "forward": {64: Blocks(128, 64, 4, 3), 128: Blocks(128, 64, 8, 3), 256: Blocks(64, 64, 8, 2)},
        "dkdv": {64: Blocks(64, 64, 4, 2), 128: Blocks(64, 64, 4, 2), 256: Blocks(64, 32, 8, 2)},
        "dkdv, options": {64: Blocks(32, 64, 4, 2), 128: Blocks(32, 64, 4, 1), 256: Blocks(64, 32, 8, 1)},
        "dq": {64: Blocks(64, 64, 4, 2), 128: Blocks(64, 64, 4, 2), 256: Blocks(64, 32, 4, 2)},
    },
    "small": {  # 99 KiB and more: sm_86, sm_89, sm_120
        "forward": {64: Blocks(128, 64, 4, 1), 128: Blocks(128, 32, 4, 1), 256: Blocks(64, 32, 4, 1)},
        "dkdv": {64: Blocks(64, 64, 4, 1), 128: Blocks(32, 64, 4, 1), 256: Blocks(32, 32, 4, 1)},
        "dkdv, options": {128: Blocks(32, 64, 4, 1), 256: Blocks(32, 32, 4, 1)},
        "dq": {64: Blocks(64, 64, 4, 1), 128: Blocks(64, 32, 4, 1), 256: Blocks(32, 32, 4, 1)},
    },
    "amd": {  # 64 KiB: gfx942
        "forward": {64: Blocks(128, 64, 4, 1), 128: Blocks(128, 32, 4, 1), 256: Blocks(64, 32, 2, 1)},
        "dkdv": {64: Blocks(64, 64, 2, 1), 128: Blocks(32, 64, 2, 1), 256: Blocks(16, 32, 2, 1)},
        "dkdv, options": {128: Blocks(32, 64, 2, 1), 256: Blocks(16, 32, 2, 1)},
        "dq": {64: Blocks(64, 64, 2, 1), 128: Blocks(64, 32, 2, 1), 256: Blocks(32, 16, 2, 1)},
    },
    "interpreter": {kernel: {256: Blocks(64, 64, 4, 1)} for kernel in ("forward", "dkdv", "dq")},
}
# True FP32 products run on the ordinary units, not on the matrix units, from registers: dK and dV take the most.
FLOAT32 = {
    "forward": {64: Blocks(32, 32, 8, 1), 128: Blocks(16, 32, 8, 1), 256: Blocks(16, 16, 8, 1)},
    "dkdv": {64: Blocks(16, 32, 8, 1), 128: Blocks(16, 32, 16, 1), 256: Blocks(16, 16, 16, 1)},
    "dq": {64: Blocks(32, 32, 8, 1), 128: Blocks(16, 32, 8, 1), 256: Blocks(16, 16, 8, 1)},
}
