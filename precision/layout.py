"""A floating-point format as plain data: how wide its fields are, and which codes are special.

    bits: sign | exponent field | mantissa            "code" below means the bits without the sign

    value = (-1)^sign · 1.mantissa · 2^(field - bias)
    value = (-1)^sign · 0.mantissa · 2^(1 - bias)     if the field is 0: zero and the subnormal numbers

Everything else about a format follows from these few numbers; `formats` adds the conversions.
IEEE 754-2019, section 3 (formats); Micikevicius et al., 2022, "FP8 Formats for Deep Learning" (E4M3 and E5M2).
"""

import math
from dataclasses import KW_ONLY, dataclass


@dataclass(frozen=True)
class BitLayout:
    """The fields of a binary format of at most 16 bits (or of TF32 or FP32), and what follows from them.

    infinities, nans: with both, the highest exponent field holds them, as in IEEE 754. With only one of the two,
    it is the highest code of each sign, and all other codes are numbers, as in E4M3.
    subnormals=False: what would be subnormal is zero, in encode and in decode.
    saturate: what a number that is too large, or an infinity, becomes:

        saturate=True                              ±max
        saturate=False, infinities=True            infinity
        saturate=False, nans=True, no infinities   NaN
        saturate=False, neither                    ±max

    `ValueError` for a format that cannot exist.
    """

    exponent_bits: int
    mantissa_bits: int
    _: KW_ONLY
    bias: int = None  # type: ignore[assignment]  # by default 2^(exponent_bits - 1) - 1
    infinities: bool = True
    nans: bool = True
    subnormals: bool = True
    saturate: bool = False

    def __post_init__(self) -> None:
        widths = (self.exponent_bits, self.mantissa_bits)
        name = f"{type(self).__name__}({self.exponent_bits!r}, {self.mantissa_bits!r})"
        if not all(isinstance(bits, int) for bits in widths) or not isinstance(self.bias, int | None):
            raise TypeError(f"{name}: the widths and the bias ({self.bias!r}) must be whole numbers")
        if self.exponent_bits < 1 or self.mantissa_bits < 0:
            raise ValueError(f"{name}: a float has at least 1 bit of exponent, and no fewer than 0 of mantissa")
        if self.width > 16 and widths not in ((8, 10), (8, 23)):
            raise ValueError(f"{name} has {self.width} bits: at most 16 are possible, or TF32 (8, 10) and FP32 (8, 23)")
        if self.infinities and self.nans and self.mantissa_bits == 0:
            raise ValueError(f"{name}: no bit of mantissa tells NaN from infinity: pass infinities=False or nans=False")
        if self.max_bits < 2**self.mantissa_bits:
            raise ValueError(
                f"{name}: infinities={self.infinities}, nans={self.nans} leave no code for a normal number"
            )
        if self.bias is None:
            object.__setattr__(self, "bias", 2 ** (self.exponent_bits - 1) - 1)
        if self.min_exponent < -1022 or self.max_exponent > 1023:
            raise ValueError(
                f"{name}: with bias {self.bias} its numbers lie between 2^{self.min_exponent} and "
                f"2^{self.max_exponent}: float64, from which numbers are encoded, ends at 2^-1022 and 2^1023"
            )

    # The special codes.

    @property
    def width(self) -> int:
        """Bits in all, the sign's included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def max_bits(self) -> int:
        """The code of the largest number; the codes above it are infinity and NaN."""
        highest = 2 ** (self.width - 1) - 1
        if self.infinities and self.nans:
            return highest - 2**self.mantissa_bits
        return highest - 1 if self.infinities or self.nans else highest

    @property
    def infinity_bits(self) -> int | None:
        """The code right above the largest number's; None in a format without infinities."""
        return self.max_bits + 1 if self.infinities else None

    @property
    def nan_bits(self) -> int | None:
        """The quiet NaN without a payload; None in a format without NaNs."""
        if not self.nans:
            return None
        return self.max_bits + 1 + (2**self.mantissa_bits // 2 if self.infinities else 0)

    @property
    def overflow_bits(self) -> int:
        """What a number that is too large becomes: the table above."""
        return self.max_bits if self.saturate or not (self.infinities or self.nans) else self.max_bits + 1

    # The numbers.

    @property
    def min_exponent(self) -> int:
        """The smallest normal number is 2^min_exponent."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """The largest number is 1.… · 2^max_exponent."""
        return (self.max_bits >> self.mantissa_bits) - self.bias

    @property
    def max(self) -> float:
        """The largest number: a normal one, in every format."""
        significand = 2**self.mantissa_bits + self.max_bits % 2**self.mantissa_bits
        return math.ldexp(significand, self.max_exponent - self.mantissa_bits)

    @property
    def smallest_normal(self) -> float:
        """The smallest number above zero whose leading 1 is not stored."""
        return 2.0**self.min_exponent

    @property
    def smallest_subnormal(self) -> float:
        """The smallest number above zero: in a format without subnormals the smallest normal one."""
        return math.ldexp(1.0, self.min_exponent - self.mantissa_bits * self.subnormals)

    @property
    def epsilon(self) -> float:
        """From 1 to the next number."""
        return 2.0**-self.mantissa_bits
