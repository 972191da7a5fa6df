"""The simulator's step: the order of events, what hides what, the peak by hand, and properties of any plan."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minizero.simulate import CLUSTERS, Constants, Link, Strategy, gpt, model, simulate
from minizero.simulate.peak import peak_memory

A100 = CLUSTERS["a100-80"]
SMALL = gpt(6, 1024, 16, 512)


def faster(cluster, times=2.0):
    """The same with better links."""
    better = {
        name: Link(link.latency / times, link.bandwidth * times, link.source)
        for name, link in (("inside", cluster.inside), ("between", cluster.between), ("to_host", cluster.to_host))
    }
    return dataclasses.replace(cluster, base_latency=cluster.base_latency / times, **better)


# The step.


def test_a_ring_by_hand():
    cluster = dataclasses.replace(
        A100, base_latency=1.0, inside=Link(0.1, 100.0, ""), between=Link(10.0, 7.0, ""), gpus_per_host=4
    )
    assert cluster.ring(80.0, 4) == pytest.approx(1 + 3 * 0.1 + 3 / 4 * 80 / 100)
    assert cluster.ring(80.0, 8) == pytest.approx(1 + 6 * 0.1 + 10 + 7 / 8 * 80 / 28)  # four network cards at once
    assert cluster.ring(80.0, 2, 4) == pytest.approx(1 + 10 + 1 / 2 * 80 / 7)  # one of each host
    assert cluster.ring(80.0, 1) == 0


def test_no_lane_does_two_things_at_once_and_gathers_come_first():
    step = simulate(SMALL, A100, Strategy(16))
    for lanes in (("compute", "optimizer"), ("all-gather", "reduce-scatter", "all-reduce")):
        spans = sorted(span[2:] for span in step.spans if span[0] in lanes)
        assert all(start >= end for (_, end), (start, _) in zip(spans, spans[1:]))
    gathers = {name: end for lane, name, _, end in reversed(step.spans) if lane == "all-gather"}  # the first of each
    starts = {name: start for lane, name, start, _ in step.spans if name.startswith("forward")}
    assert len(gathers) == 7 and all(starts[f"forward block {i}"] >= gathers[f"block {i}"] for i in range(6))


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_gathers_keep_to_the_prefetch_limit(prefetch):
    step = simulate(SMALL, A100, Strategy(16, prefetch=prefetch, batch_size=64))  # much to hide them under
    starts = {name: start for lane, name, start, _ in reversed(step.spans) if lane == "all-gather"}
    over = {name: end for lane, name, _, end in step.spans if name.startswith("forward")}
    for i in range(prefetch + 1, 6):
        assert starts[f"block {i}"] == over[f"forward block {i - prefetch - 1}"]


def test_prefetch_hides_communication():
    exposed = [simulate(SMALL, A100, Strategy(64, prefetch=ahead, batch_size=16)).exposed_seconds for ahead in (0, 1)]
    assert exposed[1] < exposed[0] / 2
    apart = simulate(SMALL, A100, Strategy(64, overlap=False))
    assert apart.seconds == pytest.approx(sum(end - start for _, _, start, end in apart.spans))


@pytest.mark.parametrize("stage", range(4))
def test_without_communication_a_step_is_its_computation(stage):
    nothing = Link(0.0, float("inf"), "")
    cluster = dataclasses.replace(A100, inside=nothing, between=nothing, base_latency=0.0)
    plan = Strategy(64, stage=stage, batch_size=2, recompute="full")
    step = simulate(SMALL, cluster, plan)
    alone = simulate(SMALL, A100, dataclasses.replace(plan, ranks=1, stage=0))
    forward_and_backward = 2 * SMALL.flops("full") / (312e12 * 0.5)
    adam = 30 * SMALL.parameters / (64 if stage else 1) / 2.039e12
    assert step.exposed_seconds == pytest.approx(0, abs=1e-9)
    assert step.seconds == pytest.approx(forward_and_backward + adam, rel=1e-3)
    assert alone.sent == 0 and alone.seconds == pytest.approx(forward_and_backward + 30 * SMALL.parameters / 2.039e12)


def test_interference_and_jitter_only_slow_down():
    plan = Strategy(64, batch_size=16)
    plain, disturbed = simulate(SMALL, A100, plan), simulate(SMALL, A100, plan, Constants(interference=0.5))
    assert plain.seconds < disturbed.seconds < 1.5 * plain.seconds
    rings = [end - start for lane, _, start, end in plain.spans if lane in ("all-gather", "reduce-scatter")]
    # The first two gathers, which the first block waits for, and the last two reductions run beside nothing.
    assert disturbed.compute_seconds - plain.compute_seconds == pytest.approx(0.5 * sum(rings[2:-2]))
    one_by_one = dataclasses.replace(plan, prefetch=0)
    assert simulate(SMALL, A100, one_by_one, Constants(interference=0.5)).seconds == pytest.approx(
        simulate(SMALL, A100, one_by_one).seconds
    )
    jitter = simulate(SMALL, A100, plan, Constants(jitter=0.1))
    assert jitter.compute_seconds == pytest.approx(1.7 * plain.compute_seconds, rel=0.01)  # 1 + 0.1 (√64 - 1)
    alone = Strategy(1, stage=0)
    assert simulate(SMALL, A100, alone, Constants(jitter=0.1)).seconds == simulate(SMALL, A100, alone).seconds


def test_ddp_reduces_the_gradients_of_two_blocks_at_once():
    """A block has 24 MiB, a bucket is full at 25."""
    spans = simulate(SMALL, A100, Strategy(16, stage=0)).spans
    assert [name for lane, name, *_ in spans if lane == "all-reduce"] == ["block 4", "block 2", "block 0", "root"]


def test_accumulation_reduces_once():
    once, four = (simulate(SMALL, A100, Strategy(16, stage=2, micro_batches=n)) for n in (1, 4))
    assert four.sent == once.sent and four.seconds < 4 * once.seconds
    held = peak_memory(SMALL, Strategy(16, stage=2, micro_batches=4))["gradients"]
    assert held == pytest.approx(4 * SMALL.parameters * (1 + 1 / 16)), "the sum in FP32, and this rank's shard of it"
    in_stage_3 = [simulate(SMALL, A100, Strategy(16, micro_batches=n)).sent for n in (1, 4)]
    gathers = 2 * SMALL.parameters - SMALL.root.parameters
    assert in_stage_3[1] - in_stage_3[0] == pytest.approx(3 * 2 * gathers * 15 / 16, rel=1e-4)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_the_peak_by_hand(prefetch):
    """Of stage 3 in 16 bits, in the first block that runs backward beside another's reduction."""
    root, block = SMALL.root.parameters, SMALL.units[0].parameters
    held = peak_memory(SMALL, Strategy(16, recompute="full", prefetch=prefetch))
    assert held["parameters"] == 2 * (root + (1 + prefetch) * block)
    assert held["gradients"] == pytest.approx(4 * SMALL.parameters / 16 + 2 * (root + 2 * block))
    assert held["optimizer"] == pytest.approx(12 * SMALL.parameters / 16)
    kept = 2 * 512 * 1024 * 4  # the inputs of four blocks; the tape of the fifth is whole, the sixth is over
    assert held["activations"] == kept + SMALL.units[0].activations(2)
    assert held["total"] == pytest.approx(sum(size for name, size in held.items() if name != "total"))


def test_offload_moves_the_states_to_the_host_and_takes_longer():
    here, there = (simulate(SMALL, A100, Strategy(16, offload=offload)) for offload in (False, True))
    assert there.memory["host"] == pytest.approx(16 * SMALL.parameters / 16)
    assert here.memory["total"] - there.memory["total"] == pytest.approx(there.memory["host"])
    copies = [name for lane, name, start, end in there.spans if lane == "copy" and end > start]
    assert copies == ["gradient to host"] * 7 + ["parameters to GPU"]  # six blocks and the root
    assert there.seconds > here.seconds


def test_the_work_is_in_the_units_not_in_the_gpus():
    few, many = (simulate(model("megatron-1t"), CLUSTERS["h100"], Strategy(n, flash=True)) for n in (16, 100_000))
    assert len(few.spans) == len(many.spans)


# Properties.

plans = st.builds(
    Strategy,
    ranks=st.sampled_from([8, 16, 64, 512]),
    stage=st.integers(0, 3),
    batch_size=st.integers(1, 8),
    micro_batches=st.integers(1, 2),
    recompute=st.sampled_from(["none", "selective", "full"]),
    flash=st.booleans(),
    reshard_after_forward=st.booleans(),
    prefetch=st.integers(0, 3),
    overlap=st.booleans(),
)
known_clusters = st.sampled_from([cluster for name, cluster in CLUSTERS.items() if name != "v100"])
constants = st.builds(
    Constants, efficiency=st.floats(0.05, 1), interference=st.floats(0, 0.9), jitter=st.floats(0, 0.01)
)


@settings(max_examples=40, deadline=None)
@given(plans, known_clusters, constants, st.floats(1, 100))
def test_faster_links_are_never_slower(plan, cluster, constant, times):
    before, after = (simulate(SMALL, one, plan, constant) for one in (cluster, faster(cluster, times)))
    assert after.seconds <= before.seconds * (1 + 1e-9)
    assert before.seconds >= before.compute_seconds - 1e-9


@settings(max_examples=40, deadline=None)
@given(plans, st.sampled_from([2, 4]))
def test_more_ranks_and_larger_factors_never_need_more_memory(plan, times):
    more = dataclasses.replace(plan, ranks=plan.ranks * times)
    assert peak_memory(SMALL, more)["total"] <= peak_memory(SMALL, plan)["total"]
    every = [f for f in range(1, plan.ranks + 1) if plan.ranks % f == 0]
    held = [peak_memory(SMALL, dataclasses.replace(plan, stage=3, sharding_factor=f))["total"] for f in every]
    assert held == sorted(held, reverse=True) and held[0] > held[-1]
