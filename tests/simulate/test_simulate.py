"""The simulator's bytes and FLOPs against published tables, formulas, counters and the ledger; and what it refuses."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from minizero import GPT, GPTConfig, Zero3
from minizero.memory import predict_activations
from minizero.simulate import CLUSTERS, MODELS, Strategy, gpt, model, simulate, t5
from minizero.simulate.peak import states
from notebooks.tools.zero import one_step
from tests.support.helpers import STAGES, run

CONFIG = GPTConfig(vocabulary=64, sequence_length=32, width=96, layers=3, heads=2)
SAME = gpt(CONFIG.layers, CONFIG.width, CONFIG.heads, CONFIG.sequence_length, CONFIG.vocabulary)
A100 = CLUSTERS["a100-80"]
SMALL = gpt(6, 1024, 16, 512)


# Exact: published tables, formulas, counted bytes.


@pytest.mark.parametrize(("world", "group"), [(16, 8), (512, 8), (64, 8)])
def test_hybrid_traffic_between_hosts_is_the_papers_formula(world, group):
    """2 M (W - G) / (G W), with M the bytes of the gradients; Zhao et al., 2023, section 3.2.2, corrected."""
    step = simulate(SMALL, A100, Strategy(world, sharding_factor=group))
    gathered = 2 * SMALL.parameters
    assert step.sent_between == pytest.approx(2 * gathered * (world - group) / (group * world), rel=1e-4)
    full = simulate(SMALL, A100, Strategy(world))
    assert step.sent_between < full.sent_between == pytest.approx(full.sent / 8)  # a ring leaves a host at one of 8


SLOW = [(size, stage, torch.bfloat16, {}) for size in (2, 8) for stage in range(4)]
SLOW += [(4, 3, None, options) for options in ({"sharding_factor": 1}, {"sharding_factor": 2})]
SLOW += [(4, 3, None, {"reshard_after_forward": False})]


@pytest.mark.parametrize(
    "world_size, stage, dtype, options",
    [*((4, stage, None, {}) for stage in range(4)), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_bytes_held_and_sent_are_the_engines(world_size, stage, dtype, options):
    options = ({"prefetch": 0} if STAGES[stage] is Zero3 else {}) | options
    shape = (2, CONFIG.sequence_length)
    found = run(world_size, one_step, STAGES[stage], CONFIG, shape, steps=2, dtype=dtype, **options)[0]
    of_plan = {"prefetch": 0, "overlap": False} | options
    plan = Strategy(world_size, stage=stage, batch_size=2, dtype="bfloat16" if dtype else "float32", **of_plan)
    step = simulate(SAME, dataclasses.replace(A100, gpus_per_host=world_size), plan)
    assert found["sent"] == step.sent, "bytes sent are the counted ones, to the byte"
    for category, expected in states(SAME, plan).items():
        held = found["states"] if category == "total" else found["held"][category]
        assert held == pytest.approx(expected, rel=0.01, abs=64), category
    assert 0.8 < found["peak"]["total"] / step.memory["total"] < 1.1  # the peak is an estimate


# Shapes.


def test_parameters_are_those_of_the_real_model():
    assert SAME.parameters == sum(p.numel() for p in GPT(CONFIG).parameters())
    assert SAME.units[0].parameters == sum(p.numel() for p in GPT(CONFIG).blocks[0].parameters())


def test_flops_are_the_counted_ones():
    x = torch.zeros(1, CONFIG.sequence_length, dtype=torch.long)
    with FlopCounterMode(display=False) as forward:
        loss = GPT(CONFIG)(x, x)
    assert forward.get_total_flops() == sum(u.flops for u in (SAME.root, *SAME.units))
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert forward.get_total_flops() + backward.get_total_flops() == SAME.flops()
    assert SAME.flops("full") == SAME.flops() + sum(unit.flops for unit in SAME.units)


def test_activations_are_korthikantis():
    s, b, h, a = 64, 3, 256, 4
    unit = gpt(1, h, a, s, dropout=True).units[0]
    assert b * unit.activations(2) == predict_activations(b, s, h, a, convention="paper")["total"]
    assert b * unit.activations(2) == s * b * h * (34 + 5 * a * s / h)
    assert unit.activations(2, "selective") == unit.activations(2, flash=True) == 34 * s * h
    assert unit.activations(2, "full") == 2 * s * h
    assert SMALL.root.activations(2) == 2 * 512 * (2 * 1024 + 50257)  # of the last norm, the head, and the softmax


PUBLISHED = {  # parameters, in billions
    **{"t5-611m": 0.611, "t5-2.28b": 2.28, "t5-11b": 11.3, "llama3-8b": 8.03, "megatron-175b": 174.6},
    **{"megatron-530b": 529.6, "megatron-1t": 1008, "mpt-1b": 1.31595, "mpt-3b": 2.65184, "mpt-7b": 6.65886},
    **{"mpt-13b": 12.85395, "mpt-30b": 29.97521, "mpt-70b": 64.86244},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_known_models_have_the_published_number_of_parameters(name):
    assert model(name).parameters / 1e9 == pytest.approx(PUBLISHED[name], rel=0.002)


def test_each_half_of_t5_sees_its_own_tokens():
    """Narayanan's 6 FLOPs a parameter and token would count every parameter for both sequences."""
    one = t5(2, 64, 4, 16, 128, 32)
    matrices = sum(unit.parameters for unit in one.units)
    assert sum(unit.flops - unit.core_flops for unit in one.units) == pytest.approx(2 * 32 * matrices, rel=0.02)
    encoder, decoder = one.units[0], one.units[2]  # which has scores with the encoder's tokens, as many as with its own
    assert (decoder.core_flops, decoder.core_kept) == (2 * encoder.core_flops, 2 * encoder.core_kept)


# Bad input.


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Strategy(0), "ranks must be a whole number of at least 1"),
        (lambda: Strategy(8, stage=4), "stage must be one of 0, 1, 2, 3"),
        (lambda: Strategy(8, stage=2, offload=True), "need stage 3"),
        (lambda: Strategy(8, recompute="some"), "recompute must be one of none, selective, full"),
        *[(lambda n=n: gpt(*n), "must be a whole number of at least 1") for n in ((0, 64, 2), (2, 64, 0), (2, 0, 2))],
        (lambda: simulate(SMALL, CLUSTERS["v100"], Strategy(8)), "V100 does not compute in bfloat16"),
        (lambda: Strategy(8, micro_batches=10**9), "micro_batches must be at most 1,000"),
        (lambda: gpt(10**9, 64, 2), "layers must be at most 10,000"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(make, words):
    with pytest.raises(ValueError, match=words) as error:
        make()
    assert "\n" not in str(error.value)


def test_every_known_model_and_cluster_simulates():
    for name in MODELS:
        for cluster in CLUSTERS.values():
            plan = Strategy(8, dtype="float16", recompute="full")
            assert simulate(model(name), cluster, plan).seconds > 0
