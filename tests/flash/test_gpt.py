"""The GPT with each attention: the same numbers, fewer bytes."""

import dataclasses

import pytest
import torch

from minizero import GPT, GPTConfig
from minizero.memory.estimate import estimate
from minizero.models.gpt import ATTENTIONS
from minizero.train import command

TINY = GPTConfig(vocabulary=50, sequence_length=40, width=24, layers=2, heads=4)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize(("sequence", "recompute"), [(40, "none"), (17, "none"), (40, "full"), (40, "selective")])
def test_every_attention_gives_the_same_loss_and_gradients(attention, sequence, recompute):
    x, y = torch.randint(50, (2, 2, sequence), generator=torch.Generator().manual_seed(1))
    results = []
    for options in ({"attention": "naive"}, {"attention": attention, "recompute": recompute}):
        model = GPT(dataclasses.replace(TINY, **options))
        for parameter in model.parameters():  # the initial weights are too small for attention to matter
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
        loss = model(x, y)
        loss.backward()
        results.append((loss, *(parameter.grad for parameter in model.parameters())))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_the_estimate_knows_that_there_are_no_scores():
    long = dataclasses.replace(GPTConfig(), sequence_length=4096)
    ways = (dataclasses.replace(long, attention=name) for name in ("naive", "flash"))
    naive, flash = (estimate(way, 1, [0], 1, torch.float32) for way in ways)
    assert naive - flash >= 4 * 4 * 4096**2 * 4


def test_an_unknown_attention_is_refused(capsys):
    with pytest.raises(ValueError, match="GPT: attention is 'fast'; expected one of naive, reference, tiled, flash"):
        GPT(GPTConfig(attention="fast"))
    assert command.main(["--attention", "fast"]) == 2
    assert "--attention: invalid choice: 'fast'" in capsys.readouterr().err
