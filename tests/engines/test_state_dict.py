"""A full state has every name, loads by any of them, and is PyTorch's own under DDP."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from minizero import DDP, checkpoint
from tests.support.helpers import STAGES, exactly
from tests.support.small_models import SHARDED, Blocks, on_ranks, refused, seeded, vectors, wrapped


class Named(Blocks):
    """A tied weight, and a buffer that all blocks share."""

    def __init__(self):
        super().__init__()
        self.blocks[2][2].weight = self.blocks[0][2].weight
        table = torch.arange(3.0)
        for block in self.blocks:
            block.register_buffer("table", table)


@on_ranks(make=seeded(Named))
def test_one_name_of_a_tied_parameter_or_shared_buffer_suffices(model, comm):
    full = model.gather_state_dict()
    assert full.keys() == Named().state_dict().keys()
    for value, gone in ((1.0, 0), (2.0, 2)):
        removed = (f"blocks.{gone}.2.weight", f"blocks.{gone}.table", "blocks.1.table")
        state = {name: torch.full_like(t, value) for name, t in full.items() if name not in removed}
        names = list(state)
        model.load_full_state_dict(state)
        assert list(state) == names and all((t == value).all() for t in model.gather_state_dict().values())
    got = model.gather_state_dict()
    two = got | {"blocks.2.2.weight": got["blocks.0.2.weight"] + 1}
    words = "blocks.0.2.weight, blocks.2.2.weight are one tensor: give one value"
    refused(words, lambda: model.load_full_state_dict(two), error=ValueError)
    diverged = {name: torch.full_like(value, torch.nan) for name, value in got.items()}
    model.load_full_state_dict(diverged)


@on_ranks(SHARDED)
def test_a_state_dict_of_a_part_is_refused(model, comm):
    around, state = nn.Sequential(model), seeded(Blocks)().state_dict()
    saves = (part.state_dict for part in (model, model.module, model.module.blocks[0], around))
    refused(f"{type(model).__name__}: each rank holds a part: call gather_state_dict", *saves)
    for part, given in ((model, {}), (model.module, state), (model.module.out, {}), (around, {})):
        refused(f"{type(model).__name__}: call load_full_state_dict", functools.partial(part.load_state_dict, given))


class Saves(Blocks):
    """Buffers that come late, an extra state, wrapped blocks, and a hook that renames, adds and leaves out."""

    def __init__(self):
        super().__init__(lambda self: setattr(self, "blocks", nn.ModuleList(map(checkpoint_wrapper, self.blocks))))
        self.register_buffer("mean", None)
        self.count = 0
        self.register_state_dict_post_hook(self.rename)

    @staticmethod
    def rename(_, state, prefix, __):
        state.update({f"{prefix}weight": state.pop(f"{prefix}out.weight"), f"{prefix}version": torch.tensor(3)})
        del state[f"{prefix}out.bias"]

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]

    def forward(self, x):
        self.count += 1
        self.mean = torch.ones(2) if self.mean is None else self.mean + 1
        self.register_buffer("seen", self.mean * 2)
        return super().forward(x)


@pytest.mark.parametrize("stage", STAGES)
def test_a_full_state_is_the_modules_own(stage, tmp_path):
    plain = seeded(Saves)()
    plain(vectors(0))
    expected = plain.state_dict()
    assert {"mean", "seen", "_extra_state", "weight", "version", "blocks.0.0.weight"} < expected.keys()

    @wrapped(stage, seeded(Saves))
    def _(model, comm):
        def same(state):
            assert [*state] == [*expected]
            exactly(state, expected)

        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model(vectors(0)).square().mean().backward()
        same(state := model.gather_state_dict())
        checkpoint.save(tmp_path, model, optimizer, 1)
        whole = {"out.bias": torch.zeros(1)} | state  # a hook may leave it out, but loading cannot
        for load in (lambda: model.load_full_state_dict(whole), lambda: checkpoint.load(tmp_path, model, optimizer)):
            optimizer.step()
            model(vectors(0))
            load()
            same(model.gather_state_dict())


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_ddps_state_dict_is_pytorchs(dtype):
    @wrapped(DDP, seeded(Named), dtype=dtype)
    def _(model, comm):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        model(vectors(comm.rank)).square().mean().backward()
        optimizer.step()  # from here to the next forward, 16-bit replicas are old
        full = model.gather_state_dict()

        def is_full(state, before="", after=""):
            """`before` names begin so here, `after` in the whole model's state."""
            expected = {before + name.removeprefix(after): v for name, v in full.items() if name.startswith(after)}
            assert [*state] == [*expected] and {value.dtype for value in state.values()} == {torch.float32}
            exactly({**state}, expected)

        is_full(model.state_dict(), before="module.")
        is_full(model.module.state_dict())
        is_full(model.module.blocks[0].state_dict(), after="blocks.0.")
        if dtype is None:
            assert model.module.state_dict(keep_vars=True)["out.bias"] is model.module.out.bias

        # Values that 16 bits cannot hold: what is loaded must arrive in the masters, and in the next forward.
        target = {name: value + 2.0**-20 for name, value in seeded(Named)().state_dict().items()}
        for load in (
            lambda: model.load_state_dict({f"module.{name}": value for name, value in target.items()}),
            lambda: model.module.load_state_dict(target),
            lambda: nn.Sequential(model).load_state_dict({f"0.module.{n}": value for n, value in target.items()}),
        ):
            model.load_full_state_dict({name: torch.zeros_like(value) for name, value in full.items()})
            assert str(load()) == "<All keys matched successfully>"
            exactly(model.gather_state_dict(), {**target})
            expected = seeded(Named)()
            expected.load_state_dict(target)
            expected.to(dtype)
            assert torch.equal(model(vectors(0)), expected(vectors(0).to(dtype)))

        model.module.out.load_state_dict({"weight": torch.ones(1, 7), "bias": torch.ones(1)})
        assert model.gather_state_dict()["out.weight"].sum() == 7
        given = {"out.bias": torch.zeros(1), "x": torch.zeros(1)}
        missing, unexpected = model.module.load_state_dict(given, strict=False)
        assert "out.weight" in missing and unexpected == ["x"] and model.gather_state_dict()["out.bias"] == 0
        larger = target | {"out.bias": torch.zeros(2)}
        refused("Missing key", lambda: model.module.load_state_dict({}))
        refused("size mismatch for out.bias", lambda: model.module.load_state_dict(larger))
        for module, prefix in ((model, "module."), (model.module, "")):
            load = functools.partial(module.load_state_dict, {prefix + n: value for n, value in target.items()})
            refused("assign=True would replace", functools.partial(load, assign=True), error=ValueError)
