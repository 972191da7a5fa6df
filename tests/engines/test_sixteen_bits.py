"""Sixteen bits: norms with running statistics compute in FP32, and what is frozen has no master."""

import functools

import pytest
import torch
from torch import nn

from minizero import DDP, Zero2, Zero3, checkpoint
from tests.support.helpers import STAGES, exactly, relative_error, run, slow, train
from tests.support.small_models import SAME_BITS, Blocks, on_ranks, vectors


class Bottleneck(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.BatchNorm2d(8),  # whose input and output the block may write in place
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 4, 1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 8, 3, padding=1, bias=False),
        )
        self.norm = nn.InstanceNorm2d(8, affine=True, track_running_stats=True)

    def forward(self, x):
        x = x + self.convolutions(x)
        assert x.dtype == self.convolutions[2].weight.dtype
        return self.norm(x).relu()


class ResNet(nn.Module):
    def __init__(self, freeze=False):
        super().__init__()
        # Without a bias: the norm takes it away, so its gradient is the rounding of a 0.
        convolution, norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8, affine=False)
        self.stem = nn.Sequential(convolution, norm, nn.ReLU(inplace=True))
        self.layers = nn.Sequential(*(Bottleneck() for _ in range(3)))
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 4)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data.normal_(0, 0.4, generator=generator)
        if freeze:
            self.stem.requires_grad_(False)
            self.layers[1].requires_grad_(False)
            self.layers[2].convolutions.requires_grad_(False)

    def forward(self, x):
        out = self.head(self.norm(self.layers(self.stem(x)).mean((2, 3))))
        return (out.float() - 1).square().mean()


def images(step):
    return [torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(step))]


def by_hand(dtype, freeze):
    """The first loss of one process: the modules in 16 bits, but for the norms, which are given FP32."""
    model = ResNet(freeze)
    for part in model.modules():
        if getattr(part, "running_mean", None) is None:
            for parameter in part.parameters(recurse=False):
                parameter.data = parameter.to(dtype)
        else:
            part.register_forward_pre_hook(lambda _, args: args[0].float())
            part.register_forward_hook(lambda _, __, out: out.to(dtype))
    return model(images(0)[0][:4].to(dtype)).item()


@pytest.mark.accuracy
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("freeze", [False, True])
def test_batch_norms_train_in_all_stages_with_the_same_bits(dtype, freeze):
    start = ResNet().state_dict()
    options = {"make": lambda: ResNet(freeze), "dtype": dtype, "data": images, "clip": 1.0, "lr": 1e-2, "eps": 1e-4}
    (losses, state, _), *others = (run(2, train, engine, 3, **options)[0] for engine in SAME_BITS)
    exactly([other[:2] for other in others], [(losses, state)] * len(others))
    assert losses[0] == by_hand(dtype, freeze)
    for name, parameter in ResNet(freeze).named_parameters():
        assert state[name].dtype == torch.float32
        if parameter.requires_grad:
            assert relative_error({name: state[name]}, {name: start[name]}) > 1e-3
        else:
            in_norm = any(part in name for part in (".norm.", "convolutions.0.", "convolutions.3."))
            assert torch.equal(state[name], start[name] if in_norm else start[name].to(dtype).float()), name


def test_a_norm_that_is_a_unit_itself():
    def work(comm, stage):
        module = ResNet()
        norms = [part for part in module.modules() if isinstance(part, nn.BatchNorm2d) and part.affine]
        model = stage(module, comm, dtype=torch.bfloat16, units=norms)
        model(*images(0)).backward()
        return model.clip_grad_norm_(1.0).item()

    assert len({found for stage in STAGES for found in run(2, work, stage)}) == 1


def running():
    module = nn.Sequential(nn.Linear(4, 4))
    module.register_buffer("running_loss", torch.zeros(()))
    return module


@on_ranks(make=running, dtype=torch.bfloat16)
def test_a_running_average_beside_children_makes_no_norm(model, comm):
    assert model(torch.ones(2, 4)).dtype == torch.bfloat16


def test_shards_are_fp32_whatever_the_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        found = run(2, lambda comm: next(Zero3(nn.Linear(4, 4).float(), comm).parameters()).dtype)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == [torch.float32] * 2


def frozen():
    module = Blocks()
    module.blocks.requires_grad_(False)
    return module


FROZEN = sum(p.numel() for p in frozen().blocks.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float16)])
def test_frozen_parameters_cost_two_bytes_and_are_saved_as_fp32(tmp_path, dtype):
    def work(comm, engine):
        model = engine(frozen(), comm, dtype=dtype)
        tensors = [t for unit in model.units if not unit.trains for t in (unit.replica, unit.master, *unit.shards)]
        held = sum({s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before, output = model.gather_state_dict(), model(vectors(0))
        checkpoint.save(tmp_path / "state", model, optimizer, 1)
        model.load_full_state_dict({name: 0 * value for name, value in before.items()})
        zero = model(vectors(0))
        checkpoint.load(tmp_path / "state", model, optimizer)
        assert not torch.equal(zero, output) and torch.equal(model(vectors(0)), output)
        after = model.gather_state_dict()
        assert all(torch.equal(after[name], value) and value.dtype == torch.float32 for name, value in before.items())
        assert torch.equal(before["blocks.0.0.weight"], before["blocks.0.0.weight"].to(dtype).float())
        return held

    for engine, share in ((DDP, 1), (Zero2, 1), (Zero3, 2), (functools.partial(Zero3, offload=True), 2)):
        assert run(2, work, engine) == [2 * FROZEN // share] * 2, engine
