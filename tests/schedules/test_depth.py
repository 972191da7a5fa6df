"""Memory against depth: the textbook's claims, in bytes that the ledger counts and forwards that the layers count."""

import pytest
import torch
from torch import nn

from minizero.models.gpt import GPT, GPTConfig
from minizero.models.networks import NETWORKS
from minizero.schedules import Stage, depth, fit
from minizero.schedules.depth import equal_layers, gpt_layers, resnet_layers, step, step_in_regions
from tests.support.helpers import slow

PICTURES = torch.randn(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(4, 1, 12, 12, generator=torch.Generator().manual_seed(0))


SMALL = GPTConfig(vocabulary=64, sequence_length=32, width=32, layers=4, heads=2)


def gradients(layers, run):
    nn.Sequential(*layers).zero_grad()
    torch.manual_seed(1)
    run()
    return [parameter.grad for parameter in nn.Sequential(*layers).parameters()]


def test_a_resnet_has_6n_plus_2_layers():
    for n in (1, 3):
        layers = nn.Sequential(*resnet_layers(n))
        convolutions = [m for m in layers.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
        assert len(convolutions) == 6 * n + 1 and isinstance(layers[-1][-1], nn.Linear)
        assert layers[:-1](IMAGES).shape == (4, 32, 3, 3) and layers(IMAGES).shape == (4, 10)


def test_the_chain_of_a_gpt_is_the_gpt():
    tokens = torch.randint(64, (2, 33), generator=torch.Generator().manual_seed(0))
    x, y = tokens[:, :-1], tokens[:, 1:]
    loss = nn.functional.cross_entropy(nn.Sequential(*gpt_layers(SMALL))(x), y.flatten())
    torch.testing.assert_close(loss, GPT(SMALL)(x, y))


# With dropout; with batch norm; with a large tape.
@pytest.mark.parametrize("name", ["alexnet", *slow("resnet", "gpt")])
def test_fit_holds_its_budget(name):
    torch.manual_seed(0)
    layers, x = (gpt_layers(SMALL)[1:-1], torch.randn(128, 32)) if name == "gpt" else (list(NETWORKS[name]()), PICTURES)
    with pytest.raises(ValueError, match="least feasible") as error:
        fit(layers, x, 1)
    least = int(str(error.value).split()[-1])
    expected = gradients(layers, lambda: step(layers, x))
    runs = [lambda: step_in_regions(layers, x, 3)]
    for budget in (least, 1.1 * least, 1.5 * least):
        schedule = fit(layers, x, budget)
        assert depth.held_bytes(step, layers, x, schedule) <= budget + 8
        runs.append(lambda schedule=schedule: step(layers, x, schedule))
    for each in runs:
        assert expected and all(map(torch.equal, expected, gradients(layers, each)))


def test_regions_cost_one_more_forward_and_the_best_size_holds_least():
    layers = equal_layers(7, 4)
    assert [[*region] for region in depth.regions(layers, 3)] == [layers[:3], layers[3:6], layers[6:]]
    ran = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: ran.append(True))
    step_in_regions(layers, torch.ones(2, 4), 3)
    assert len(ran) == 7 + 6  # the last region's tape is built in the first sweep
    # In time, where a backward takes two forwards: +29 %.
    assert depth.in_regions([Stage(1, 2, boundary=1, tape=0)] * 64, 8).time == 192 + 56
    for n, w, best in ((64, 0, 8), (64, 3, 4), (100, 20, 2), (24, 22, 1)):
        peaks = [depth.in_regions([Stage(1, 2, boundary=1, tape=w)] * n, k).peak for k in range(1, n + 1)]
        assert depth.best_region(n, w) == best and peaks[best - 1] <= 1.1 * min(peaks)


def test_seconds_takes_turns_and_the_shortest():
    order = []
    found = depth.seconds({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, repeats=2)
    assert order == ["a", "b"] * 3 and found.keys() == {"a", "b"} and all(value >= 0 for value in found.values())
