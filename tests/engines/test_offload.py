"""Offload: the same bits, and everything that lasts from step to step counted as `host`, none of it on the device."""

import dataclasses

import pytest
import torch

from minizero import GPT, Zero3
from minizero.accumulate import accumulate
from minizero.memory import Ledger, predict
from tests.support.helpers import SMALL, batch, run, slow, soak

DEEP = dataclasses.replace(SMALL, layers=6)  # one unit is little of it
TOTAL = sum(p.numel() for p in GPT(DEEP).parameters())


def step(comm, dtype=None, micro_batches=1, no_sync=True, **options):
    """Bytes at the end of the second step, the peaks of that step, and what its gradients were."""
    model = Zero3(GPT(DEEP), comm, dtype=dtype, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    window = [batch(10 * comm.rank + i, size=2) for i in range(micro_batches)]
    for _ in range(2):
        with Ledger(model, optimizer) as ledger:
            accumulate(model, window, no_sync=no_sync)
            optimizer.step()
            held = ledger.current
        gradient = torch.cat([shard.grad for shard in model.parameters()])
        optimizer.zero_grad()
    return held, ledger.peak, gradient


@pytest.mark.parametrize("dtype", [None, *slow(torch.bfloat16)])
def test_states_are_on_the_host_and_no_total_contains_them(dtype):
    held, peak, _ = run(2, step, dtype, offload=True)[0]
    states = predict(TOTAL, 2, 3, dtype=dtype or torch.float32)["total"]
    assert held["host"] == pytest.approx(states, rel=0.01) and held["total"] <= 8
    assert all(held[category] == 0 for category in ("parameters", "gradients", "optimizer"))
    _, without, _ = run(2, step, dtype)[0]
    assert without["host"] == 0
    assert peak["optimizer"] == 0 < without["optimizer"]
    before = states - predict(TOTAL, 2, 3)["gradients"]  # of which few are there when the device holds most
    assert peak["total"] <= without["total"] - 0.95 * before


@pytest.mark.parametrize(
    "options", [*soak({"sharding_factor": 2}), {"offload": True}, {"offload": True, "sharding_factor": 2}]
)
@pytest.mark.slow
def test_accumulation_either_way(options):
    """Reduced once or with every micro-batch: one gradient to rounding; the full one is held, or it is not."""
    size = options.get("sharding_factor", 1) * 2
    expected = run(size, step, micro_batches=3)[0][2]
    once, each = (run(size, step, micro_batches=3, no_sync=no_sync, **options)[0] for no_sync in (True, False))
    if "sharding_factor" not in options:
        assert torch.equal(once[2], expected)
    torch.testing.assert_close(each[2], once[2], rtol=1e-4, atol=1e-6)
    assert once[1]["gradients"] >= 4 * TOTAL, "the full gradient waits on the device"
    assert each[1]["gradients"] < 0.9 * 4 * TOTAL, "never whole"
