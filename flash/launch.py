"""How the kernels are launched: with which block shapes, and what all launches have in common.

A larger block of rows reads the keys less often, a larger block of keys keeps the matrix units busy. Both must fit
into the registers and the shared memory of one processor, together with the `stages` blocks that are on their way
from HBM.
"""

import contextlib
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy
import torch
import triton

from flash.gpus import FLOAT32, PROCESSORS, TABLE, Blocks
from flash.masks import INTERPRETED
from flash.options import Options

if INTERPRETED and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
    # Its interpreter makes loop bounds by int(array of one element), which NumPy 2.4 no longer does.
    from triton.runtime import interpreter

    _patch_tensor = interpreter._patch_lang_tensor

    def _patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _patch_tensor_and_index


# With FLASH_AUTOTUNE=1 these are tried instead, when a kernel is first used for a head dim, dtype and kind of band.
CANDIDATES = [
    Blocks(rows, keys, warps, stages)
    for rows, keys in ((64, 64), (64, 128), (128, 32), (128, 64), (128, 128))
    for warps in (4, 8)
    for stages in (2, 3)
]
fastest: dict[Any, Blocks] = {}


def architecture() -> str:
    """The row of `TABLE` for the current device."""
    if INTERPRETED:
        return "interpreter"
    target = triton.runtime.driver.active.get_current_target()
    amd = target.backend == "hip"
    kind = PROCESSORS.get(target.arch if amd else f"sm_{target.arch}")
    return kind.blocks if kind else "amd" if amd else "small"


def limit_warps(blocks: Blocks, kernel: str, head_dim: int, itemsize: int) -> Blocks:
    """`blocks` with no more warps than can share a product S = Q K^T: with more, several would compute each number.

    Triton gives each warp its own rows of S. One instruction takes 16 of them (AMD: 32), so 64 rows are work for
    4 warps. dK and dV compute S^T, whose rows are the keys.
    """
    gpu = architecture()
    rows, columns = (blocks.keys, blocks.rows) if kernel == "dkdv" else (blocks.rows, blocks.keys)
    if gpu == "amd":
        # FP32 goes to the warps in parts of 32 columns of Q and K: `flash.masks.over_columns`.
        most = rows // min(32, rows, columns) if itemsize == 2 else max(1, triton.next_power_of_2(head_dim) // 32)
    elif itemsize == 4:  # no matrix unit: Triton gives each thread numbers of its own
        most = blocks.warps
    elif head_dim > 128 and not (gpu == "sm_90" and rows >= 64):
        most = columns // 8  # O is wider than high: Triton gives each warp its own columns, 8 to an instruction
    else:
        most = rows // 16
    return blocks._replace(warps=min(blocks.warps, most))


def choose(kernel: str, head_dim: int, itemsize: int, options: Options) -> Blocks:
    """The blocks for the current device. kernel: "forward", "dkdv", "dq", or "delta", which takes forward's."""
    gpu = architecture()
    table = FLOAT32 if itemsize == 4 and gpu != "interpreter" else TABLE[gpu]
    sizes = table["forward" if kernel == "delta" else kernel]
    takes_registers = options.seed is not None or options.left >= 0
    if takes_registers:
        sizes = table.get(f"{kernel}, options", sizes)
    blocks = sizes[min(size for size in sizes if size >= head_dim)]
    if takes_registers:  # more warps hold more
        blocks = blocks._replace(warps=max(8, blocks.warps))
    return limit_warps(blocks, kernel, head_dim, itemsize)


class Launch(NamedTuple):
    """A kernel, the tensors it works on, its other arguments, and the number of its programs."""

    name: str
    kernel: Any
    tensors: tuple[torch.Tensor, ...]
    arguments: dict[str, Any]
    programs: int

    def all_arguments(self) -> tuple[Any, ...]:
        """The tensors, then their strides, in the order of the kernel's own."""
        return *self.tensors, *(x.stride() for x in self.tensors)

    def run(self) -> None:
        """Launch it. `ValueError` if this GPU has too little shared memory."""
        # Under the interpreter NumPy would warn of infinities, which a GPU passes over in silence.
        quiet = numpy.errstate(all="ignore")
        try:
            with torch.cuda.device_of(self.tensors[0]), quiet:
                self.kernel[(self.programs,)](*self.all_arguments(), **self.arguments)
        except triton.runtime.errors.OutOfResources as error:
            gpu = torch.cuda.get_device_name(self.tensors[0].device)
            raise ValueError(
                f"flash_attention: {error.name} of {gpu}: this head dim and dtype need {error.required:,}, it has "
                f"{error.limit:,}: use a smaller head dim, or backend='tiled'"
            ) from error


def tune(key: Any, make: Callable[[Blocks], Launch], candidates: Iterable[Blocks]) -> Blocks:
    """The fastest candidate for what `make` launches; remembered under `key`."""
    if key not in fastest:
        seconds = {}
        for blocks in candidates:
            with contextlib.suppress(ValueError):  # too much shared memory
                seconds[blocks] = triton.testing.do_bench(make(blocks).run)
        fastest[key] = min(seconds, key=seconds.__getitem__)
    return fastest[key]


def prepare(
    kernel: Any, tensors: tuple[torch.Tensor, ...], q: torch.Tensor, k: torch.Tensor, options: Options, **own: Any
) -> Launch:
    """The launch of a kernel that works on `tensors`, for this q and k. `own`: arguments that only it has.

    `TypeError` unless the kernel's arguments have the names that are given here.
    """
    heads, kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[3]
    name = kernel.__name__.removesuffix("_kernel")
    tf32 = torch.version.hip is None and torch.get_float32_matmul_precision() != "highest"
    common = dict(
        heads=heads,
        n_q=options.max_q,
        n_k=options.max_k,
        cu_seqlens_q=options.cu_seqlens_q,
        cu_seqlens_k=options.cu_seqlens_k,
        scale=options.scale,
        left=None if options.left < 0 else options.left,
        right=None if options.right < 0 else options.right,
        seed=options.seed,
        threshold=min(round(options.dropout_p * 2**32), 2**32 - 1),
        factor=1 / (1 - options.dropout_p),
        GROUP=heads // kv_heads,
        BOTTOM_RIGHT=options.bottom_right,
        PRECISION="tf32" if tf32 else "ieee",
        HEAD_DIM=head_dim,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
    )

    def make(blocks: Blocks) -> Launch:
        given = common | own | dict(BLOCK_Q=blocks.rows, BLOCK_K=blocks.keys)
        # A kernel takes those of the common arguments that it needs, and all of its own.
        wanted = kernel.arg_names[2 * len(tensors) :]  # behind the tensors and their strides
        surplus, lacking = sorted(own.keys() - set(wanted)), sorted(set(wanted) - given.keys())
        if surplus or lacking:
            raise TypeError(f"{kernel.__name__}: given {surplus}, which it does not take; lacks {lacking}")
        arguments = {argument: given[argument] for argument in wanted}
        arguments |= dict(num_warps=blocks.warps, num_stages=blocks.stages)
        sequences = q.shape[0] if options.cu_seqlens_q is None else len(options.cu_seqlens_q) - 1
        if name == "dkdv":
            programs = sequences * kv_heads * triton.cdiv(options.max_k, blocks.keys)
        else:
            programs = sequences * heads * triton.cdiv(options.max_q, blocks.rows)
        return Launch(name, kernel, tensors, arguments, programs)

    with torch.cuda.device_of(q):
        if os.environ.get("FLASH_AUTOTUNE") == "1" and q.is_cuda:
            candidates = dict.fromkeys(limit_warps(each, name, head_dim, q.element_size()) for each in CANDIDATES)
            return make(tune((name, head_dim, q.dtype, options.left < 0, options.right < 0), make, candidates))
        return make(choose(name, head_dim, q.element_size(), options))
