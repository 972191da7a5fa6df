"""Bytes between HBM, the GPU's large memory, and SRAM, the small memory on the chip: why tiles are faster.

Per head, for N rows of d elements and blocks of B_q rows and B_k keys:

    naive    reads Q, K, V and writes out, and writes and reads the N × N matrices    Θ(N d + N²)
    tiled    reads Q once, and K and V once for every block of rows                   2 N d · N / B_q + ...

SRAM of M elements holds blocks of B_q ~ M / d rows, so tiled attention moves Θ(N² d² / M): less than N² if
d² < M. Both do the same arithmetic. Dao et al., 2022, "FlashAttention", theorem 2.

`hbm_bytes` is the model, `count` measures: it notes every byte that operators read from the tensors that it was
given, and every byte that they write there. Tensors that an operator makes anew count as SRAM.
"""

import contextlib
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flash.checks import check_band
from flash.gpus import GPUS

FP32 = 4


class Traffic(NamedTuple):
    """Bytes from HBM to SRAM, and back."""

    loads: int
    stores: int

    @property
    def total(self) -> int:
        return self.loads + self.stores


def hbm_bytes(
    n_q: int,
    head_dim: int,
    *,
    block_q: int = 128,
    block_k: int = 64,
    algorithm: str = "tiled",
    backward: bool = False,
    n_k: int | None = None,
    batch: int = 1,
    heads: int = 1,
    kv_heads: int | None = None,
    itemsize: int = 2,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
) -> Traffic:
    """What attention over n_q queries and n_k keys (by default as many) of (batch, heads) moves, in bytes.

    algorithm: "naive" writes each matrix once and reads it at each use; "tiled" is `flash.tiled` (one backward pass,
    which adds to dQ); "kernels" is `flash.kernels` (one kernel for dK and dV, one for dQ).
    backward: the backward pass instead of the forward one. itemsize: bytes of an element of q; lse, delta and the
    sum of dQ have 4 (8 where q has). "naive" computes all scores, whatever the mask. `ValueError` for an unknown
    algorithm, a block that is not positive, key/value heads that do not divide the heads, a wrong mask.
    """
    if algorithm not in ("naive", "tiled", "kernels"):
        raise ValueError(f"hbm_bytes: algorithm is {algorithm!r}; expected 'naive', 'tiled' or 'kernels'")
    if min(block_q, block_k) < 1:
        raise ValueError(f"hbm_bytes: blocks of {block_q} rows and {block_k} keys; expected at least 1 of each")
    n_k = n_q if n_k is None else n_k
    kv_heads = heads if kv_heads is None else kv_heads
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"hbm_bytes: {heads} heads, {kv_heads} key/value heads; these must divide the heads")
    row = head_dim * itemsize  # bytes of a row of q, k, v or out
    q, k = heads * n_q * row, kv_heads * n_k * row  # of q or out; of k or v
    if algorithm == "naive":
        traffic = _naive_bytes(q, heads * n_k * row, heads * n_q * n_k * itemsize, backward)
        return Traffic(batch * traffic.loads, batch * traffic.stores)

    number = max(FP32, itemsize)  # lse and delta: one for each row
    band = _band(n_q, n_k, causal, window)
    keys_for_rows = _visited(n_q, n_k, block_q, block_k, band)  # keys loaded, summed over the blocks of rows
    rows_for_keys = heads * _visited(n_k, n_q, block_k, block_q, (band[1], band[0]))
    # The tiled code loads keys once for the whole group that shares them, a GPU's programs once for each head.
    keys_for_rows *= kv_heads if algorithm == "tiled" else heads
    if not backward:
        loads = q + 2 * keys_for_rows * row
        stores = q + heads * n_q * number
        return Traffic(batch * loads, batch * stores)

    # delta = rowsum(dO O) - dlse.
    loads, stores = 2 * q + heads * n_q * number, heads * n_q * number
    # dK and dV: every block of keys, and Q, dO, lse, delta of the rows that see it.
    loads += 2 * k + rows_for_keys * (2 * row + 2 * number)
    stores += 2 * k
    if algorithm == "tiled":  # dQ begins with zeros, and every block of keys adds to it
        loads += rows_for_keys * head_dim * number
        stores += (heads * n_q + rows_for_keys) * head_dim * number
    else:  # dQ has a kernel of its own, which loads as the forward one
        loads += 2 * q + 2 * heads * n_q * number + 2 * keys_for_rows * row
        stores += q
    return Traffic(batch * loads, batch * stores)


def _naive_bytes(q: int, k: int, scores: int, backward: bool) -> Traffic:
    """What "naive" moves in one sequence. q, k, scores: the bytes of each, over all heads."""
    if not backward:  # S = Q K^T; P = softmax S; O = P V
        return Traffic((q + k) + scores + (scores + k), scores + scores + q)
    # dV = P^T dO; dP = dO V^T; dS from P and dP; dQ = dS K; dK = dS^T Q
    loads = (scores + q) + (q + k) + 2 * scores + (scores + k) + (scores + q)
    return Traffic(loads, k + scores + scores + q + k)


def _band(n_q: int, n_k: int, causal: Any, window: Any) -> tuple[float, float]:
    """(left, right): row i sees the keys i - left to i + right."""
    left, right, bottom_right = check_band("hbm_bytes", causal, window)
    o = n_k - n_q if bottom_right else 0
    return (left if left >= 0 else math.inf) - o, (right if right >= 0 else math.inf) + o


def _visited(n_rows: int, n_keys: int, block_rows: int, block_keys: int, band: tuple[float, float]) -> int:
    """Keys that a block of rows loads, summed over the blocks of rows: all of each block in which it sees one."""
    left, right = band
    total = 0
    for start in range(0, n_rows, block_rows):
        last = min(start + block_rows, n_rows) - 1
        first_key, last_key = max(0, start - left), min(n_keys - 1, last + right)
        if first_key <= last_key:
            first_block, last_block = int(first_key) // block_keys, int(last_key) // block_keys
            total += min(n_keys, (last_block + 1) * block_keys) - first_block * block_keys
    return total


def theorem_bytes(n: int, head_dim: int, sram: int, itemsize: int = 2) -> float:
    """The theorem's N² d² / M elements per head, in bytes; M elements of SRAM are `sram` bytes."""
    return n**2 * head_dim**2 / (sram / itemsize) * itemsize


def sram_here(device: torch.device | str | None = None) -> int:
    """Bytes of fast memory: a GPU's shared memory for one program; for a CPU a core's L2 cache, 1 MiB if unknown."""
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        size = os.sysconf("SC_LEVEL2_CACHE_SIZE")
        return size if size > 0 else 2**20
    return 2**20


def sram_needed(block_q: int, block_k: int, head_dim: int, itemsize: int = 2) -> int:
    """Bytes that a forward tile holds at once: Q_i, O_i in FP32, K_j, V_j, and S in FP32."""
    return block_q * head_dim * (itemsize + FP32) + 2 * block_k * head_dim * itemsize + block_q * block_k * FP32


def choose_blocks(head_dim: int, itemsize: int = 2, sram: int | str | None = None) -> tuple[int, int]:
    """(block_q, block_k), powers of two from 16 to 256: of those that fit into SRAM, the pair that moves fewest bytes.

    sram: bytes, a name from `GPUS`, or None for the device at hand. The bytes are those of forward and backward
    together, over a long sequence: large blocks of rows save loads of keys and values, large blocks of keys save
    loads of queries. `ValueError` if not even 16 × 16 fits.
    """
    if isinstance(sram, str):
        if sram not in GPUS:
            raise ValueError(f"choose_blocks: sram is {sram!r}; expected a number of bytes or one of {', '.join(GPUS)}")
        sram = GPUS[sram].sram
    sram = sram_here() if sram is None else sram
    sizes = (16, 32, 64, 128, 256)
    fitting = [(q, k) for q in sizes for k in sizes if sram_needed(q, k, head_dim, itemsize) <= sram]
    if not fitting:
        least = sram_needed(16, 16, head_dim, itemsize)
        raise ValueError(
            f"choose_blocks: blocks of 16 rows and 16 keys of head dim {head_dim} need {least:,} bytes of SRAM, "
            f"there are {sram:,}: use a smaller head dim"
        )

    def moved(blocks: tuple[int, int]) -> int:
        q, k = blocks
        return sum(
            hbm_bytes(
                4096, head_dim, block_q=q, block_k=k, algorithm="kernels", backward=pass_, itemsize=itemsize
            ).total
            for pass_ in (False, True)
        )

    return min(fitting, key=moved)


class _Counter(TorchDispatchMode):
    """Adds up what operators read from and write to some storages."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.hbm = {x.untyped_storage().data_ptr() for x in tensors if x.numel()}
        self.loads = self.stores = 0

    def bytes_in_hbm(self, value: Any) -> int:
        """The bytes of the tensors in `value` that lie in one of those storages."""
        if isinstance(value, list | tuple):
            return sum(map(self.bytes_in_hbm, value))
        if not isinstance(value, torch.Tensor) or value.numel() == 0:
            return 0
        return value.nbytes if value.untyped_storage().data_ptr() in self.hbm else 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        is_view = any(x.alias_info is not None and not x.alias_info.is_write for x in func._schema.returns)
        if not is_view and not name.endswith("_like") and "new_" not in name:
            for place, argument in enumerate(func._schema.arguments):
                value = args[place] if place < len(args) else (kwargs or {}).get(argument.name)
                written = argument.alias_info is not None and argument.alias_info.is_write
                if written:
                    self.stores += self.bytes_in_hbm(value)
                if not written or not (argument.is_out or name in ("aten::copy_", "aten::zero_", "aten::fill_")):
                    self.loads += self.bytes_in_hbm(value)  # the operators named above only write
        return result


def count(function: Callable[..., Any], *args: Any) -> Traffic:
    """Call `function(*args)` and count the bytes it loads from its tensor arguments and stores into them.

    All tensors among `args` are HBM. Shows what `flash.tiled.forward_tiles(q, k, v, out, lse, options)` moves.
    """
    with _Counter([x for x in args if isinstance(x, torch.Tensor)]) as counter:
        function(*args)
    return Traffic(counter.loads, counter.stores)
