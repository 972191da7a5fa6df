"""FP16 loses a small update: the literature's claims about it, checked on every number that they are about."""

import pytest
import torch
from torch import nn

from precision.master import MasterWeights


def test_values_below_2_to_the_minus_24_mostly_do_not_vanish():
    """The claim is "below 2^-24 becomes zero". Under round-to-nearest the cut is 2^-25: all of them above that
    become 2^-24, and 2^-25 itself is a tie, which goes to the even neighbour, zero."""
    between = torch.arange(2**23, dtype=torch.int32)  # every mantissa

    def with_exponent(e):
        return (between + ((e + 127) << 23)).view(torch.float32)

    halves = with_exponent(-25)
    assert halves[0] == 2.0**-25 and halves[-1] < 2.0**-24
    assert halves[0].half() == 0 and bool((halves[1:].half() == 2.0**-24).all())
    assert bool((with_exponent(-26).half() == 0).all())
    assert bool((with_exponent(-24)[: 2**22].half() == 2.0**-24).all())


def lost_ratios(sign, exponent):
    """For every FP16 weight w in [2^exponent, 2^(exponent+1)) and every FP16 update u from w/16384 to w/1024:
    w / u, and whether w ± u rounds back to w. Both (weights, updates)."""
    mantissas = 1 + torch.arange(1024) / 1024
    weights = (mantissas * 2.0**exponent).half()[:, None]
    updates = torch.cat([mantissas * 2.0 ** (exponent - k) for k in (13, 12, 11, 10)]).half()
    updates = updates[updates > 0].unique()
    return weights.double() / updates.double(), weights + sign * updates == weights


@pytest.mark.parametrize("exponent", [-13, -2, 0, 15])
def test_from_which_ratio_on_an_addition_is_lost(exponent):
    """The claim is a ratio of 2048. It is where losses begin; where they end depends on the significand."""
    ratio, lost = lost_ratios(+1, exponent)
    assert ratio[lost].min() == 2048
    assert ratio[~lost].max() == 4094
    # The largest significand, 2047, is odd: half a spacing is a tie, and a tie goes to the even neighbour above.
    weight, update = torch.tensor([2047 * 2.0 ** (exponent - 10), 2.0 ** (exponent - 11)]).half()
    assert weight / update == 4094 and weight + update > weight


@pytest.mark.parametrize("exponent", [-12, -2, 0, 15])
def test_from_which_ratio_on_a_subtraction_is_lost(exponent):
    """It begins just above 2048, and ends at 4096: below a power of two the numbers lie twice as close."""
    ratio, lost = lost_ratios(-1, exponent)
    assert 2048 < ratio[lost].min() <= 2052
    assert ratio[0][lost[0]].min() == 4096 and bool(lost[ratio >= 4096].all())  # [0]: the power of two itself
    if exponent >= 0:  # updates fine enough: the second significand, 1025, and a little less than half a spacing
        assert ratio[lost].min() == 1025 / (2047 / 4096)


def test_in_the_lowest_binades_no_update_is_lost():
    """There FP16 has one spacing for all numbers, 2^-24, which is also its smallest update."""
    updates = torch.arange(1, 2049, dtype=torch.int16).view(torch.float16)
    weights = torch.arange(2048, dtype=torch.int16).view(torch.float16)[:, None]
    assert weights.max() < 2.0**-13 and bool((weights + updates != weights).all())


def test_without_masters_small_updates_are_lost_and_with_them_they_add_up():
    """2048 + 1 = 2048 in FP16, hundreds of times over; the master counts."""
    plain = nn.Parameter(torch.tensor([2048.0]).half())
    optimizer = torch.optim.SGD([plain], lr=1.0)
    weight = nn.Parameter(torch.tensor([2048.0]).half())
    weights = MasterWeights([weight], torch.optim.SGD, lr=1.0)
    for step in range(1, 301):
        plain.grad, weight.grad = -torch.ones_like(plain), -torch.ones_like(weight)
        optimizer.step()
        weights.step()
        assert weights.masters[0].item() == 2048 + step
    assert plain.item() == 2048 and weight.item() == 2348
