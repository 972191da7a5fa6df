"""What a policy keeps is not computed again, and the gradients stay the same."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from minizero.recompute import RecomputeMismatch, checkpoint_selective, is_recomputing, keep_matmuls
from tests.support.recompute_ways import Operators, as_plain, plain, selective, vectors


def test_what_is_kept_is_not_computed_again():
    attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def fn(x):
        return F.gelu(attention(x, x, x, need_weights=False)[0]) + F.conv1d(x, torch.ones(5, 5, 3), padding=1)

    def again(keep):
        y = checkpoint_selective(keep, fn, vectors()[None].requires_grad_()).sum()
        with Operators() as operators:
            y.backward(retain_graph=True)
            y.backward()
        return {name for name in operators.names if "backward" not in name}

    expensive = {"addmm", "convolution", "_scaled_dot_product_flash_attention_for_cpu"}
    assert not again(keep_matmuls) & expensive
    assert again(lambda operator: False) >= {"addmm", "_scaled_dot_product_flash_attention_for_cpu"}
    assert "addmm" in again(lambda operator: operator == torch.ops.aten.convolution.default)


@as_plain("selective", "everything kept")
def test_numbers_drawn_inside_a_kept_operator_are_drawn_again(way):
    """Were they not, the next dropout would get them."""

    def fn(x):
        x = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5) + torch.rand_like(x)
        return F.dropout(x).exp()

    torch.manual_seed(0)
    x = vectors(16)[None, None].requires_grad_()
    way(fn, x * 1).sum().backward()
    return [x.grad]


@pytest.mark.parametrize("change", [1, 2])
@as_plain("selective", "everything kept")
def test_what_is_changed_in_place_is_not_kept(way, change):
    """Inside, or after the first run: then the second computes it anew."""
    x, products = vectors().requires_grad_(), []

    def fn(x):
        products.append(x @ x.t())
        return products[-1].exp().sin()

    y = way(fn, x * 1)
    if way is not plain:
        products[0].detach().mul_(change)
    y.sum().backward()
    way(lambda x: (x @ x.t()).mul_(2).exp().sin(), x * 1).sum().backward()
    return [x.grad]


def test_a_policy_notices_another_path():
    def fn(x, weight):
        return (torch.baddbmm(x, x, weight) if is_recomputing() else torch.bmm(x, weight)).exp().sin()

    x = torch.ones(2, 4, 4, requires_grad=True)
    y = selective(fn, x, torch.ones(2, 4, 4))
    with pytest.raises(RecomputeMismatch, match="came to aten::baddbmm where the first ran aten::bmm"):
        y.sum().backward()
