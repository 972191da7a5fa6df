"""Whole arrays: the same bits and flags as one number at a time, as the table, and as PyTorch."""

import contextlib
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from precision import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, TF32, FloatFormat, accumulate, arrays, compare, multiply
from precision.one_number import ROUNDINGS, decode_one, encode_one
from tests.support.helpers import slow

DETERMINISTIC = ROUNDINGS[:5]
FLAGS = ("inexact", "underflow", "overflow", "invalid", "divide_by_zero")


def patterns(count, dtype, seed=0):
    """Random bits as floats: every exponent, infinities and NaNs, half of them signalling."""
    words = np.random.default_rng(seed).integers(0, 2 ** (8 * dtype().itemsize), count, dtype=f"u{dtype().itemsize}")
    return words.view(dtype)


def assert_same(x, fmt, rounding, **options):
    """`encode_one` of each, from float64; a float32 NaN is widened by its bits, since a conversion would quiet it."""
    with np.errstate(invalid="ignore"):
        wide, words = x.astype(np.float64), x.view(f"u{x.itemsize}").astype(np.uint64)
    if x.itemsize == 4:
        nan = (words >> 31) << 63 | 0x7FF << 52 | (words & 0x7FFFFF) << 29
        wide = np.where(np.isnan(x), nan.view(np.float64), wide)
    wanted, raised = zip(*(encode_one(number, fmt, rounding, **options) for number in wide.tolist()))
    bits, flags = fmt.encode(x, rounding, return_flags=True, **options)
    np.testing.assert_array_equal(bits, wanted, f"{fmt} {rounding}")
    for name in FLAGS:
        expected = [name in names for names in raised]
        np.testing.assert_array_equal(getattr(flags, name), expected, f"{name}: {fmt} {rounding}")
    # Without flags the way may be a shorter one, and on a tensor it may be another; the bits are the same.
    assert np.array_equal(fmt.encode(x, rounding, **options), bits)
    assert np.array_equal(fmt.encode(torch.from_numpy(x), rounding, **options).numpy(), bits)


# The same as one by one.


def boundaries(fmt, dtype):
    """Every number, every middle of two, both neighbours of each in dtype, and what lies beyond; both signs."""
    numbers = fmt.decode(np.arange(fmt.max_bits + 1)).astype(np.float64)
    numbers = np.append(numbers, 2 * numbers[-1] - numbers[-2])
    exact = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2])
    with np.errstate(over="ignore"):  # of BFloat16, float32 has no number beyond the largest
        exact = exact.astype(dtype)
    x = np.concatenate([exact, np.nextafter(exact, dtype(np.inf)), np.nextafter(exact, dtype(-np.inf))])
    x = np.concatenate([x, dtype([np.inf, np.finfo(dtype).max, np.finfo(dtype).tiny])])
    return np.unique(np.concatenate([x, -x]).view(f"u{x.itemsize}")).view(dtype)  # -0 and 0 are two


GFLOATS = {FP16: "binary16", BF16: "bfloat16", FP8_E5M2: "ocp_e5m2", FP8_E4M3: "ocp_e4m3"}
MODES = dict(zip(DETERMINISTIC, ("TiesToEven", "TiesToAway", "TowardZero", "TowardPositive", "TowardNegative")))


@pytest.mark.parametrize("fmt", [FP8_E4M3, FP8_E5M2, *slow(FP16, BF16, mark=pytest.mark.slow)])
@pytest.mark.parametrize("rounding", DETERMINISTIC)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_boundary_is_gfloats_and_flags_are_what_they_mean(dtype, rounding, fmt):
    """Of 16 bits half a million numbers, of which some one by one."""
    gfloat, x = pytest.importorskip("gfloat"), boundaries(fmt, dtype)
    information = getattr(pytest.importorskip("gfloat.formats"), f"format_info_{GFLOATS[fmt]}")
    bits, flags = fmt.encode(x, rounding, return_flags=True)
    with np.errstate(over="ignore"):
        theirs = gfloat.round_ndarray(information, x.astype(np.float64), gfloat.RoundMode[MODES[rounding]])
    ours = fmt.decode(bits)
    np.testing.assert_array_equal(ours, theirs)
    assert np.array_equal(np.signbit(ours), np.signbit(x))
    assert np.array_equal(flags.inexact, ours != x)
    if fmt != BF16:  # whose exponents are float32's: no format here has more, to round as if they had no end
        endless = np.abs(FloatFormat(8, fmt.mantissa_bits).quantize(x, rounding))
        assert np.array_equal(flags.underflow, flags.inexact & (endless < fmt.smallest_normal))
        assert np.array_equal(flags.overflow, (endless > fmt.max) & (np.isfinite(x) | (not fmt.infinities)))
    x = np.concatenate([x[np.random.default_rng(0).permutation(len(x))[:2000]], patterns(200, dtype)])
    assert_same(x, fmt, rounding)
    assert_same(x, fmt, rounding, flush_to_zero=True)


def formats_of_all_kinds():
    """Random widths, biases and options: more range than float32, no bit of mantissa, one of exponent."""
    generator, kinds = random.Random(0), []
    while len(kinds) < 12:
        exponent_bits = generator.randint(1, 11)
        options = {name: generator.random() < 0.6 for name in ("infinities", "nans", "subnormals", "saturate")}
        bias = generator.choice([None, None, generator.randint(-5, 140)])
        with contextlib.suppress(ValueError):
            kinds.append(FloatFormat(exponent_bits, generator.randint(0, 15 - exponent_bits), bias=bias, **options))
    return kinds


# The short way ends between these: its powers of two must exist in the carrier.
ENDS = [FloatFormat(7, 5, bias=bias) for bias in (16, 17, 18, 121, 122, 123)]
ENDS += [FloatFormat(10, 5, bias=bias) for bias in (45, 46, 47, 1015, 1016, 1017)]
ENDS += [FloatFormat(3, 5, bias=bias) for bias in (-107, -108, -109, -974, -975, -976)]
ENDS += [FloatFormat(*bits, saturate=True) for bits in ((5, 10), (8, 7))] + [FloatFormat(5, 0, infinities=False)]
USUAL = [FP16, BF16, TF32, FP32, FloatFormat(5, 10, bias=127)]


@pytest.mark.parametrize("fmt", [*USUAL, *ENDS, *formats_of_all_kinds()])
def test_every_kind_of_format_is_converted_as_one_by_one(fmt):
    codes = np.random.default_rng(0).integers(0, 2**fmt.width, 60)
    decoded = fmt.decode(codes)
    one = np.array([decode_one(int(code), fmt) for code in codes]).astype(decoded.dtype)
    assert np.array_equal(decoded.view(f"u{decoded.itemsize}"), one.view(f"u{one.itemsize}"))
    numbers = decoded[np.isfinite(decoded)][:30].astype(np.float64).tolist()
    ends = [fmt.max, fmt.smallest_normal, fmt.smallest_subnormal, fmt.smallest_subnormal / 2, fmt.epsilon, 0.0]
    factors = [0.75, 1 - 2.0**-20, 1, 1 + 2.0**-20, 1 + fmt.epsilon / 2, 1.5, 4]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        x = np.outer(numbers + ends + [np.inf], factors).ravel()
        x = np.concatenate([x, -x, np.nextafter(numbers, np.inf)])
        for given in (x, x.astype(np.float32)):
            given = np.concatenate([given, patterns(80, given.dtype.type)])
            for rounding in DETERMINISTIC:
                assert_same(given if fmt.nans else given[~np.isnan(given)], fmt, rounding)


# The same as PyTorch.


TORCHS = pytest.mark.parametrize(
    ("fmt", "dtype"),
    [(FP16, torch.float16), (BF16, torch.bfloat16), (FP8_E5M2, torch.float8_e5m2), (FP8_E4M3, torch.float8_e4m3fn)],
)


@TORCHS
def test_float32_as_torch(fmt, dtype):
    x = np.concatenate([patterns(200_000, np.float32), np.random.default_rng(1).standard_normal(200_000, np.float32)])
    x = np.concatenate([x, boundaries(fmt, np.float32)])
    theirs = torch.from_numpy(x).to(dtype).view(torch.uint16 if fmt.width == 16 else torch.uint8).numpy()
    ours, nan = fmt.encode(x), np.isnan(x)
    number = np.abs(x) < 464 if fmt == FP8_E4M3 else ~nan  # beyond: torch 2.13 saturates E4M3
    assert np.array_equal(ours[number], theirs[number]) and np.isnan(fmt.decode(ours[nan])).all()
    assert fmt != FP16 or np.array_equal(ours, theirs)  # torch keeps the payload of FP16's NaNs only


@pytest.mark.exhaustive
def test_all_float32_to_fp16_as_torch():
    """Bit for bit, the payloads of NaNs too."""
    for start in range(0, 2**32, 2**22):
        x = np.arange(start, start + 2**22, dtype=np.uint32).view(np.float32)
        theirs = torch.from_numpy(x).half().view(torch.int16).numpy()
        assert np.array_equal(FP16.encode(x).view(np.int16), theirs), hex(start)


@TORCHS
def test_decode_every_code_as_torch(fmt, dtype):
    """Bits of float32, those of NaNs as well where torch keeps them."""
    codes = torch.arange(2**fmt.width).to(torch.uint16 if fmt.width == 16 else torch.uint8)
    theirs, ours = codes.view(dtype).float(), fmt.decode(codes)
    one_by_one = torch.tensor([decode_one(code, fmt) for code in range(2**fmt.width)], dtype=torch.float64)
    assert torch.equal(one_by_one.view(torch.int64), ours.double().view(torch.int64))
    number, bits, expected = ~theirs.isnan(), ours.view(torch.int32), theirs.view(torch.int32)
    assert torch.equal(bits[number], expected[number])
    assert torch.equal(ours.isnan(), ~number) and torch.equal(ours.signbit(), theirs.signbit())
    assert fmt.width == 8 or torch.equal(bits[~number], expected[~number] | 0x00400000)
    assert torch.equal(fmt.encode(ours).int()[number], codes.int()[number])


def test_decode_of_wide_formats():
    words = patterns(10_000, np.float32).view(np.uint32)
    assert np.array_equal(FP32.decode(words).view(np.uint32), words | np.where(np.isnan(words.view("f4")), 0x400000, 0))
    every = np.arange(2**19)
    assert np.array_equal(TF32.decode(every)[:: 2**8], [decode_one(code, TF32) for code in range(0, 2**19, 2**8)], True)


# Stochastic rounding.


def test_stochastic_is_proportional_and_seeded():
    count = 200_000
    for fmt, low, share, step in (
        (FP16, 1.0, 0.25, 2.0**-10),
        (FP16, 0.0, 2.0**-6, 2.0**-24),  # 2^-30 is far below the last place
        (BF16, -3.0, 0.9, -(2.0**-6)),
        (FP8_E4M3, 448.0, 0.5, 32.0),  # half of what lies between the largest and the place of NaN overflows
    ):
        for dtype in (np.float32, np.float64):
            x = np.full(count, low + share * step, dtype)
            bits = fmt.encode(x, "stochastic", seed=3)
            away = (fmt.decode(bits) != low).mean()
            assert abs(away - share) < 5 * (share * (1 - share) / count) ** 0.5, (fmt, away, share)
            assert len(np.unique(bits)) == 2
            assert np.array_equal(bits, fmt.encode(torch.from_numpy(x), "stochastic", seed=3).numpy())
            assert not np.array_equal(bits, fmt.encode(x, "stochastic", seed=4))
    x = np.full(1000, 1 + 2.0**-11)
    bits = FP16.encode(x, "stochastic", seed=3)
    assert np.array_equal(bits[:99], FP16.encode(x[:99], "stochastic", seed=3)) and len(np.unique(bits[:99])) == 2
    # SplitMix64 goes on by this number from draw to draw: as a seed it must not give the same draws, one place on.
    assert not np.array_equal(FP16.encode(x, "stochastic", seed=3 + 0x9E3779B97F4A7C15)[:-1], bits[1:])
    assert len(np.unique(FP16.encode(x, "stochastic", seed=2**63))) == 2
    exact = FP16.decode(np.arange(0x7C00))
    assert np.array_equal(FP16.quantize(exact, "stochastic", seed=0), exact)
    assert FP16.encode(np.float32(1e-38), "stochastic", seed=0) == 0


def test_stochastic_without_a_seed_follows_torch():
    x = torch.full((1000,), 1 + 2.0**-12)
    torch.manual_seed(5)
    first, second = FP16.encode(x, "stochastic"), FP16.encode(x, "stochastic")
    torch.manual_seed(5)
    assert torch.equal(FP16.encode(x, "stochastic"), first) and not torch.equal(first, second)


# What may come in.


def test_shapes_and_kinds():
    x = np.random.default_rng(0).standard_normal((3, 10, 14))
    for array in (x, x.astype(np.float32), x[:, ::2], x.T, x[0, 0, 0], x[:0], x[:, :0]):
        expected = np.array([encode_one(float(v), FP16)[0] for v in np.ravel(array)]).reshape(np.shape(array))
        bits = FP16.encode(array)
        assert bits.dtype == np.uint16 and bits.shape == np.shape(array) and np.array_equal(bits, expected)
        assert np.array_equal(FP16.decode(bits), FP16.quantize(array))
        if np.ndim(array):
            tensor = torch.from_numpy(array)
            assert FP16.encode(tensor).dtype == torch.uint16 and FP16.encode(tensor).shape == tensor.shape
            assert np.array_equal(FP16.encode(tensor).numpy(), expected)
    imaginary = torch.tensor([0.1 - 1j, 2 + 0.5j]).conj().imag  # its sign is a bit of the tensor, not of its numbers
    assert FP16.quantize(imaginary).tolist() == [1.0, -0.5] and FP16.encode(imaginary).tolist() == [0x3C00, 0xB800]
    assert FP16.encode(0.1) == 0x2E66 and isinstance(FP16.encode(0.1), np.uint16)
    assert FP16.decode(0x2E66) == 0.0999755859375 and FP16.decode([0x2E66, 0]).shape == (2,)
    single = FP16.encode(torch.tensor(0.1, requires_grad=True))
    assert single.shape == () and single.item() == 0x2E66
    assert [f.encode([1.0]).dtype for f in (FP8_E4M3, BF16, TF32, FP32)] == [np.uint8, np.uint16, np.uint32, np.uint32]
    _, flags = FP16.encode(torch.tensor(0.1), return_flags=True)
    assert flags.inexact.dtype == torch.bool and flags.inexact.shape == () and flags.inexact
    _, flags = FP16.encode(np.zeros((0, 3)), return_flags=True)
    assert flags.overflow.shape == (0, 3)


@pytest.mark.accuracy
def test_pieces_do_not_show(monkeypatch):
    x = np.random.default_rng(0).standard_normal((7, 11, 13)).astype(np.float32)
    whole = [FP16.encode(x, rounding, seed=1 if rounding == "stochastic" else None) for rounding in ROUNDINGS]
    for size in (1, 5, 13, 20, 143, 500):
        monkeypatch.setattr(arrays, "CPU_PIECE", size)
        for rounding, expected in zip(ROUNDINGS, whole):
            seed = 1 if rounding == "stochastic" else None
            assert np.array_equal(FP16.encode(x, rounding, seed=seed), expected)
            tensor = torch.from_numpy(x).permute(2, 0, 1)  # of other strides; a position is one of its shape
            bits = FP16.encode(tensor, rounding, seed=seed).permute(1, 2, 0).numpy()
            assert np.array_equal(bits, expected) == (seed is None)


def test_quantize_keeps_the_dtype():
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        x = torch.tensor([0.1, 300.0, -1e-4], dtype=dtype)
        assert FP8_E4M3.quantize(x).dtype == dtype
        assert FP8_E4M3.quantize(x).tolist() == [0.1015625, 288.0, 0.0] if dtype != torch.float16 else True
    assert FP16.quantize(np.float64([0.1])).dtype == np.float64
    assert FP16.quantize(np.float16([0.1])).dtype == np.float16
    x = torch.tensor([1.5], dtype=torch.bfloat16)
    assert torch.equal(BF16.encode(x).view(torch.bfloat16), x)


# In float32, or in float64, some of their numbers are subnormal; halfway to the first number of the last one is.
LOW = [BF16, TF32, *(FloatFormat(5, 10, bias=bias) for bias in (140, 1013, 1022)), FloatFormat(8, 7, bias=160)]
LOW += [FP16, FP8_E4M3, FloatFormat(7, 5, bias=122)]


def test_no_warnings_and_no_other_arithmetic():
    """Neither NumPy's error settings nor a processor that takes subnormals for zero have a say."""
    x = patterns(5000, np.float32)
    low = np.concatenate([x, np.arange(1, 2**23, 8003, np.uint32).view(np.float32)])  # subnormal numbers too
    double = low[~np.isnan(low)].astype(np.float64)
    double = np.concatenate([double, double * 2.0**-900])
    jobs = [lambda fmt=fmt, y=y: fmt.encode(y) for fmt in LOW for y in (low, double)]
    jobs += [lambda fmt=fmt, y=y: fmt.quantize(y) for fmt in (*LOW, FP32) for y in (low, double)]
    jobs += [lambda fmt=fmt: fmt.quantize(torch.from_numpy(low).bfloat16()).view(torch.int16) for fmt in LOW]
    jobs += [lambda fmt=fmt: fmt.decode(np.arange(2 ** min(fmt.width, 16))) for fmt in LOW]
    expected = [np.asarray(job()).tobytes() for job in jobs]
    with np.errstate(all="raise"):
        FP16.encode(x)
        for rounding in ROUNDINGS:
            FP16.decode(FP16.encode(patterns(5000, np.float64), rounding))
        FP16.quantize(patterns(500, np.float16))
        FloatFormat(10, 5).encode(x)
        FP8_E4M3.decode(np.arange(256))
    if torch.set_flush_denormal(True):
        try:
            assert [np.asarray(job()).tobytes() for job in jobs] == expected
        finally:
            torch.set_flush_denormal(False)


CALLS = {
    "encode": FP16.encode,
    "quantize": BF16.quantize,
    "decode": FP16.decode,
    "multiply": lambda x: multiply(x, x),
    "compare": lambda x: compare(1, x),
    "sum": accumulate.sum,
    "softmax": accumulate.softmax,
    "matmul": lambda x: accumulate.matmul(x, x),
    "batch_norm_statistics": accumulate.batch_norm_statistics,
}
MASKED = np.ma.masked_array([[1.0, 2.0]] * 2, mask=[[1, 0]] * 2)


@pytest.mark.parametrize("name", CALLS)
def test_arrays_that_are_not_dense_numbers_are_refused_by_name(name):
    """A masked array would lose its mask. NumPy's and PyTorch's own errors do not name the function."""
    ways = {
        "is a masked array, and its mask would be lost": [MASKED, MASKED.astype(int), [MASKED[0]], np.ma.masked],
        "is no array of numbers": [[[1.0], [1.0, 2.0]]],
        r"is sparse or nested \(": [torch.eye(2).to_sparse(), torch.eye(2, dtype=torch.int32).to_sparse()],
    }
    for message, given in ways.items():
        for x in given:
            with pytest.raises(TypeError, match=rf"^{name}: \S+ ?\d? {message}"):
                CALLS[name](x)
    kinds = [np.array([1.0, None]), np.zeros(2, [("a", "f4")]), np.array(["1"]), np.array(["2020"], "M8[s]"), None]
    for x in kinds:
        with pytest.raises(TypeError, match=rf"^{name}: .*(object|void|str|datetime64)"):
            CALLS[name](x)


@pytest.mark.parametrize("name", CALLS)
def test_arrays_that_lie_in_memory_in_other_ways(name, tmp_path):
    """The other byte order, as HDF5 files have it; reversed, repeated, not aligned, not to be written, in a file."""
    whole = name in ("decode", "multiply", "compare")
    plain = np.arange(9, dtype=np.uint16 if whole else np.float32).reshape(3, 3)
    padded = np.zeros(plain.nbytes + 1, np.uint8)
    shifted = np.ndarray(plain.shape, plain.dtype, padded, offset=1)
    file = np.memmap(tmp_path / "x", plain.dtype, "w+", shape=plain.shape)
    shifted[:], file[:] = plain, plain
    frozen = plain.copy()
    frozen.flags.writeable = False
    swapped = plain.astype(plain.dtype.newbyteorder())
    for x in (swapped, plain[::-1, ::-1], shifted, file, frozen, plain[:1].repeat(3, 0)):
        expected, got = (np.asarray(CALLS[name](given)) for given in (np.array(x, plain.dtype, order="C"), x))
        np.testing.assert_array_equal(got, expected)
        assert got.shape == expected.shape
    for size in (">f2", ">f8") if not whole else (">i4", ">u8"):
        big, own = plain.astype(size), plain.astype(size.replace(">", "="))
        np.testing.assert_array_equal(CALLS[name](big), CALLS[name](own))


def test_patterns_without_values_have_no_value_to_check():
    bits = torch.ones(2, 3, dtype=torch.int32, device="meta")
    assert FP16.decode(bits).is_meta and multiply(bits, bits).shape == (2, 3)


FINITE = FloatFormat(2, 1, infinities=False, nans=False)
TOO_LARGE = [(FP16, 65536), (FP16, -1), (FP16, 2**70), (FP16, np.uint64(2**64 - 1)), (FP32, np.int64(2**32))]
TOO_LARGE += [(FloatFormat(2, 3), np.uint8(64)), (TF32, 2**19)]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: FP16.encode(1.0, "even"), ValueError, "encode: unknown rounding 'even': use one of nearest-even, "),
        (lambda: FP16.quantize(1.0, seed=1), ValueError, "seed=1 is for rounding='stochastic'"),
        (lambda: FP16.encode(1.0, "stochastic", seed=0.5), TypeError, "float"),
        (lambda: FINITE.encode(np.array([1, np.nan])), ValueError, "has no NaN: replace NaNs first"),
        (lambda: FINITE.encode(torch.tensor([np.nan])), ValueError, "has no NaN: replace NaNs first"),
        *[
            (lambda bits=bits: FP16.decode(bits), TypeError, "decode: bits is (float|bool).*which are integers")
            for bits in (0.5, np.float16([1]), torch.ones(2), True)
        ],
        *[
            (lambda fmt=fmt, x=x: fmt.decode(x), ValueError, f"holds {int(x)}: patterns of {fmt.width} bits")
            for fmt, x in TOO_LARGE
        ],
        (lambda: FP16.decode(torch.tensor([1, -2], dtype=torch.int16)), ValueError, "holds -2: patterns.*unsigned"),
        (lambda: FP16.decode([7, 65536, 65535]), ValueError, "holds 65536: "),
        *[
            (lambda function=function, x=x: function(x), TypeError, "float32 or float64.* cast integers")
            for function in (FP16.encode, FP16.quantize)
            for x in (3, [1, 2], torch.arange(3), True, 1j, torch.ones(1).cfloat(), "0.1", np.longdouble(1))
        ],
    ],
)
def test_what_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


# What it costs.


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_memory_beyond_input_and_output(kind):
    """At most 16 MiB, and no more for more numbers: flags and stochastic rounding, from float64, take most."""
    peaks = []
    for size in (2**19, 2**20):
        x = kind(np.random.default_rng(0).standard_normal((size // 8, 8)))
        for call, output in (
            (lambda x=x: FP16.encode(x, "stochastic", seed=0, return_flags=True), 7 * size),
            (lambda x=x: FP16.quantize(x.T), 8 * size),
            (lambda x=x: FP16.decode(FP16.encode(x)), 6 * size),
        ):
            tracemalloc.start()
            call()
            peaks.append(tracemalloc.get_traced_memory()[1] - (output if kind is np.asarray else 0))
            tracemalloc.stop()
    assert 0 < max(peaks) < 16 * 2**20
    assert all(large < small + 2**18 for small, large in zip(peaks[:3], peaks[3:]))


@pytest.mark.accuracy
def test_no_compiler_is_loaded_before_one_is_used():
    """It would bring Triton, which chooses its interpreter when it is first imported: `flash` must come before."""
    lines = (
        "import sys, torch, precision; bits = precision.FP16.encode(torch.ones(2));"
        "print({'torch._dynamo', 'triton'} & {*sys.modules})"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", lines], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.slow
def test_compiled():
    """One graph, the same bits; nothing that is rounded is optimised away."""
    encode = torch.compile(FP16.encode, fullgraph=True, dynamic=False)
    quantize = torch.compile(lambda x: FP16.quantize(x) - x, fullgraph=True)
    x = torch.from_numpy(patterns(2**16 + 1, np.float32))
    square = x[:-1].reshape(256, 256)
    for piece in (square, square.t(), x[1:-2], square.double()):
        assert torch.equal(encode(piece).view(torch.int16), FP16.encode(piece).view(torch.int16))
    y = torch.randn(1000)
    assert torch.equal(quantize(y), y.half().float() - y) and quantize(y).abs().max() > 0


@pytest.mark.gpu
def test_gpu_gives_the_same_bits():
    for dtype in (np.float32, np.float64):
        x = patterns(2**20, dtype)
        there = torch.from_numpy(x).cuda()
        for rounding in ROUNDINGS:
            seed = 1 if rounding == "stochastic" else None
            bits, flags = FP16.encode(there, rounding, seed=seed, return_flags=True)
            expected, expected_flags = FP16.encode(x, rounding, seed=seed, return_flags=True)
            assert bits.is_cuda and np.array_equal(bits.cpu().numpy(), expected)
            for name in FLAGS:
                assert np.array_equal(getattr(flags, name).cpu().numpy(), getattr(expected_flags, name))
    assert torch.equal(FP16.decode(bits).cpu().view(torch.int32), FP16.decode(bits.cpu()).view(torch.int32))
