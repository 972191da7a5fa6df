"""Blocks of 32 numbers with one scale: bit for bit what gfloat makes of them."""

import numpy as np
import pytest
import torch

from precision.blocks import FORMATS, MXFP4, MXFP8_E4M3, MXFP8_E5M2

gfloat = pytest.importorskip("gfloat")
formats = pytest.importorskip("gfloat.formats")
INFORMATION = {info.name: info for info in formats.all_block_formats}
NAMES = {name: INFORMATION[name.lower() + "_e2m1" * (name == "MXFP4")] for name in FORMATS}
each = pytest.mark.parametrize("name", NAMES)


def by_gfloat(info, block):
    scale = gfloat.compute_scale_amax(info.etype.emax, block)
    return list(gfloat.encode_block(info, scale, block / scale))  # the scale's code comes first


def numbers():
    """Blocks of all sizes of numbers, with ties, ends, zeros of both signs, infinities."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(24, 32, generator=generator) * torch.exp2(torch.arange(-148.0, 140.0, 12.0))[:24, None]
    narrow = torch.randn(4, 32, generator=generator) * torch.exp2(torch.randint(-12, 1, (4, 32), generator=generator))
    steps = torch.arange(128.0).view(4, 32) / 16  # every tie of the narrow formats, and what lies between
    blocks = torch.cat([wide.clamp(-3.4e38, 3.4e38), narrow, steps, -steps, 2**-126 * steps, torch.zeros(1, 32)])
    blocks[0, 0], blocks[30, 7], blocks[31, 3] = -0.0, torch.inf, -torch.inf
    return torch.cat([blocks, torch.full((1, 32), 2 - 2.0**-23)])


@each
def test_codes_scales_and_numbers_are_gfloats(name):
    x, fmt = numbers(), FORMATS[name]
    scales, codes = fmt.encode(x)
    expected = np.array([by_gfloat(NAMES[name], block) for block in x.double().numpy()])
    assert np.array_equal(scales.numpy(), expected[:, :1]) and np.array_equal(codes.numpy(), expected[:, 1:])
    decoded = fmt.decode(scales, codes)
    theirs = [list(gfloat.decode_block(NAMES[name], block.tolist())) for block in expected]
    assert np.array_equal(decoded.numpy(), np.array(theirs))
    assert torch.equal(fmt.quantize(x), decoded.float()) and scales.dtype == codes.dtype == torch.uint8
    assert torch.equal(fmt.quantize(x.view(-1, 64)), decoded.float().view(-1, 64)), "two blocks in a row"


@each
def test_every_code_decodes_as_gfloats(name):
    codes = torch.arange(2 ** FORMATS[name].element.width, dtype=torch.uint8).repeat(1, 32)
    codes = codes[:, : codes.shape[1] // 32 * 32]
    scales = torch.linspace(0, 255, codes.shape[1] // 32).to(torch.uint8)[None]
    blocks = zip(scales[0].tolist(), codes.view(-1, 32).tolist())
    theirs = [value for scale, block in blocks for value in gfloat.decode_block(NAMES[name], [scale, *block])]
    assert np.array_equal(FORMATS[name].decode(scales, codes)[0].numpy(), theirs, equal_nan=True)


def test_a_nan_takes_its_block():
    x = torch.ones(2, 64)
    x[0, 40] = torch.nan
    for fmt in (MXFP8_E4M3, MXFP8_E5M2):
        one = 127 - fmt.element.max_exponent
        assert fmt.encode(x)[0].tolist() == [[one, 255], [one, one]]
        assert fmt.quantize(x).isnan().nonzero().tolist() == [[0, place] for place in range(32, 64)]
    with pytest.raises(ValueError, match="has no NaN"):
        MXFP4.encode(x)


def test_what_does_not_fit_is_refused():
    for x, error in ((torch.ones(33), ValueError), (torch.ones(()), ValueError), (torch.ones(32).double(), TypeError)):
        with pytest.raises(error, match="blocks of 32: x is"):
            MXFP4.encode(x)
    with pytest.raises(ValueError, match="do not fit"):
        MXFP4.decode(torch.zeros(2, dtype=torch.uint8), torch.zeros(32, dtype=torch.uint8))
    assert MXFP4.quantize(torch.ones(32, dtype=torch.bfloat16)).dtype == torch.bfloat16
