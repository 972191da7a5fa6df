"""Real models whose blocks are run again in backward: the bits of the plain run, under DDP and under stage 3."""

import functools

import pytest
from torch import nn

from minizero.engines.any_model.units import repeated_blocks
from minizero.recompute import Checkpointed, checkpoint
from tests.real.real_models import MODELS, STEPS
from tests.real.real_training import by_engine, nothing, same_bits

pytestmark = pytest.mark.real
VARIANTS = ("DDP", "Zero3", "Zero3, prefetch=0")
NO_SWITCH = ("ResNet-50", "ConvNeXt", "LSTM")  # transformers has none for them


def blocks(module: nn.Module) -> dict[str, nn.Module]:
    return dict(repeated_blocks(module)) or {"lstm": module.lstm}


def counted(change, runs, module):
    """`change`, and note in `runs` whenever a block runs: the first module in it that has no modules itself."""
    for block in blocks(module).values():
        first = next(part for part in block.modules() if not list(part.children()))
        first.register_forward_pre_hook(lambda *_: runs.append(1))
    for part in module.modules():
        if hasattr(part, "config"):
            part.config.use_cache = False  # a cache of keys and values would grow in each run
    change(module)


def switch(function, module):
    """What transformers calls gradient checkpointing, with a function of ours."""
    module._set_gradient_checkpointing(gradient_checkpointing_func=function)


def wrapper(module):
    for path, block in blocks(module).items():
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, Checkpointed(block))


def check(name, variant, reference, change):
    once, twice = [], []
    plain = by_engine(name, 2, "DDP", change=functools.partial(counted, reference, once))
    assert same_bits(by_engine(name, 2, variant, change=functools.partial(counted, change, twice)), plain)
    assert len(twice) == 2 * len(once) and len(once) >= 2 * STEPS


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", MODELS)
def test_checkpointed_blocks_run_twice_and_give_the_same_bits(name, variant):
    check(name, variant, nothing, wrapper)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", [name for name in MODELS if name not in NO_SWITCH])
def test_the_switch_of_transformers_gives_the_same_bits(name, variant):
    """The switch is on in the plain run too, with a function that only calls: T5 computes otherwise with it.

    T5's cross-attention then lets a bias of zeros ask for a gradient, and PyTorch picks another kernel.
    """

    def call(fn, *args, **kwargs):
        return fn(*args, **kwargs)

    check(name, variant, functools.partial(switch, call), functools.partial(switch, checkpoint))
