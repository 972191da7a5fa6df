"""flash_attention: exact attention in linear memory, one function for CPU and GPU.

A backend (`tiled`, `kernels`) is two plain functions:

    forward(q, k, v, options)                        -> out, lse          lse_i = log sum_j exp(S_ij)
    backward(dout, dlse, q, k, v, out, lse, options) -> dq, dk, dv        S = scale * Q K^T

q, k, v: (batch, heads, sequence, head dim) with any strides. Packed sequences take the same path, as views
(1, heads, total, head dim), where sequence b is rows cu_seqlens[b] to cu_seqlens[b+1]. Results are shaped
like the inputs (`empty_like`). lse is (batch, heads, sequence) in float32, and -inf if a row sees no key.
The dropout mask is a hash of (seed, batch, head, i, j): see `options`. With m_ij = keep_ij / (1 - p),

    P = exp(S - lse)   O_i = sum_j P_ij m_ij v_j   dP_ij = m_ij dO_i . v_j
    dS_ij = P_ij (dP_ij - delta_i),   delta_i = dO_i . O_i - dlse_i

since sum_j P_ij dP_ij = dO_i . O_i, with dropout too, and the derivative of lse_i by S_ij is P_ij. So a
loss that uses the logsumexp costs nothing extra, and only q, k, v, out, lse are saved. If a row sees one key,
dP_ij = dO_i . O_i: both are left out there, so that dS_ij = dlse_i to the bit, in any order of the sums.
"""

import contextlib
import functools
import importlib.util
import itertools
import math
import threading
import warnings
from types import ModuleType
from typing import Any, Unpack

import torch
from torch import Tensor

from flash import tiled
from flash.checks import (
    PACKED,
    check,
    check_backend,
    check_cu_seqlens,
    check_starts,
    check_transforms,
    refuse_second_derivative,
)
from flash.options import Keywords, Options

# The interpreter patches triton.language while a kernel runs, so it must launch one at a time.
_one_launch = threading.Lock()


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, backend: str = "auto", **keywords: Unpack[Keywords]
) -> Any:
    """softmax(scale * q k^T) v without the scores in memory: out, like q, or (out, lse) with `return_lse`.

    q: (batch, heads, Nq, head dim); k, v: (batch, kv heads, Nk, head dim), where kv heads divides heads: query
    head h uses key/value head h // (heads / kv heads). lse: (batch, heads, Nq), natural log, before dropout.
    backend: "triton", "tiled" or "auto": Triton on a GPU, but not for float64. The keywords, with their defaults:

    causal=False              query i sits at key i + o and sees all keys; with True or "bottom-right" no later ones.
                              o = Nk - Nq for "bottom-right", as in FlashAttention-2; else o = 0, as in PyTorch
    scale=None                a number; None: 1 / sqrt(head dim)
    window=None               (left, right): sees keys i + o - left to i + o + right, both included, None for no bound
    window_diagonal="top-left"    the window's o is causal's; "bottom-right": it is Nk - Nq, whatever causal is
    dropout_p=0.0             the share of the weights that become 0; the others are divided by 1 - p
    dropout_seed=None         a whole number; None: drawn from torch's generator

    A row that sees nothing, or only scores of -inf, has out 0, lse -inf, gradients 0. Head dim 1 to 256; float16,
    bfloat16, float32, float64. `ValueError` for arguments out of range or shape, `TypeError` for dtypes and unknown
    keywords, `NotImplementedError` for forward-mode and second derivatives, and for torch.func's.
    """
    name = "flash_attention"
    options = check(name, q, k, v, **keywords)
    check_backend(name, backend)
    check_transforms(name, q, k, v)
    out, lse = _attention(q, k, v, *options, backend)
    return (out, lse) if return_lse else out


def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_lse: bool = False,
    backend: str = "auto",
    **keywords: Unpack[Keywords],
) -> Any:
    """Sequences of different lengths, packed one behind the other: no row of padding is computed.

    q: (total q, heads, head dim); k, v: (total k, kv heads, head dim); lse: (heads, total q). Sequence b has the
    queries cu_seqlens_q[b] to cu_seqlens_q[b+1] and the keys cu_seqlens_k[b] to cu_seqlens_k[b+1] (int32, on q's
    device); either may be none. The options mean in each sequence what they mean in `flash_attention`; dropout
    counts b as the batch. Rows behind the last sequence have out 0, lse -inf, gradients 0. Checking the lengths waits
    for the GPU. Errors as there, and `ValueError` for cu_seqlens that are no sums of lengths.
    """
    name = "flash_attention_varlen"
    options = check(name, q, k, v, PACKED, **keywords)
    check_backend(name, backend)
    check_cu_seqlens(name, cu_seqlens_q, "q", q)
    check_cu_seqlens(name, cu_seqlens_k, "k", k)
    check_transforms(name, q, k, v)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    options = options._replace(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    out, lse = _attention(q, k, v, *options, backend)
    out, lse = out[0].transpose(0, 1), lse[0]
    return (out, lse) if return_lse else out


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys, from the attention over each: (out, lse). Differentiable.

    Each output is a mean weighted by exp(score); exp(lse) is the sum of those weights. out, lse: as
    `flash_attention` or `flash_attention_varlen` returned them. Dropout counts the keys of each part from 0, so its
    mask is not that of all keys at once. `ValueError` for shapes that do not belong together.
    """
    if out_a.shape != out_b.shape or lse_a.shape != lse_b.shape:
        shapes = [tuple(x.shape) for x in (out_a, lse_a, out_b, lse_b)]
        raise ValueError(f"merge: out_a, lse_a, out_b, lse_b are {shapes}; both parts must have the same shapes")
    rows = out_a.shape[:-1] if out_a.dim() == 4 else out_a.shape[1::-1]  # packed: lse is (heads, total)
    if lse_a.shape != rows:
        raise ValueError(f"merge: out is {tuple(out_a.shape)}, lse {tuple(lse_a.shape)}; expected lse {tuple(rows)}")
    # weight = exp(lse - the larger of the two), which cannot overflow; 0 instead of a maximum of -inf.
    largest = torch.maximum(lse_a, lse_b).detach()
    largest = largest.masked_fill(largest == -math.inf, 0)
    weight_a, weight_b = (lse_a - largest).exp(), (lse_b - largest).exp()
    total = weight_a + weight_b
    nothing = total == 0
    total = total.masked_fill(nothing, 1)
    shares = weight_a / total, weight_b / total
    if out_a.dim() == 3:
        shares = shares[0].mT, shares[1].mT
    out = shares[0][..., None] * out_a + shares[1][..., None] * out_b
    return out.to(out_a.dtype), (largest + total.log()).masked_fill(nothing, -math.inf)


# The operators. As custom operators they stay whole under torch.compile, which need not look inside. An operator takes
# tensors and plain numbers only: hence the fields of `Options` one by one, in their order.
FIELDS = (
    "Tensor? seed, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, float scale, SymInt? left, SymInt? right, "
    "bool bottom_right, bool causal_top_left, float dropout_p, SymInt? max_q, SymInt? max_k, str backend"
)
QKV = "Tensor q, Tensor k, Tensor v"
FORWARD = f"({QKV}, {FIELDS}) -> (Tensor, Tensor)"
BACKWARD = f"(Tensor dout, Tensor dlse, {QKV}, Tensor out, Tensor lse, {FIELDS}) -> (Tensor, Tensor, Tensor)"


@torch.library.custom_op("flash::attention", mutates_args=(), schema=FORWARD)
def _attention(q: Tensor, k: Tensor, v: Tensor, *fields: Any) -> tuple[Tensor, Tensor]:
    options, end = _with_lengths(Options(*fields[:-1]), q, k)
    with _backend(fields[-1], q, k) as module:
        out, lse = module.forward(q, k, v, options)
    out[:, :, end[0] :], lse[:, :, end[0] :] = 0, -math.inf
    return out, lse


@_attention.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=tiled.compute_dtype(q))


@torch.library.custom_op("flash::attention_backward", mutates_args=(), schema=BACKWARD)
def _attention_backward(
    dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *fields: Any
) -> tuple[Tensor, Tensor, Tensor]:
    options, (end_q, end_k) = _with_lengths(Options(*fields[:-1]), q, k)
    with _backend(fields[-1], q, k) as module:
        dq, dk, dv = module.backward(dout, dlse, q, k, v, out, lse, options)
    dq[:, :, end_q:] = dk[:, :, end_k:] = dv[:, :, end_k:] = 0
    return dq, dk, dv


@_attention_backward.register_fake
def _(dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


# For backward: tensors the way autograd wants them, and the plain fields, which both operators take last.
def _save(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, seed, cu_seqlens_q, cu_seqlens_k, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, *output, seed, cu_seqlens_q, cu_seqlens_k)


def _differentiate(ctx: Any, dout: Tensor, dlse: Tensor) -> Any:
    gradients = _attention_backward(dout, dlse, *ctx.saved_tensors, *ctx.rest)
    return *gradients, *[None] * (3 + len(ctx.rest))


_attention.register_autograd(_differentiate, setup_context=_save)
_attention_backward.register_autograd(refuse_second_derivative)


def _with_lengths(options: Options, q: Tensor, k: Tensor) -> tuple[Options, tuple[int, int]]:
    """The options with the longest lengths, and the rows and keys at which the last packed sequence ends."""
    n_q, n_k = q.shape[2], k.shape[2]
    if options.cu_seqlens_q is None or options.cu_seqlens_k is None:
        return options.with_lengths(n_q, n_k), (n_q, n_k)
    cu_seqlens_q, cu_seqlens_k = options.cu_seqlens_q.contiguous(), options.cu_seqlens_k.contiguous()
    starts_q, starts_k = check_starts("flash_attention_varlen", cu_seqlens_q, cu_seqlens_k, n_q, n_k)
    max_q, max_k = (max((b - a for a, b in itertools.pairwise(s)), default=0) for s in (starts_q, starts_k))
    options = options._replace(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    return options.with_lengths(max_q, max_k), (starts_q[-1], starts_k[-1])


@contextlib.contextmanager
def _backend(backend: str, q: Tensor, k: Tensor) -> Any:
    """The module that computes, `tiled` or `kernels`, for as long as it does."""
    if backend == "auto":
        backend = "triton" if q.is_cuda and q.dtype != torch.float64 and _gpu_can(q.device) else "tiled"
    if backend == "tiled":
        yield tiled
        return
    kernels = _load_kernels()
    if q.dtype == torch.float64:
        raise TypeError("flash_attention: backend 'triton' takes float16, bfloat16, float32, not float64: use 'tiled'")
    if q.numel() == 0 or k.numel() == 0:
        yield tiled  # nothing to launch
    elif kernels.INTERPRETED:
        with _one_launch:
            yield kernels
    elif q.is_cuda:
        yield kernels
    else:
        raise ValueError(
            f"flash_attention: backend 'triton' got tensors on {q.device}, and Triton was imported to compile for a "
            "GPU: use backend='tiled', or set TRITON_INTERPRET=1 before the first import of triton"
        )


def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _load_kernels() -> ModuleType:
    if not _triton_is_installed():
        raise ValueError(
            "flash_attention: backend is 'triton', but the package triton is not installed (for macOS there is none): "
            "use backend='tiled', which gives the same numbers"
        )
    return importlib.import_module("flash.kernels")


@functools.cache
def _gpu_can(device: torch.device) -> bool:
    """Whether `auto` uses Triton on this GPU; warns once if it does not."""
    if not _triton_is_installed():
        reason = "the package triton is not installed"
    elif torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        major, minor = torch.cuda.get_device_capability(device)
        reason = f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}, below 8.0"
    else:
        return True
    warnings.warn(f"flash_attention: {reason}: backend 'auto' uses 'tiled'", stacklevel=2)
    return False
