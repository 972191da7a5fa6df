"""What the checks of the three Triton kernels share: they run under Triton's interpreter, on a CPU."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from tests.exercises.kit import fail, same


def tensors(causal: bool, n: int = 40, heads: int = 2, kv_heads: int = 1):
    """q, k, v, dout; what attention and its derivatives are, in FP64; options."""
    from flash import attention_reference
    from flash.checks import check as check_options

    generator = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(1, heads, n, 16, generator=generator) for _ in range(2))
    k, v = (torch.randn(1, kv_heads, n, 16, generator=generator) for _ in range(2))
    options = check_options("exercise", q, k, v, causal, None, None, 0.0, None).with_lengths(n, n)
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = attention_reference(*inputs, causal=causal, return_lse=True)
    gradients = torch.autograd.grad(out, inputs, dout.double())
    return (q, k, v, dout), (out.detach(), lse.detach(), *gradients), options


def small_blocks(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call it with blocks of 16 rows and 16 keys, so that there are several."""
    from flash import launch

    with mock.patch.object(launch, "choose", lambda *_: launch.Blocks(16, 16, 4, 1)):
        return function(*args, **kwargs)


def backward(causal: bool):
    """dq, dk, dv of the kernels, what they should be, and (q, k, v, dout)."""
    from flash import kernels

    (q, k, v, dout), (out, lse, *wants), options = tensors(causal)
    dlse = torch.zeros_like(lse).float()
    got = small_blocks(kernels.backward, dout, dlse, q, k, v, out.float(), lse.float(), options)
    return got, wants, (q.double(), k.double(), v.double(), dout.double())


def with_options(which: tuple[int, ...]) -> None:
    """Windows, dropout, shared keys, other lengths, packed sequences. which: of out, dq, dk, dv, lse."""
    from flash import flash_attention, flash_attention_varlen
    from flash.reference import attention_reference, attention_reference_varlen

    names = ("The output", "dQ", "dK", "dV", "lse")
    cases = (
        ((1, 2, 30, 12), (1, 1, 20, 12), {"causal": "bottom-right"}, "where the first 10 of 30 queries see no key"),
        ((1, 2, 20, 16), (1, 1, 30, 16), {"window": (9, 4)}, "with window=(9, 4), 20 queries and 30 keys"),
        (
            (1, 4, 20, 16),
            (1, 2, 20, 16),
            {"dropout_p": 0.3, "dropout_seed": 5},
            "with dropout and two heads for each key",
        ),
        (
            (38, 2, 16),
            (38, 1, 16),
            {"scale": -0.3},
            "with two packed sequences of 18 and 20 rows, and a negative scale",
        ),
    )
    for rows, keys, options, words in cases:
        generator = torch.Generator().manual_seed(1)
        q, dout = (torch.randn(rows, generator=generator) for _ in range(2))
        k, v = (torch.randn(keys, generator=generator) for _ in range(2))
        lengths = torch.tensor([0, 18, 38], dtype=torch.int32)
        packed = (lengths, lengths) if len(rows) == 3 else ()
        results = []
        for function, extra, dtype in (
            (flash_attention_varlen if packed else flash_attention, {"backend": "triton"}, torch.float32),
            (attention_reference_varlen if packed else attention_reference, {}, torch.float64),
        ):
            inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
            out, lse = small_blocks(function, *inputs, *packed, **options, **extra, return_lse=True)
            results.append((out, *small_blocks(torch.autograd.grad, out, inputs, dout.to(dtype)), lse))
        for i in which:
            if not same(results[0][i].detach(), results[1][i].detach(), 1e-4):
                fail("options", f"{names[i]} is right without options, and wrong {words}.")


def formulas(q, k, v, dout, base: float = torch.e):
    """P, dP, dS of every head, in FP64; base: of the exponential."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q @ k.mT / q.shape[-1] ** 0.5
    p = torch.exp(torch.log(torch.tensor(base, dtype=torch.float64)) * (s - s.logsumexp(-1, keepdim=True)))
    dp = dout @ v.mT
    delta = (s.softmax(-1) * dp).sum(-1, keepdim=True)
    return p, dp, p * (dp - delta), k


def expect(got: torch.Tensor, want: torch.Tensor, mistakes: dict[str, tuple[torch.Tensor, str]], what: str) -> None:
    """As `recognise`, to FP32's accuracy."""
    if same(got, want, 1e-4):
        return
    for name, (value, words) in mistakes.items():
        if same(got, value, 1e-3):
            fail(name, words)
    fail("values", f"{what} is wrong, by {(got - want).abs().max().item():.3g} at most.")
