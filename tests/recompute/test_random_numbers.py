"""The second run draws the numbers of the first, and leaves the generator as it was."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from minizero.recompute import checkpoint, is_recomputing
from minizero.recompute.replay import Replay
from tests.support.helpers import run
from tests.support.recompute_ways import as_plain, block, plain, vectors


@as_plain("checkpoint", "verified", "selective")
def test_a_generator_among_the_arguments_is_set_back(way):
    def fn(x, options):
        return (x.exp() * torch.rand(8, generator=options["generator"])).sin()

    generator, x = torch.Generator().manual_seed(1), vectors().requires_grad_()
    way(fn, x, {"generator": generator}).sum().backward()
    return [x.grad, generator.get_state()]


def test_a_generator_goes_on_if_that_is_asked_for():
    x = torch.ones(100, requires_grad=True)
    y = checkpoint(lambda x: F.dropout(x.exp()), x, preserve_rng_state=False)
    y.sum().backward()
    assert not torch.equal(x.grad != 0, y != 0), "another mask"


def test_the_generator_is_set_back_also_when_the_second_run_fails():
    def fn(x):
        x = F.dropout(x.exp()).sin()
        if is_recomputing():
            raise KeyError("second")
        return F.dropout(x)

    module = nn.BatchNorm1d(8)
    y = checkpoint(lambda x: fn(module(x)), vectors().requires_grad_()).sum()
    state, statistics = torch.get_rng_state(), module.running_mean.clone()
    with pytest.raises(KeyError, match="second"):
        y.backward()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(module.running_mean, statistics) and module.num_batches_tracked == 1
    assert not is_recomputing()


def numbers(x):
    """Draws in every way: in place, new tensors, a permutation, inside other operators."""
    for p in (0.2, 0.5):
        x = F.dropout(x, p).sin() + torch.native_dropout(x, p, True)[0] + torch.rand(8) + torch.randn_like(x)
        x = x + torch.native_dropout(x, p, False)[0] + torch.native_dropout(x, 1.0, True)[0]  # nothing to draw
    x = x + torch.rand(8, generator=None) + torch.rand_like(x, generator=None) + torch.randint(9, (8,), generator=None)
    x = x + F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)[0] + torch.randint(1, 9, (8,))
    y = x[torch.randperm(5, generator=None)].exp() * torch.normal(0.0, 1.0, (8,))
    return y + x[torch.multinomial(torch.ones(5), 5)].exp()


@pytest.mark.filterwarnings("ignore:World.run. the ranks used torch's generator in a thread")
@pytest.mark.parametrize("inside", [plain, checkpoint])
def test_what_is_drawn_in_a_rank_is_drawn_again_whatever_other_threads_draw(inside):
    """`verify` compares all that the two runs compute."""

    def disturbed(x):
        for _ in range(2):
            ThreadPoolExecutor(1).submit(torch.rand, 1 + is_recomputing()).result()
            x = inside(numbers, x)
        return x

    def work(comm):
        x = vectors().requires_grad_()
        results = [checkpoint(disturbed, x * 1, verify=True) for _ in range(2)]
        sum(results).sum().backward()
        return not torch.equal(*results)  # each call draws anew

    assert run(2, work) == [True, True]


@pytest.mark.parametrize(("draw", "kept"), [(lambda: None, 0), (lambda: torch.rand(1), 1)])
def test_the_generators_state_is_kept_only_where_something_was_drawn(draw, kept):
    """5,056 bytes for each call would add up, and setting it back takes time."""
    replay = Replay(None, [])
    with replay.first_run():
        draw()
    assert len(replay.generators.states) == kept


@pytest.mark.gpu
@as_plain()
def test_on_a_gpu_dropout_repeats_and_the_generator_is_set_back(way):
    module, x = block().cuda(), vectors().cuda().requires_grad_()
    torch.manual_seed(0)
    with torch.autocast("cuda", torch.bfloat16):
        y = way(module, x * 1)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in module.parameters()), torch.rand(3, device="cuda")]
