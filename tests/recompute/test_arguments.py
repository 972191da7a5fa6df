"""Arguments and results may have any structure, and options any name."""

import collections
import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from minizero.recompute import Checkpointed, RecomputeMismatch, checkpoint
from tests.support.recompute_ways import as_plain, selective, vectors

Pair = collections.namedtuple("Pair", "left right")


@as_plain("checkpoint", "verified", "selective")
def test_tensors_are_found_wherever_they_are(way):
    def fn(pair, *rest, table, nothing=None, scale=1.0, name="", factors=None):
        kinds = type(pair), type(table), nothing, scale, name, type(factors["list"]), weight is rest[1]
        assert kinds == (Pair, collections.OrderedDict, None, 0.5, "fn", list, True)  # in both runs
        x = pair.left * table["w"] + pair.right[0] * scale + rest[0] * rest[1] + factors["list"][0] + table["n"]
        return {"y": torch.tanh(x), "more": [x.argmax(), (x * 2, None, "text")]}, x.detach()

    weight, x = nn.Parameter(torch.ones(8)), vectors().requires_grad_()
    pair = Pair(x * 1, (x * 2, "b"))
    table = collections.OrderedDict(w=x * 3, n=4, c={"deep": (x,)})
    factors = collections.defaultdict(list, list=[x * 5])
    out, detached = way(fn, pair, x, weight, table=table, scale=0.5, name="fn", factors=factors)
    (out["y"].sum() + out["more"][1][0].square().sum()).backward()
    return [x.grad, weight.grad, out["more"][0], detached]


class Output(dict):
    """As Hugging Face's: its items are attributes too, and it refuses `update`."""

    def update(self, *_):
        raise NotImplementedError

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        setattr(self, key, value)


@as_plain("checkpoint")
def test_a_dict_that_keeps_its_items_as_attributes_too(way):
    output, x = Output(), vectors().requires_grad_()
    output["hidden"] = x * 2
    way(lambda output: (output.hidden * output["hidden"]).sin(), output).sum().backward()
    return [x.grad, output.hidden]


def test_an_object_with_tensors_passes_as_it_is():
    x = vectors().requires_grad_()
    checkpoint(lambda b: SimpleNamespace(x=b.x.exp()), SimpleNamespace(x=x)).x.sum().backward()
    assert torch.equal(x.grad, vectors().exp())
    opaque = checkpoint(lambda x: iter([x.exp()]), x)  # we cannot look inside, and do not complain
    next(opaque).sum().backward()
    assert torch.equal(x.grad, 2 * vectors().exp())


@as_plain("checkpoint", "verified", "selective")
def test_a_tensor_that_comes_twice_is_one_tensor(way):
    """Attention takes another path where its queries, keys and values are one tensor."""
    torch.manual_seed(0)
    attention, x = nn.MultiheadAttention(8, 2, batch_first=True), vectors()[None].requires_grad_()
    way(lambda *qkv: attention(*qkv)[0], x * 1, x, x).sum().backward()
    h = x * 1
    way(attention, h, h, value=h)[0].square().sum().backward()
    return [x.grad]


@as_plain("checkpoint", "verified", "selective")
def test_a_tuple_that_is_made_in_a_way_of_its_own(way):
    """And a cell writes into a part of its product, which has its own version."""
    torch.manual_seed(0)
    packed = nn.utils.rnn.pack_padded_sequence(vectors()[:, None].repeat(1, 2, 1), [5, 3])
    network = nn.GRU(8, 8)
    way(network, packed)[0].data.square().sum().backward()
    return [p.grad for p in network.parameters()]


def test_the_wrapper_verifies():
    module, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), vectors()
    y = Checkpointed(module, verify=True)(x).sum()
    with torch.no_grad():
        module[0].weight.mul_(2)
    with pytest.raises(RecomputeMismatch, match="aten::addmm, gave other values"):
        y.backward()


def test_all_else_of_the_wrapper_is_the_blocks():
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    block.kind = "full"
    wrapped = pickle.loads(pickle.dumps(copy.deepcopy(Checkpointed(block))))
    block = wrapped.module
    # Read, as a container too.
    assert (wrapped.kind, wrapped.verify) == ("full", False) and (len(wrapped), [*wrapped]) == (2, [*block])
    assert wrapped[1:][0] is wrapped[-1] is block[1] and block[0] in wrapped
    assert Checkpointed(nn.Tanh()) and not Checkpointed(nn.Sequential())  # as without
    with pytest.raises(AttributeError, match="'Sequential' object has no attribute 'downsample'"):
        wrapped.downsample  # noqa: B018
    with pytest.raises(TypeError, match="'Linear' has no len"):
        len(Checkpointed(block[0]))
    # Written, registered, deleted.
    wrapped.training, wrapped[1] = False, nn.GELU()
    wrapped.register_buffer("mask", torch.ones(4))
    wrapped.register_parameter("scale", nn.Parameter(torch.ones(4)))
    wrapped.add_module("more", nn.ReLU())
    wrapped.verify = True
    del wrapped.kind, wrapped[0]
    assert [*map(type, block)] == [nn.GELU, nn.ReLU] and not block.training and block.mask.shape == block.scale.shape
    assert not hasattr(block, "kind") and not hasattr(block, "verify")
    assert list(wrapped._modules) == ["module"] and list(wrapped.state_dict()) == ["module.scale", "module.mask"]
    wrapped.train()
    wrapped.module = nn.Dropout()
    wrapped.p = 0.0
    assert block.training and wrapped.verify and type(wrapped.module) is nn.Dropout and wrapped.module.p == 0.0


def test_names_of_options_belong_to_the_function_too():
    class Scale(nn.Module):
        def forward(self, x, verify=1.0, preserve_rng_state=1.0):
            return x * verify * preserve_rng_state

    x = vectors().requires_grad_()
    assert torch.equal(Checkpointed(Scale())(x, verify=2.0, preserve_rng_state=3.0), x * 6)
    assert torch.equal(checkpoint(lambda x, fn: x * fn, x, fn=2.0), x * 2)
    assert torch.equal(selective(lambda x, keep, fn: x * keep * fn, x, keep=2.0, fn=3.0), x * 6)


@pytest.mark.parametrize("uses", [(0,), (1,), (0, 1)])
@as_plain("checkpoint")
def test_several_outputs_some_used_some_without_gradient(way, uses):
    def fn(x):
        h = x.exp()
        return h, h.sin(), h.argmax(-1), h.detach()

    x = vectors().requires_grad_()
    outputs = way(fn, x)
    assert [y.requires_grad for y in outputs] == [True, True, False, False]
    sum(outputs[i].sum() for i in uses).backward()
    return [x.grad]
