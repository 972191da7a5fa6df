"""What the checks of the three Triton kernels share: they run under Triton's interpreter, on a CPU."""

import contextlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import torch

from tests.exercises.course import ROOT
from tests.exercises.draws import deal
from tests.exercises.kit import AtMost, fail


def compiles(kernel: str) -> None:
    """Fail if the answer compiles for no GPU, or multiplies in TF32 what is FP32. kernel: "forward", "dkdv" or "dq".

    Triton chooses between its interpreter and its compiler when it is imported, so another process compiles.
    """
    from flash import kernels

    path, secret = getattr(kernels, f"{kernel}_kernel").fn.__code__.co_filename, secrets.token_hex()
    command = [sys.executable, "-m", "tests.exercises.compiled", kernel, path]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, input=secret, capture_output=True, text=True)
    *_, said = done.stdout.splitlines() or [""]
    if not said.startswith(secret):
        fail("does-not-compile", f"The compiler for GPUs ended without a word (exit status {done.returncode}).")
    if found := json.loads(said[len(secret) :]):
        fail(*found)


class Case(NamedTuple):
    causal: bool | str
    window: tuple[int | None, int | None] | None
    packed: bool
    dropout: float
    dtype: torch.dtype
    batch: int
    heads: tuple[int, int]
    lengths: tuple[int, int]
    head_dim: int
    scale: float | None
    blocks: tuple[int, int]
    spoilt: str
    seed: int


def draw(random: Random) -> list[Case]:
    """heads: those of q, and those of k and v. lengths: rows, and keys. spoilt: where NaN, infinity or a large
    number stands.

    Each draw has a case of a single key, one whose keys are infinite, one with a large scale, in which some rows see
    one key or none, one of unequal packed sequences, and some in FP16, in which what is rounded too early is beyond
    its range.
    """

    def deal_(ways: list[Any], lengths: list[Any], scales: list[Any], spoilt: list[str]) -> list[Case]:
        columns = (
            [0.0, 0.3],
            [torch.float32, torch.float16, torch.bfloat16],
            [1, 2],
            [(1, 1), (2, 2), (2, 1), (3, 1)],
            lengths,
            [8, 16, 24],
            scales,
            [(16, 16), *[(16, 32), (32, 16)] * 2],
            spoilt,
        )
        cases = [Case(*row) for row in deal(random, ways, *columns)]
        return [case._replace(batch=case.batch if case.heads in ((1, 1), (2, 1)) else 1) for case in cases]

    ways = [
        (False, None, False),
        (False, None, True),
        (False, (5, None), False),
        (False, (None, 3), False),
        (False, (0, 18), True),
        (True, None, False),
        (True, (17, None), True),
        ("bottom-right", (9, 0), False),
    ]
    lengths = [(33, 20), (20, 33), (32, 32), (1, 40), (40, 1), (17, 48)]
    special = [
        *deal_([(False, None, False)], [(40, 1)], [None, 0.7], ["nothing"]),
        *deal_([(True, None, False)], [(32, 32)], [None, 0.7], ["all keys"]),
        *deal_([("bottom-right", None, True)], [(40, 33)], [None, 0.7], ["nothing"]),
        *(
            case._replace(dropout=0.0)  # which may leave out the one key that a row sees
            for case in deal_([(False, (5, None), False)], [(33, 20)], [1.5], ["nothing"])
        ),
        *deal_([(True, None, False)], [(32, 32)], [0.7], ["the last key"]),
        *deal_([(False, None, False)], [(20, 33)], [0.7], ["all scores"]),
        *(
            case._replace(dtype=torch.float16, dropout=0.0, heads=heads or case.heads)
            for scale, spoilt, lengths_, heads in (
                (0.0, "all values", (20, 48), None),
                (-40.0, "all rows of q", (20, 48), None),
                (1e-8, "all of the first head", (40, 8), (2, 1)),
            )
            for case in deal_([(False, None, False)], [lengths_], [scale], [spoilt])
        ),
    ]
    plain = Case(False, None, False, 0.0, torch.float32, 1, (2, 1), (48, 48), 16, None, (16, 16), "nothing", 1)
    return [
        plain,
        plain._replace(causal=True, lengths=(40, 40)),
        *deal_(ways, lengths, [None, 0.7, -0.3, 0.0], ["nothing", "nothing", "a row of q"]),
        *(case._replace(batch=1) for case in special),
    ]


def given(case: Case):
    """q, k, v, dout, dlse, each inside NaN, and the options. packed: four sequences; one has no key, one no row, and
    of the others one has more rows, one more keys.

    With a single key nothing arrives at the logsumexp: the gradients of its score are 0.
    """
    from flash.checks import check as check_options

    generator = torch.Generator().manual_seed(case.seed)
    batch = 1 if case.packed else case.batch
    sizes = [
        (heads, n, case.head_dim) for heads, n in zip((*case.heads, case.heads[1]), (*case.lengths, case.lengths[1]))
    ]
    q, k, v, dout, dlse = (
        torch.randn(batch, *size, generator=generator).to(dtype)
        for size, dtype in zip((*sizes, sizes[0], sizes[0][:2]), [case.dtype] * 4 + [torch.float32])
    )
    if case.spoilt == "a row of q":
        q[:, :, -1] = torch.nan
    if case.spoilt == "all keys":  # each score is -∞
        q[..., 0], k[..., 0] = 1, -torch.inf
    if case.spoilt == "the last key":  # its scores are far above the others, where it is not hidden
        k[..., -1, :] *= 300
    if case.spoilt == "all values":  # sums over the keys are beyond FP16, and the results are not
        k, v = k * 100, v.abs() * 4000
    if case.spoilt == "all scores":  # far below 0: exp(-lse) is infinite
        q[..., 0], k[..., 0] = 16, -16
    if case.spoilt == "all scores, and they are one":
        q, k[..., 0] = q * 0, -200
        q[..., 0] = 200
    if case.spoilt == "all rows of q":  # q times the scale is beyond FP16
        q, k = q * 5000, k * 1e-4
    if case.spoilt == "all of the first head":  # its share of dK and dV is beyond FP16; dP - delta cancels; dS is small
        q, k, v, dout = q * 1e4, k * 1e4, (v + 100) * 1e-3, dout.abs().clamp(max=2) * 2e4
        q[:, 1], dout[:, 1] = q[:, 0], -0.9 * dout[:, 0]
    if case.lengths[1] == 1:
        dlse.zero_()
    q, k, v, dout, dlse = (framed(x, case.seed + i) for i, x in enumerate((q, k, v, dout, dlse)))
    seed = case.seed if case.dropout else None
    options = check_options(
        "exercise", q, k, v, causal=case.causal, scale=case.scale, window=case.window, dropout_p=case.dropout,
        dropout_seed=seed,
    )  # fmt: skip
    n_q, n_k = case.lengths
    if case.packed:
        starts = [(0, n_q // 4, n_q // 4, n_q // 2, n_q), (0, 0, n_k // 4, n_k - n_k // 4, n_k)]
        cu_seqlens_q, cu_seqlens_k = (torch.tensor(each, dtype=torch.int32) for each in starts)
        options = options._replace(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        n_q, n_k = (int(each.diff().max()) for each in (cu_seqlens_q, cu_seqlens_k))
    return q, k, v, dout, dlse, options.with_lengths(n_q, n_k)


def framed(x: torch.Tensor, seed: int) -> torch.Tensor:
    """x in memory in which NaN lies before, behind and between its rows, a block wide at least.

    seed: its dimensions lie in memory in an order drawn from it.
    """
    around = (1, 16), (1, 32), (1, 1), (1, 1)  # of the last dimension, of the last but one, …
    padded = torch.nn.functional.pad(x, sum(around[4 - x.dim() :], ()), value=torch.nan)
    order = Random(seed).sample(range(x.dim()), x.dim())
    memory = padded.permute(order).contiguous()
    return memory.permute([order.index(i) for i in range(x.dim())])[tuple(slice(1, 1 + n) for n in x.shape)]


@contextlib.contextmanager
def watched() -> Iterator[dict[str, int]]:
    """What kernels load meanwhile. NaN lies beside the tensors, and in those that nothing has been stored to."""
    from triton.runtime.interpreter import InterpreterBuilder

    load, seen = (
        InterpreterBuilder.create_masked_load,
        {"bytes of blocks loaded": 0, "numbers loaded that are not there": 0},
    )

    def watch(builder: Any, pointers: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        block = load(builder, pointers, mask, *args, **kwargs)
        loaded = block.data[mask.data]
        seen["bytes of blocks loaded"] += loaded.nbytes if block.data.ndim == 2 else 0
        seen["numbers loaded that are not there"] += int((loaded != loaded).sum())
        return block

    with mock.patch.object(InterpreterBuilder, "create_masked_load", watch):
        yield seen


def numbers_in(x: torch.Tensor | None) -> int:
    """How many of x are not NaN."""
    assert x is not None
    return int((~x.isnan()).sum())


def nothing_outside(outputs: Iterable[torch.Tensor]) -> None:
    """Fail if a kernel has stored beside these tensors, each of which lies in a frame of NaN."""
    outside = sum(numbers_in(x._base) - numbers_in(x) for x in outputs)
    if outside:
        fail(
            "stores-outside",
            f"The kernel stores {outside} numbers beside its tensors. The last block may be cut off, and a block has "
            "BLOCK_D columns, the tensor HEAD_DIM: mask the store, as store_block and store_numbers do.",
        )


def run(case: Case, prepare: Callable[..., Any], **outputs: torch.Tensor) -> dict[str, Any]:
    """What the kernel stores into the outputs and beside them, and what it loads. prepare: its launch, for these."""
    from flash import launch

    held = {
        name: framed(torch.full_like(like, torch.nan), case.seed + i)
        for i, (name, like) in enumerate(outputs.items(), 5)
    }
    with mock.patch.object(launch, "choose", lambda *_: launch.Blocks(*case.blocks, 4, 1)):
        ready = prepare(*held.values())
    with watched() as seen:
        ready.run()
    nothing_outside(held.values())
    most = {name: AtMost(number, 1.1) for name, number in seen.items()}  # NaN in q is loaded as often as q
    return {**held, **most}


def run_forward(case: Case) -> dict[str, Any]:
    from flash import kernels

    q, k, v, *_, options = given(case)
    lse = q[..., 0].float()
    return run(case, lambda out, lse: kernels.forward_launch(q, k, v, out, lse, options), out=q, lse=lse)


def run_backward(case: Case, which: str) -> dict[str, Any]:
    """which: dkdv or dq. out, lse and delta are those of the tiled code."""
    from flash import kernels, tiled

    q, k, v, dout, dlse, options = given(case)
    out, lse = tiled.forward(q, k, v, options, case.blocks)
    delta = torch.empty_like(lse)
    tiled.delta_tiles(dout, out, dlse, delta, q, k, options, case.blocks)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # as `kernels.backward` does
    lse, delta = (framed(x, case.seed - i) for i, x in enumerate((lse, delta), 1))

    def launch(dq: Any = q, dk: Any = k, dv: Any = v) -> Any:
        all_three = kernels.backward_launches(dout, dlse, q, k, v, out, lse, delta, dq, dk, dv, options)
        return next(each for each in all_three if each.name == which)

    if which == "dq":
        return run(case, lambda dq: launch(dq=dq), dq=q)
    return run(case, lambda dk, dv: launch(dk=dk, dv=dv), dk=k, dv=v)


def tolerance(case: Case) -> float:
    return {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}[case.dtype]
