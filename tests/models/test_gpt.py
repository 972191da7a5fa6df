"""The GPT: as many parameters as the formula says, causal, tied, and the same whenever it is built."""

import math

import pytest
import torch
from torch.nn import functional as F

from minizero import GPT, GPTConfig

TINY = GPTConfig(vocabulary=50, sequence_length=12, width=24, layers=2, heads=4)


def tokens(config=TINY, batch=3):
    generator = torch.Generator().manual_seed(5)
    return torch.randint(config.vocabulary, (batch, config.sequence_length), generator=generator)


@pytest.mark.parametrize("config", [TINY, GPTConfig(), GPTConfig(10, 7, 6, 1, 6)])
def test_the_count_of_parameters(config):
    model, (total, root) = GPT(config), config.count_parameters()
    assert total == sum(p.numel() for p in model.parameters())
    assert root == total - sum(p.numel() for p in model.blocks.parameters())
    if config == GPTConfig():
        assert total == 3_229_952


def test_a_later_token_does_not_change_earlier_logits():
    model, x = GPT(TINY), tokens()
    changed = x.clone()
    changed[:, 7] = (x[:, 7] + 1) % TINY.vocabulary
    before, after = model(x), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=0)
    assert (before[:, 7:] != after[:, 7:]).flatten(2).any(2).all(), "every later position sees the change"


def test_attention_is_pytorchs_attention():
    """Against `scaled_dot_product_attention`, and whole sequences must not see each other."""
    module, x = GPT(TINY).blocks[0].attention, torch.randn(2, 12, TINY.width)
    torch.nn.init.normal_(module.qkv.weight, std=0.5)  # the initial weights are too small to tell
    torch.nn.init.normal_(module.out.weight, std=0.5)
    mask = torch.full((12, 12), float("-inf")).triu(1)
    q, k, v = module.qkv(x).view(2, 12, 3, TINY.heads, -1).permute(2, 0, 3, 1, 4)
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    expected = module.out(heads.transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(x.flatten(0, 1), mask).view(2, 12, -1), expected, rtol=1e-5, atol=1e-5)


def test_the_head_is_the_embedding():
    model = GPT(TINY)
    assert model.head.weight is model.embedding.weight
    model(tokens(), tokens()).backward()
    unseen = [token for token in range(TINY.vocabulary) if token not in tokens()]
    assert model.embedding.weight.grad[unseen].abs().sum(1).min() > 0, "the head's gradient reaches every row"


def test_targets_of_minus_100_do_not_count():
    model, x, y = GPT(TINY), tokens(), tokens().roll(-1, 1)
    half = y.clone()
    half[:, 6:] = -100
    expected = F.cross_entropy(model(x)[:, :6].flatten(0, 1), y[:, :6].flatten())
    torch.testing.assert_close(model(x, half), expected)


def test_initial_values_are_the_seeds_alone():
    torch.manual_seed(1)
    first = GPT(TINY).state_dict()
    torch.manual_seed(2)
    second = GPT(TINY).state_dict()
    other = GPT(GPTConfig(50, 12, 24, 2, 4, seed=1)).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])


def test_the_first_loss_is_that_of_guessing():
    config = GPTConfig()
    loss = GPT(config)(tokens(config), tokens(config).roll(-1, 1)).item()
    assert abs(loss - math.log(256)) < 0.1, f"loss {loss:.3f}, ln 256 = {math.log(256):.3f}"


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"width \(10\) must be divisible by heads \(3\)"):
        GPT(GPTConfig(width=10, heads=3))
    with pytest.raises(ValueError, match="sequence of 13 does not fit: sequence_length is 12"):
        GPT(TINY)(torch.zeros(1, 13, dtype=torch.long))
