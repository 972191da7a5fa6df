"""Several ranks on one GPU: all stages and options the same bits, in 32 and 16 bits; one rank of NCCL."""

import pytest
import torch

from minizero import DDP, GPT, GPTConfig, World, Zero3
from minizero.accumulate import accumulate
from minizero.checkpoint import load, save
from minizero.ranks.collectives import all_reduce
from minizero.ranks.launch import torchrun
from precision import DynamicLossScaler, StaticLossScaler
from tests.gpu.device import CUDA, DEVICE, marks, needs_gpu, size
from tests.support.helpers import STAGES, batch

pytestmark = marks
CONFIG = GPTConfig(vocabulary=64, sequence_length=16, width=size(256, 32), layers=size(3, 2), heads=2)
RANKS, STEPS = size(4, 2), size(20, 3)


@pytest.fixture(autouse=True)
def same_bits_every_time():
    """Some of a GPU's operators add up in whatever order their threads come by, unless they are told not to."""
    torch.use_deterministic_algorithms(CUDA, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def run(fn, *args, ranks=RANKS, **kwargs):
    return World(ranks, DEVICE, timeout=120).run(fn, *args, **kwargs)


def train(comm, make, dtype=None, scaler=None, config=CONFIG, steps=STEPS):
    """Losses, parameters at the end, and the scales, of a loop like everybody's."""
    model = make(GPT(config), comm, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = scaler and scaler(combine=lambda flag: all_reduce(flag, comm, op="max"))
    losses, scales = [], []
    for step in range(steps):
        x, y = (part.chunk(comm.size)[comm.rank].to(comm.device) for part in batch(step, config=config))
        loss = model(x, y)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        model.clip_grad_norm_(1.0)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.gather_state_dict(), scales


def with_options(**options):
    return lambda module, comm, **more: Zero3(module, comm, **options, **more)


WAYS = {
    **{stage.__name__: stage for stage in STAGES[1:]},
    "kept": with_options(reshard_after_forward=False),
    "nothing ahead": with_options(prefetch=0),
    "two ahead": with_options(prefetch=2),
}
OFFLOAD = {"offload": with_options(offload=True), "offload, nothing ahead": with_options(offload=True, prefetch=0)}


@pytest.mark.parametrize("dtype", size([None, torch.float16, torch.bfloat16], [torch.float16]))
@pytest.mark.parametrize("attention", ["naive", "flash"])
def test_every_way_to_shard_trains_the_same_bits(dtype, attention):
    config = GPTConfig(**(vars(CONFIG) | {"attention": attention}))
    expected = run(train, DDP, dtype, config=config)
    assert all(state.device.type == DEVICE for state in expected[0][1].values())
    assert was_trained(expected[0][1])
    for name, make in WAYS.items():
        assert_same(run(train, make, dtype, config=config), expected, name)
    # Under offload AdamW runs on the CPU, which rounds in its own way: its bits are the same among themselves.
    offloaded = {name: run(train, make, dtype, config=config) for name, make in OFFLOAD.items()}
    assert_same(*offloaded.values(), "offload, nothing ahead")
    for rank, other in zip(offloaded["offload"], expected):
        assert rank[0] == pytest.approx(other[0], rel=1e-5 if dtype is None else 1e-2)
        assert was_trained(rank[1])


def assert_same(found, expected, name):
    """The same losses and parameters on every rank, to the bit."""
    for rank, other in zip(found, expected, strict=True):
        assert rank[0] == other[0], f"{name}: other losses"
        assert all(torch.equal(rank[1][n].cpu(), other[1][n].cpu()) for n in other[1]), f"{name}: other bits"


def was_trained(state):
    """Steps of 1e-3 have moved the weights."""
    before = GPT(CONFIG).state_dict()
    return all((state[name].cpu() - before[name]).abs().max() > 1e-3 for name in before)


def test_hybrid_sums_in_another_order_and_its_groups_hold_the_same_bits():
    expected, found = run(train, DDP, ranks=4), run(train, with_options(sharding_factor=2), ranks=4)
    for rank, other in zip(found, expected):
        assert rank[0] == pytest.approx(other[0], rel=1e-5)
        assert all(torch.equal(rank[1][n].cpu(), found[0][1][n].cpu()) for n in rank[1])  # ranks may share no card


def test_fp16_with_a_scaler_skips_on_every_rank_or_on_none():
    """The first scale overflows, for certain: it is halved until the gradients fit."""
    scaler = lambda combine: DynamicLossScaler(init_scale=2.0**24, combine=combine)  # noqa: E731
    results = [run(train, stage, torch.float16, scaler, steps=STEPS + 12) for stage in (DDP, Zero3)]
    for rank in (*results[0], *results[1]):
        assert rank[2] == results[0][0][2]
    assert_same(*results, "Zero3")
    assert results[0][0][2][-1] < 2.0**24
    fixed = run(train, Zero3, torch.float16, lambda combine: StaticLossScaler(256.0, combine=combine))
    assert was_trained(fixed[0][1])


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recompute_gives_the_same_bits(recompute):
    again = run(train, Zero3, ranks=2, config=GPTConfig(**(vars(CONFIG) | {"recompute": recompute})))
    assert_same(again, run(train, Zero3, ranks=2), recompute)


def two_steps(comm, folder, stage, resume):
    """The state after both; what there is between them is saved, or begun with."""
    model = stage(GPT(CONFIG), comm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if not resume:
        finish(model, optimizer, 0)
        save(folder, model, optimizer, 1)
    finish(model, optimizer, load(folder, model, optimizer) if resume else 1)
    return model.gather_state_dict()


def finish(model, optimizer, step):
    """A step in two micro-batches, whose inputs lie on the CPU."""
    x, y = (part.chunk(model.comm.size)[model.comm.rank] for part in batch(step, config=CONFIG))
    accumulate(model, zip(x.chunk(2), y.chunk(2)))
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_goes_on_at_another_stage(stage, tmp_path):
    expected, found = (run(two_steps, tmp_path, *how) for how in ((Zero3, False), (stage, True)))
    for rank, other in zip(found, expected):
        assert all(torch.equal(rank[name], other[name]) for name in other)


def buffers_after_a_step(comm, stage):
    """Of a model that lies on the CPU, with its inputs, until it is wrapped."""
    model = stage(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)), comm)
    model(torch.randn(4, 8)).sum().backward()
    return [buffer.device for buffer in model.module.buffers()], comm.device


@pytest.mark.parametrize("stage", STAGES)
def test_buffers_lie_on_the_device_of_their_rank(stage):
    for devices, device in run(buffers_after_a_step, stage, ranks=2):
        assert len(devices) == 3 and set(devices) == {device}


def offloaded(comm):
    """Where an offloaded engine's memory is after two steps."""
    model = Zero3(GPT(CONFIG), comm, offload=True)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        x, y = (part.chunk(comm.size)[comm.rank].to(comm.device) for part in batch(step, config=CONFIG))
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()
    tensors = [t for p in model.parameters() for t in (p, p.grad, *optimizer.state[p].values())]
    return {t.device.type for t in tensors}, [p.is_pinned() and p.grad.is_pinned() for p in model.parameters()]


def test_offload_keeps_shards_and_gradients_in_pinned_memory():
    for devices, pinned in run(offloaded):
        assert devices == {"cpu"} and set(pinned) == {DEVICE == "cuda"}


def test_a_gradient_that_no_sync_shows_on_the_host_is_not_written_to():
    """There it is a copy of the sum on the card, which a write would not reach."""

    def use(comm):
        model = Zero3(GPT(CONFIG), comm, offload=True)
        x, y = (part.to(comm.device) for part in batch(0, config=CONFIG))
        for written in (False, True):
            with model.no_sync():
                model(x, y).backward()
            if written:
                next(model.parameters()).grad.mul_(0.5)
                with pytest.raises(RuntimeError, match="written to between backwards"):
                    model(x, y).backward()
            else:
                model(x, y).backward()
        return True

    assert all(run(use))


@needs_gpu("memory that a card's allocator counts")
def test_between_steps_offload_takes_the_states_off_the_card():
    _, resident, offloaded = (run(held_between_steps, offload, ranks=1)[0] for offload in (False, False, True))
    states = 12 * sum(p.numel() for p in GPT(CONFIG).parameters())  # shards, and Adam's two
    assert resident - offloaded == pytest.approx(states, rel=0.05)


def held_between_steps(comm, offload):
    """Bytes of the card that one rank's model and optimizer keep; the first time also cuBLAS's workspace."""
    before = torch.cuda.memory_allocated()
    model = Zero3(GPT(CONFIG), comm, offload=offload)
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = (part.to(comm.device) for part in batch(0, config=CONFIG))
    model(x, y).backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() - before


def one_rank_trains(comm):
    return comm.device.type, str(torch.distributed.get_backend_config()), was_trained(train(comm, Zero3)[1])


def test_one_rank_of_torchrun():
    """Over NCCL, on a GPU."""
    ((device, backend, trained),) = torchrun(one_rank_trains, 1)
    assert device == DEVICE and ("nccl" in backend) == (DEVICE == "cuda") and trained
