"""The GPT with each attention: the same numbers, fewer bytes."""

import dataclasses

import pytest
import torch

from minizero import GPT, GPTConfig
from minizero.memory import Ledger
from minizero.memory.estimate import estimate
from minizero.models.gpt import ATTENTIONS
from minizero.train import command

TINY = GPTConfig(vocabulary=50, sequence_length=40, width=24, layers=2, heads=4)


def model_and_batch(attention, recompute="none"):
    config = dataclasses.replace(TINY, attention=attention, recompute=recompute)
    model = GPT(config)
    for parameter in model.parameters():  # the initial weights are too small for attention to matter
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    tokens = torch.randint(50, (2, config.sequence_length + 1), generator=torch.Generator().manual_seed(1))
    return model, tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize(("sequence", "recompute"), [(40, "none"), (17, "none"), (40, "full"), (40, "selective")])
def test_every_attention_gives_the_same_loss_and_gradients(attention, sequence, recompute):
    results = []
    for arguments in (("naive",), (attention, recompute)):
        model, x, y = model_and_batch(*arguments)
        loss = model(x[:, :sequence], y[:, :sequence])
        loss.backward()
        results.append((loss, *(parameter.grad for parameter in model.parameters())))
    for one, other in zip(*results):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["flash", "tiled"])
def test_activations_grow_with_the_sequence_not_with_its_square(attention):
    def peak(attention, n):
        config = GPTConfig(vocabulary=8, sequence_length=n, width=16, layers=1, heads=4, attention=attention)
        model, x = GPT(config), torch.zeros(1, n, dtype=torch.long)
        with Ledger(model) as ledger:
            model(x, x).backward()
        return ledger.peak

    short, long = peak(attention, 1000), peak(attention, 2000)
    assert long["activations"] < 2.01 * short["activations"] < 4 * 1000**2 * 4
    assert long["total"] < 2000**2 * 4, "there never is a matrix of all positions, not even a mask"


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
