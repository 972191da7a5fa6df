"""One scale for 32 numbers: OCP Microscaling ("MX"), which the cores of NVIDIA's Blackwell and AMD's MI350 multiply.

A number of 4 to 8 bits has few exponents of its own: 4 bits with a sign end at 6. So each block of 32 numbers along the
last dimension shares a scale, a power of two of 8 bits without sign or mantissa (E8M0):

    X = 2^(floor(log2(max |v|)) - emax)      emax: the exponent of the element format's largest number
    code_i = v_i / X, rounded to the nearest number of the format, and clamped to its largest
    v_i ≈ X · code_i

So the largest number of a block uses the format's upper end. What is much smaller than it becomes 0: one large number
costs its 31 neighbours their digits. 32 codes and a scale take 8 1/4, 6 1/4 or 4 1/4 bits a number.

OCP Microscaling Formats (MX) Specification v1.0, 2023, section 6.3; Rouhani et al., 2023, "Microscaling Data Formats
for Deep Learning".
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from precision.formats import FloatFormat

BLOCK = 32
SCALE_BIAS, NAN_SCALE = 127, 255


@dataclass(frozen=True)
class BlockFormat:
    """Blocks of 32 numbers of the format `element`, each with a scale. The blocks lie along the last dimension."""

    element: FloatFormat

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(scales, codes), uint8, of shapes (…, n/32) and (…, n). x: (…, n), float32 or of fewer bits.

        A block of zeros has the smallest scale. An infinity has the largest, and is clamped. A NaN makes all of its
        block NaN; E2M3, E3M2 and E2M1 have none: `ValueError`. So it is if 32 does not divide n. `TypeError` for
        float64, whose exponents do not fit, and for other dtypes.
        """
        if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise TypeError(f"blocks of 32: x is {x.dtype}; expected float32, float16 or bfloat16: convert it")
        if x.dim() == 0 or x.shape[-1] % BLOCK:
            raise ValueError(f"blocks of 32: x is {tuple(x.shape)}; 32 must divide the last dimension: pad it")
        blocks = x.double().unflatten(-1, (-1, BLOCK))  # in float64 v / X is exact
        exponent = blocks.abs().amax(-1).log2().floor() - self.element.max_exponent
        exponent = exponent.clamp(-SCALE_BIAS, SCALE_BIAS)  # from -inf for zeros, from inf; a NaN stays
        codes = self.element.encode(blocks / exponent.exp2()[..., None]).flatten(-2)
        return (exponent.nan_to_num(NAN_SCALE - SCALE_BIAS) + SCALE_BIAS).to(torch.uint8), codes

    def decode(self, scales: Tensor, codes: Tensor) -> Tensor:
        """The numbers, exactly, in float64: (…, n). A scale of 255 is NaN. `ValueError` unless 32 codes share each."""
        if codes.shape != (*scales.shape[:-1], BLOCK * scales.shape[-1]):
            raise ValueError(f"blocks of 32: {tuple(scales.shape)} scales do not fit to {tuple(codes.shape)} codes")
        scale = (scales.double() - SCALE_BIAS).exp2().masked_fill(scales == NAN_SCALE, torch.nan)
        return (scale[..., None] * self.element.decode(codes).unflatten(-1, (-1, BLOCK))).flatten(-2)

    def quantize(self, x: Tensor) -> Tensor:
        """x rounded to numbers of this format, in x's own dtype: `decode(*encode(x))`. No gradient flows through."""
        return self.decode(*self.encode(x)).to(x.dtype)


MXFP8_E4M3 = BlockFormat(FloatFormat(4, 3, infinities=False, saturate=True))
MXFP8_E5M2 = BlockFormat(FloatFormat(5, 2, saturate=True))
MXFP6_E2M3 = BlockFormat(FloatFormat(2, 3, infinities=False, nans=False))
MXFP6_E3M2 = BlockFormat(FloatFormat(3, 2, infinities=False, nans=False))
MXFP4 = BlockFormat(FloatFormat(2, 1, infinities=False, nans=False))
FORMATS = {"MXFP8_E4M3": MXFP8_E4M3, "MXFP8_E5M2": MXFP8_E5M2, "MXFP6_E2M3": MXFP6_E2M3, "MXFP6_E3M2": MXFP6_E3M2}
FORMATS |= {"MXFP4": MXFP4}
