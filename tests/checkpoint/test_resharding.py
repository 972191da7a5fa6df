"""What was saved is read by others: other stages, world sizes, factors, units, groups; and training goes on."""

import threading

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from minizero import DDP, GPT, RankFailed, Zero1, Zero2, Zero3
from minizero.checkpoint import CheckpointError, load, save
from tests.support.checkpoints import error_of, full_states, scrambled, wrap
from tests.support.helpers import SMALL, run, same, slow, steps

CASES = [(DDP, torch.bfloat16), (Zero3, None)]
CASES += slow((DDP, None), (Zero1, None), (Zero2, torch.bfloat16), (Zero3, torch.bfloat16))


@pytest.mark.parametrize("stage, dtype", CASES)
def test_training_goes_on_bit_for_bit(stage, dtype, tmp_path):
    def job(comm):
        model, optimizer = wrap(comm, stage, dtype=dtype)
        steps(model, optimizer, range(2))
        save(tmp_path / "new" / "folder", model, optimizer, 2)
        expected = steps(model, optimizer, range(2, 3)), full_states(model, optimizer)
        again, optimizer = wrap(comm, stage, scrambled, dtype=dtype, lr=123.0)
        assert load(str(tmp_path / "new" / "folder"), again, optimizer) == 2
        return expected, (steps(again, optimizer, range(2, 3)), full_states(again, optimizer))

    for (losses, states), (losses_again, states_again) in run(2, job):
        assert losses == losses_again
        assert same(states, states_again)
        assert len(states) > 3 * len(GPT(SMALL).state_dict())


class Odd(nn.Module):
    """What makes cuts hard: parameters smaller than the world, without dimensions, tied, frozen, unused; buffers.

    And it counts its batches, beside its buffers.
    """

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.inside, self.outside = nn.Linear(3, 5, bias=False), nn.Linear(5, 5)
        self.tied, self.frozen, self.unused = nn.Linear(5, 5), nn.Linear(5, 3), nn.Linear(2, 1)
        self.norm = nn.BatchNorm1d(5)
        self.scale, self.seen = nn.Parameter(torch.tensor(1.5)), 0
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3, generator=generator)
        self.tied.weight = self.outside.weight
        self.frozen.requires_grad_(False)

    def get_extra_state(self):
        return torch.tensor(self.seen)

    def set_extra_state(self, state):
        self.seen = state.item()

    def forward(self, x):
        self.seen += 1
        x = torch.tanh(self.norm(self.inside(x)))
        return (self.frozen(self.tied(self.outside(x))) * self.scale - 1).square().mean()


class OnlyThis(torch.optim.Optimizer):
    """An optimizer as a student writes it: numbers among its states, which it has from the beginning."""

    elementwise = True

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        for p in self.param_groups[0]["params"]:
            self.state[p].update(steps=0, decay=1.0, mean=torch.zeros_like(p))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["steps"] += 1
                state["decay"] *= 0.9
                state["mean"].mul_(0.9).add_(p.grad)
                p.sub_(state["mean"] / (1 - state["decay"]), alpha=group["lr"])


def odd_batch(step):
    return (torch.randn(12, 3, generator=torch.Generator().manual_seed(step)),)


@pytest.mark.parametrize(
    "optimizer, options",
    [
        (torch.optim.Adam, {"amsgrad": True, "fused": True}),
        (OnlyThis, {}),
        *slow((torch.optim.SGD, {}), (torch.optim.Adagrad, {}), (torch.optim.ASGD, {})),
    ],
)
def test_odd_models_and_any_elementwise_optimizer(optimizer, options, tmp_path):
    def job(comm, stage, factor, at):
        model, optimizer_here = wrap(comm, stage, Odd, optimizer, factor=factor, **options)
        if at:
            with torch.no_grad():
                for tensor in model.module.buffers():
                    tensor.fill_(99)
            assert load(tmp_path, model, optimizer_here) == at
            assert model.module.seen == at
        arrived = full_states(model, optimizer_here)
        kinds = [{k: type(v) for k, v in optimizer_here.state.get(p, {}).items()} for p in model.parameters()]
        steps(model, optimizer_here, range(at, at + 2), odd_batch)
        save(tmp_path, model, optimizer_here, at + 2)
        return arrived, full_states(model, optimizer_here), kinds, model.module.passing.tolist()

    left, places = None, [(DDP, 2, None), (Zero2, 1, None), (Zero3, 4, 2), (Zero1, 3, None), (Zero3, 2, 1)]
    for at, (stage, world_size, factor) in enumerate(places):
        results = run(world_size, job, stage, factor, 2 * at)
        for arrived, _, kinds, passing in results:
            assert left is None or same(arrived, left), (stage, world_size)  # bit for bit
            assert passing == ([99, 99] if at else [0, 0])
            if at and optimizer is OnlyThis:
                assert {"steps": int, "decay": float, "mean": torch.Tensor} in kinds
        left = results[0][1]
    if optimizer is OnlyThis:
        assert left["scale/steps"] == 10


def test_units_groups_and_dtype_may_change(tmp_path):
    def by_size(name, parameter):
        return parameter.dim() > 1

    def saves(comm):
        model = Zero2(GPT(SMALL), comm, units=[], group_by=by_size)
        groups = model.parameter_groups()
        parts = [{"params": groups[large], "weight_decay": 0.5 * large} for large in (True, False)]
        optimizer = torch.optim.AdamW(parts, lr=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        steps(model, optimizer, range(2))
        scheduler.step()
        save(tmp_path, model, optimizer, 2)
        return full_states(model, optimizer)

    def loads(comm, left):
        def group(name, parameter):
            return "embeddings" if "positions" in name else by_size(name, parameter)

        model = Zero3(scrambled(), comm, group_by=group)
        groups = model.parameter_groups()  # three, in another order, one of them empty on some ranks
        parts = [{"params": groups[group]} for group in (False, "embeddings", True)]
        optimizer = torch.optim.AdamW(parts, lr=torch.tensor(1.0))
        assert load(tmp_path, model, optimizer) == 2 and same(full_states(model, optimizer), left)
        assert [each["weight_decay"] for each in optimizer.param_groups] == [0.0, 0.5, 0.5]
        rates = [each["lr"] for each in optimizer.param_groups]
        assert all(isinstance(rate, torch.Tensor) and rate == torch.tensor(5e-4) for rate in rates)
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
        half = Zero1(scrambled(), comm, dtype=torch.bfloat16, group_by=by_size)
        groups = half.parameter_groups()
        other = torch.optim.AdamW([{"params": groups[True]}, {"params": groups[False]}])
        load(tmp_path, half, other)
        assert same(full_states(half, other), left)
        error = error_of(load, tmp_path, *wrap(comm, Zero3))
        assert isinstance(error, CheckpointError) and "groups [0, 1] of the checkpoint" in str(error)

    run(3, loads, run(2, saves)[0])


@pytest.mark.parametrize("stage, world_size, factor", [(Zero1, 3, None), (Zero3, 4, 2), *slow((DDP, 4, None))])
def test_every_element_is_written_once_and_read_only_where_it_is_held(stage, world_size, factor, tmp_path, monkeypatch):
    def job(comm):
        model, optimizer = wrap(comm, stage, factor=factor)
        steps(model, optimizer, range(1))
        save(tmp_path, model, optimizer, 1)

    run(world_size, job)
    total = 3 * sum(p.numel() for p in GPT(SMALL).parameters())  # with both moments
    (folder,) = tmp_path.glob("shards*")
    files = {file.name: sum(t.numel() for key, t in load_file(file).items() if ":" in key) for file in folder.iterdir()}
    assert files.keys() == {f"rank-{rank}.safetensors" for rank in range(world_size)}
    assert sum(files.values()) == total and max(files.values()) - min(files.values()) <= 4 * 3 * world_size  # padding

    read = [0, 0, 0]

    class Counted:
        """A file that counts which rank reads how many elements."""

        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def get_slice(self, key):
            return Counted(self.file.get_slice(key))

        def __getitem__(self, where):
            read[int(threading.current_thread().name.split()[1])] += where.stop - where.start
            return self.file[where]

    monkeypatch.setattr("minizero.checkpoint.resharding.safe_open", lambda *a, **k: Counted(safe_open(*a, **k)))
    run(3, lambda comm: load(tmp_path, *wrap(comm, Zero3)))
    assert sum(read) == total and max(read) - min(read) <= 3 * 3 * 4


def test_states_of_one_shard_must_be_of_one_step(tmp_path):
    """Parameters that have been stepped differently often need a `group_by` that keeps them apart."""

    def saves(comm):
        model = DDP(nn.Linear(3, 3), comm)
        optimizer = torch.optim.AdamW(model.parameters())
        for shards in ([0, 1], [1]):
            model(torch.ones(1, 3)).sum().backward()
            for i, shard in enumerate(model.parameters()):
                shard.grad = shard.grad if i in shards else None
            optimizer.step()
            optimizer.zero_grad()
        save(tmp_path, model, optimizer, 2)

    def loads(comm, group_by):
        model = Zero3(nn.Linear(3, 3), comm, group_by=group_by)
        optimizer = torch.optim.AdamW(model.parameters())
        before = model.gather_state_dict()
        error = error_of(load, tmp_path, model, optimizer)
        assert (error is None) != same(before, model.gather_state_dict())
        return error, {name: float(optimizer.state[p]["step"]) for name, p in model.named_parameters() if error is None}

    run(2, saves)
    for error, _ in run(2, loads, None):
        assert isinstance(error, CheckpointError) and "has not been stepped as often as" in str(error)
    for found in run(2, loads, lambda name, parameter: name):  # rank 0's shard of the bias is empty, and stepped, too
        assert found == (None, {"root.weight": 1.0, "root.bias": 2.0})


def test_what_no_file_could_give_back_is_named(tmp_path):
    class Extra(nn.Linear):
        state = torch.ones(2)

        def get_extra_state(self):
            return self.state

        def set_extra_state(self, state):
            self.state = state

    def through_a_file(comm, group, state, extra=len):
        model = Zero3(Extra(3, 3), comm)
        model.module.state = extra
        shards = list(model.parameters())
        optimizer = torch.optim.SGD([{"params": shards, **group}], lr=np.float32(0.5))
        optimizer.state |= {state: {}} if isinstance(state, int) else {shards[0]: {state: torch.zeros_like(shards[0])}}
        save(tmp_path, model, optimizer, 1)
        optimizer.param_groups[0] |= {"lr": 0.0, "foreach": True}
        model.module.state = None
        load(tmp_path, model, optimizer)
        return optimizer.param_groups[0]["lr"], model.module.state

    found = run(2, through_a_file, {"betas": (0.5, [True, None])}, "kept", {"seen": (1, "two")})
    assert found == [(0.5, {"seen": (1, "two")})] * 2
    for group, state, words in (
        ({"of": {1: 2}}, "kept", "SGD has 'of'"),
        ({"decay": len}, "kept", "SGD has 'decay'"),
        ({"of": {"a": len}}, "kept", "SGD has 'of'"),
        ({"of": np.zeros(2)}, "kept", "SGD has 'of'"),
        ({}, "parameter", "SGD has 'parameter'"),
        ({}, "a/b", "SGD has 'a/b'"),
        ({}, 4711, "SGD has 4711: a checkpoint keeps"),
        ({}, "kept", "_extra_state is a builtin_function_or_method: let it be of tensors"),
    ):
        with pytest.raises(RankFailed, match=words):
            run(2, through_a_file, group, state)
