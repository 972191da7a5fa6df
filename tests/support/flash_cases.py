"""Drawn combinations of attention's options, and the rule by which an implementation is accurate.

For out, lse, dq, dk, dv: the largest error against float64 is at most twice that of plain attention, which computes
16-bit inputs in float32, or of a dense evaluation that rounds P, dS and the results to the dtype, plus 1e-5. The exact
result, rounded to the dtype, is a third yardstick. These sum in one order, another processor in another: what that may
change has a bound, too, which is `order_of_sums`. It contains what the rounding of out costs the gradients, since
backward reads out as it was stored.
"""

import dataclasses
import functools
import math
import random

import torch
from hypothesis import strategies as st

from flash import attention_reference
from flash.checks import check
from flash.options import dropout_keep, hidden
from flash.reference import attention_reference_varlen

HEAD_DIMS = (1, 8, 16, 32, 40, 59, 64, 80, 96, 111, 128, 256)
LENGTHS = (1, 2, 15, 16, 17, 64, 97, 128, 130, 257, 300)
NAMES = ("out", "lse", "dq", "dk", "dv")


def tensors(*shapes, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def cu(*ends):
    """Cumulative lengths of packed sequences."""
    return torch.tensor([0, *ends], dtype=torch.int32)


def options_of(q, k, v, **options):
    return check("test", q, k, v, **options).with_lengths(q.shape[2], k.shape[2])


def drawn(number, longest, blocks, dtypes, heads=(1, 2), batches=(1, 2)):
    """A dtype, shapes and options, to count the bytes that they move."""
    pick = random.Random(number)
    dtype, group, kv_heads = pick.choice(dtypes), pick.choice([1, 1, 2]), pick.choice(heads)
    return dtype, dict(
        n_q=pick.randint(1, longest),
        n_k=pick.randint(1, longest),
        head_dim=pick.choice([8, 16, 40]),
        block_q=pick.choice(blocks),
        block_k=pick.choice(blocks),
        batch=pick.choice(batches),
        heads=group * kv_heads,
        kv_heads=kv_heads,
        itemsize=dtype.itemsize,
        causal=pick.choice([False, True, "bottom-right"]),
        window=pick.choice([None, (5, None), (None, 7), (40, 13), (0, 0)]),
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """One combination. `lengths`: (queries, keys) of each sequence; padded cases have `batch` of the first."""

    seed: int
    packed: bool
    batch: int
    lengths: tuple
    kv_heads: int
    group: int
    head_dim: int
    dtype: torch.dtype
    layout: str
    size: str  # of the logits
    options: tuple

    @property
    def keywords(self):
        return dict(self.options)


@st.composite
def cases(draw, dtypes=(torch.float16, torch.bfloat16, torch.float32), lengths=LENGTHS, head_dims=HEAD_DIMS):
    one = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    packed = one(False, False, True)
    pair = st.tuples(st.sampled_from(lengths), st.sampled_from(lengths))
    with_empty = st.tuples(st.sampled_from((0, *lengths)), st.sampled_from((0, *lengths)))
    options = dict(causal=one(False, True, "bottom-right"), scale=one(None, None, 0.3, -0.1, 0.0))
    if one(False, True):
        side = st.one_of(st.none(), st.integers(0, 100))
        options |= dict(window=(draw(side), draw(side)), window_diagonal=one("top-left", "bottom-right"))
    if one(False, False, True):
        options |= dict(dropout_p=one(0.1, 0.5, 0.9), dropout_seed=draw(st.integers(-(2**63), 2**63 - 1)))
    return Case(
        seed=draw(st.integers(0, 2**31)),
        packed=packed,
        batch=one(1, 2, 3),
        lengths=tuple(draw(st.lists(with_empty, min_size=1, max_size=4))) if packed else (draw(pair),),
        kv_heads=one(1, 2, 3),
        group=one(1, 1, 2, 4),
        head_dim=one(*head_dims),
        dtype=one(*dtypes),
        layout=one("contiguous", "transposed", "strided", "expanded"),
        size=one("normal", "normal", "q x 5, k x 3", "1e4"),
        options=tuple(options.items()),
    )


def _tensor(shape, layout, generator):
    """Normal numbers of a shape (…, rows, head dim) in some memory layout."""
    if layout == "transposed":  # rows outside heads, as a projection gives them
        return torch.randn(*shape[:-3], shape[-2], shape[-3], shape[-1], generator=generator).transpose(-3, -2)
    if layout == "strided":
        return torch.randn(*shape[:-1], 2 * shape[-1] + 1, generator=generator)[..., 1::2]
    if layout == "expanded":  # all heads the same memory
        return torch.randn(*shape[:-3], 1, *shape[-2:], generator=generator).expand(shape)
    return torch.randn(shape, generator=generator)


def make(case, device="cpu"):
    """q, k, v, the gradients of out and lse, and the cumulative lengths (None where padded)."""
    generator = torch.Generator().manual_seed(case.seed)
    heads = case.kv_heads * case.group
    n_q, n_k = (sum(pair[side] for pair in case.lengths) if case.packed else case.lengths[0][side] for side in (0, 1))
    batch = () if case.packed else (case.batch,)
    shapes = [(*batch, h, n, case.head_dim) for h, n in ((heads, n_q), (case.kv_heads, n_k), (case.kv_heads, n_k))]
    q, k, v = (_tensor(shape, case.layout, generator) for shape in shapes)
    if case.size == "q x 5, k x 3":
        q, k = q * 5, k * 3
    elif case.size == "1e4":  # the largest logits are about this, whatever the scale
        scale = case.keywords["scale"]
        scale = 1 / math.sqrt(case.head_dim) if scale is None else abs(scale)
        factor = math.sqrt(1e4 / (max(scale, 1e-2) * 4 * math.sqrt(case.head_dim)))
        q, k = q * factor, k * factor
    dout, dlse = _tensor(shapes[0], case.layout, generator), torch.randn(shapes[0][:-1], generator=generator)
    q, k, v, dout = (x.to(device=device, dtype=case.dtype) for x in (q, k, v, dout))
    if case.packed:
        q, k, v, dout = (x.transpose(0, 1) for x in (q, k, v, dout))  # (total, heads, head dim)
    starts = [torch.tensor([0, *(pair[side] for pair in case.lengths)]).cumsum(0).int() for side in (0, 1)]
    return q, k, v, dout, dlse.to(device), [x.to(device) for x in starts] if case.packed else None


def run(attention, attention_varlen, inputs, dtype, keywords):
    """out, lse, dq, dk, dv of a function, by autograd, for a loss that uses out and lse."""
    q, k, v, dout, dlse, starts = inputs
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in (q, k, v))
    if starts is None:
        out, lse = attention(q, k, v, return_lse=True, **keywords)
    else:
        out, lse = attention_varlen(q, k, v, *starts, return_lse=True, **keywords)
    assert out.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert out.shape == q.shape
    # -inf has no gradient to speak of; one that arrives there must do no harm.
    gradients = torch.autograd.grad((out, lse), (q, k, v), (dout.to(dtype), dlse.to(lse.dtype)))
    return dict(zip(NAMES, (out.detach(), lse.detach(), *gradients)))


def rounded_dense(inputs, dtype, keywords):
    """The formulas of `flash.attention`, all scores at hand, in float32; P, dS and the results rounded to `dtype`."""
    return _by_sequence(functools.partial(_rounded, dtype), inputs, torch.float32, keywords)


def order_of_sums(inputs, keywords, terms, stored_off):
    """How far float32 sums of any order may lie from the exact results, to first order in each gradient.

    A sum of n products is off by gamma(n) sum |a b|, gamma(n) = n u / (1 - n u), u = 2^-24 (Higham, 2002, section 3.1).
    terms: the longest sum over the head dim. SOME more roundings stand for those that are few: of the scale, of a
    subtraction, of the exponential.

    stored_off, like lse: what delta = rowsum(dO O) loses because O was rounded when it was stored. In 16 bits that is
    most of the error of dQ and dK, the more so under dropout, which makes O larger by 1 / (1 - p).
    """
    function = functools.partial(_order_of_sums, terms)
    return _by_sequence(function, inputs, torch.float64, keywords, stored_off.abs())


def _by_sequence(function, inputs, dtype, keywords, *more):
    """function(q, k, v, dout, dlse, keywords, numbers of the sequences, …) in `dtype`; packed ones joined.

    more: tensors like lse.
    """
    *tensors, starts = inputs
    q, k, v, dout, dlse = (x.to(dtype) for x in tensors)
    if starts is None:
        return function(q, k, v, dout, dlse, keywords, range(q.shape[0]), *more)
    parts = []
    for number in range(len(starts[0]) - 1):
        rows, keys = (slice(*s[number : number + 2].tolist()) for s in starts)
        one = (x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys], dout[rows]))
        parts.append(function(*one, dlse[None, :, rows], keywords, [number], *(x[None, :, rows] for x in more)))
    joined = {name: torch.cat([part[name][0] for part in parts], dim=1) for name in NAMES}
    return {name: x if name == "lse" else x.transpose(0, 1) for name, x in joined.items()}


def _dense(q, k, keywords, batches):
    """scale, lse, P, and what dropout multiplies P by; k: for each query head."""
    options, n_q, n_k = options_of(q, k, k, **keywords), q.shape[2], k.shape[2]
    spans = batches, range(q.shape[1]), range(n_q), range(n_k)
    numbers = [torch.tensor(list(span), dtype=torch.int64, device=q.device) for span in spans]
    s = (options.scale * q @ k.mT).masked_fill(hidden(options, *numbers[2:], n_q, n_k), -math.inf)
    lse = s.logsumexp(-1) if n_k else s.new_full(s.shape[:-1], -math.inf)
    p = (s - lse.masked_fill(lse == -math.inf, math.inf)[..., None]).exp()
    if options.seed is None:
        return options.scale, lse, p, torch.ones_like(p)
    return options.scale, lse, p, dropout_keep(options.seed, options.dropout_p, *numbers) / (1 - options.dropout_p)


def _rounded(dtype, q, k, v, dout, dlse, keywords, batches):
    group, shared = q.shape[1] // k.shape[1], k.shape
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scale, lse, p, mask = _dense(q, k, keywords, batches)

    def rounded(x):
        return x.to(dtype).float()

    kept = rounded(p * mask)
    out = rounded(kept @ v)
    ds = rounded(p * ((dout @ v.mT) * mask - (dout * out).sum(-1, keepdim=True) + dlse[..., None]))
    dk, dv = (x.view(shared[0], shared[1], group, *shared[2:]).sum(2) for x in (scale * ds.mT @ q, kept.mT @ dout))
    return dict(out=out, lse=lse, dq=rounded(scale * ds @ k), dk=rounded(dk), dv=rounded(dv))


SOME = 16


def gamma(n, u=2**-24):
    """The relative error of n roundings in a row, each of u at most."""
    return n * u / (1 - n * u)


def _order_of_sums(terms, q, k, v, dout, dlse, keywords, batches, stored_off):
    group, shared = q.shape[1] // k.shape[1], k.shape
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scale, lse, p, mask = _dense(q, k, keywords, batches)
    over_columns, over_keys, over_rows = (gamma(n + SOME) for n in (terms, k.shape[2], q.shape[2] * group))
    out, dp = (p * mask) @ v, (dout @ v.mT) * mask
    g = dp - (dout * out).sum(-1, keepdim=True) + dlse[..., None]
    q, k, v, dout, scale = q.abs(), k.abs(), v.abs(), dout.abs(), abs(scale)
    # Scores, and with them lse; then weights, relative to themselves: exp(error of S + error of lse) - 1.
    s_off = over_columns * scale * q @ k.mT
    lse_off = (p * s_off.expm1()).sum(-1).log1p() + 2 * over_keys + gamma(SOME) * lse.abs().masked_fill(lse.isinf(), 0)
    p_off = (s_off + lse_off[..., None]).expm1() * p
    out_off = (p_off * mask) @ v
    # dP and delta: where they cancel, their errors stay.
    delta_off = (over_columns * (dout * out.abs()) + dout * out_off).sum(-1) + gamma(SOME) * dlse.abs() + stored_off
    g_off = over_columns * (dout @ v.mT) * mask + delta_off[..., None]
    ds_off = p_off * g.abs() + (p + p_off) * g_off
    dq = scale * (ds_off + over_keys * (p * g).abs()) @ k
    dk = scale * (ds_off + over_rows * (p * g).abs()).mT @ q
    dv = ((p_off + over_rows * p) * mask).mT @ dout
    dk, dv = (x.view(shared[0], shared[1], group, *shared[2:]).sum(2) for x in (dk, dv))
    return dict(out=out_off, lse=lse_off, dq=dq, dk=dk, dv=dv)


def error(measured, exact):
    """The largest difference; equal infinities differ by 0. NaN where anything is."""
    same = measured.double() == exact.double()
    difference = (measured.double() - exact.double()).masked_fill(same, 0).abs()
    return difference.max().item() if difference.numel() else 0.0


def allowed_errors(exact, inputs, dtype, keywords, terms, out=None):
    """What the rule allows for each result on these inputs. out: as it was stored, by default the plain attention's."""
    plain = run(attention_reference, attention_reference_varlen, inputs, dtype, keywords)
    dense = rounded_dense(inputs, dtype, keywords)
    best = {name: exact[name].to(plain[name].dtype) for name in NAMES}  # no one can come closer
    off = (inputs[3].double() * ((plain["out"] if out is None else out).double() - exact["out"])).sum(-1)
    order = order_of_sums(inputs, keywords, terms, off if inputs[-1] is None else off.mT)
    largest = {name: order[name].max().item() if order[name].numel() else 0.0 for name in NAMES}
    yardsticks = plain, dense, best
    return {name: 2 * max(error(x[name], exact[name]) for x in yardsticks) + largest[name] + 1e-5 for name in NAMES}


def check_accuracy(case, attention, attention_varlen, device="cpu", terms=None):
    """Assert the rule for one case. terms: the longest sum over the head dim, by default all of it."""
    inputs, keywords, terms = make(case, device), case.keywords, terms or case.head_dim
    exact = run(attention_reference, attention_reference_varlen, inputs, torch.float64, keywords)
    measured = run(attention, attention_varlen, inputs, case.dtype, keywords)
    assert all(torch.isfinite(exact[name]).all() for name in NAMES if name != "lse")
    found = {name: error(measured[name], exact[name]) for name in NAMES}
    allowed = allowed_errors(exact, inputs, case.dtype, keywords, terms, measured["out"])
    for again in range(1, 5):
        if all(found[name] <= allowed[name] for name in NAMES):
            return
        # Where the largest of few errors is small by luck, others drawn like them say what is usual.
        inputs = make(dataclasses.replace(case, seed=case.seed + again), device)
        exact = run(attention_reference, attention_reference_varlen, inputs, torch.float64, keywords)
        more = allowed_errors(exact, inputs, case.dtype, keywords, terms)
        allowed = {name: max(allowed[name], more[name]) for name in NAMES}
    assert all(found[name] <= allowed[name] for name in NAMES), f"off by {found}, allowed {allowed}: {case}"
