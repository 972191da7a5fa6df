"""A full state has every name, loads by any of them, and is PyTorch's own under DDP."""

import pytest
import torch
from torch import nn

from minizero import DDP, Zero2
from tests.support.helpers import STAGES
from tests.support.small_models import SHARDED, Blocks, seeded, vectors, wrapped


def test_shared_buffers_have_all_their_names():
    class Shared(Blocks):
        def __init__(self):
            super().__init__()
            table = torch.arange(3.0)
            for block in self.blocks:
                block.register_buffer("table", table)

    @wrapped(Zero2, seeded(Shared))
    def names(model, comm):
        state = model.gather_state_dict()
        model.load_full_state_dict(state)
        return state.keys()

    assert names == Shared().state_dict().keys()


@pytest.mark.parametrize("stage", STAGES)
def test_one_name_of_a_tied_parameter_or_shared_buffer_suffices(stage):
    class Tied(Blocks):
        def __init__(self):
            super().__init__()
            self.blocks[2][2].weight = self.blocks[0][2].weight
            table = torch.zeros(3)
            for block in self.blocks:
                block.register_buffer("table", table)

    @wrapped(stage, seeded(Tied))
    def _(model, comm):
        full = model.gather_state_dict()
        for value, gone in ((1.0, 0), (2.0, 2)):
            removed = (f"blocks.{gone}.2.weight", f"blocks.{gone}.table", "blocks.1.table")
            state = {name: torch.full_like(t, value) for name, t in full.items() if name not in removed}
            names = list(state)
            model.load_full_state_dict(state)
            assert list(state) == names and all((t == value).all() for t in model.gather_state_dict().values())
        got = model.gather_state_dict()
        with pytest.raises(ValueError, match="blocks.0.2.weight, blocks.2.2.weight are one tensor: give one value"):
            model.load_full_state_dict(got | {"blocks.2.2.weight": got["blocks.0.2.weight"] + 1})
        diverged = {name: torch.full_like(value, torch.nan) for name, value in got.items()}
        model.load_full_state_dict(diverged)


@pytest.mark.parametrize("stage", SHARDED)
def test_a_state_dict_of_a_part_is_refused(stage):
    @wrapped(stage)
    def _(model, comm):
        for module in (model, model.module, model.module.blocks[0], nn.Sequential(model)):
            with pytest.raises(RuntimeError, match=f"{stage.__name__}: each rank holds a part: call gather_state_dict"):
                module.state_dict()
        state = seeded(Blocks)().state_dict()
        for module, given in ((model, {}), (model.module, state), (model.module.out, {}), (nn.Sequential(model), {})):
            with pytest.raises(RuntimeError, match=f"{stage.__name__}: call load_full_state_dict"):
                module.load_state_dict(given)


class Named(Blocks):
    """A tied weight and a buffer."""

    def __init__(self):
        super().__init__()
        self.blocks[2][2].weight = self.blocks[0][2].weight
        self.register_buffer("table", torch.arange(3.0))


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_ddps_state_dict_is_pytorchs(dtype):
    @wrapped(DDP, seeded(Named), dtype=dtype)
    def _(model, comm):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        model(vectors(comm.rank)).square().mean().backward()
        optimizer.step()  # from here to the next forward, 16-bit replicas are old
        full = model.gather_state_dict()

        def same(state, prefix):
            names = [name for name in full if name.startswith(prefix)]
            assert [*state] == [name.removeprefix(prefix) for name in names]
            for name, value in zip(names, state.values(), strict=True):
                assert value.dtype == full[name].dtype == torch.float32 and torch.equal(value, full[name]), name

        same({name.removeprefix("module."): value for name, value in model.state_dict().items()}, "")
        assert [*model.state_dict()] == [f"module.{name}" for name in full]
        same(model.module.state_dict(), "")
        same(model.module.blocks[0].state_dict(), "blocks.0.")
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
            got = model.gather_state_dict()
            assert all(torch.equal(got[name], value) for name, value in target.items())
            expected = seeded(Named)()
            expected.load_state_dict(target)
            expected.to(dtype)
            assert torch.equal(model(vectors(0)), expected(vectors(0).to(dtype)))

        model.module.out.load_state_dict({"weight": torch.ones(1, 7), "bias": torch.ones(1)})
        assert model.gather_state_dict()["out.weight"].sum() == 7
        missing, unexpected = model.module.load_state_dict(
            {"out.bias": torch.zeros(1), "x": torch.zeros(1)}, strict=False
        )
        assert "out.weight" in missing and unexpected == ["x"] and model.gather_state_dict()["out.bias"] == 0
        for wrong, message in (
            ({}, "Missing key"),
            (target | {"out.bias": torch.zeros(2)}, "size mismatch for out.bias"),
        ):
            with pytest.raises(RuntimeError, match=message):
                model.module.load_state_dict(wrong)
        for module, prefix in ((model, "module."), (model.module, "")):
            with pytest.raises(ValueError, match="assign=True would replace"):
                module.load_state_dict({prefix + name: value for name, value in target.items()}, assign=True)
