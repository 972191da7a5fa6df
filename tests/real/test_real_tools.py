"""What a user of transformers does beside the loop: save and load a model, and accumulate micro-batches."""

import copy
import functools

import pytest
import torch
from safetensors.torch import load_file

from minizero.accumulate import accumulate
from tests.real.real_models import MODELS, batches, model
from tests.real.real_training import VARIANTS, by_engine, close
from tests.support.helpers import run, same

pytestmark = pytest.mark.real
PRETRAINED = [name for name in MODELS if name not in ("LSTM", "Llama with LoRA")]


def loaded(comm, module, variant, state):
    module = copy.deepcopy(module)
    for parameter in module.parameters():
        parameter.data.zero_()
    engine = VARIANTS[variant](module, comm)
    engine.load_full_state_dict(state)
    return engine.gather_state_dict()


@pytest.mark.parametrize("name", PRETRAINED)
def test_saved_by_save_pretrained_and_loaded_into_another_stage(name, tmp_path):
    state = by_engine(name, 2, "Zero3")[0]
    state = {key: value for key, value in state.items() if key not in ("losses", "norms", "leaves")}
    model(name).save_pretrained(tmp_path, state_dict=dict(state))  # which empties what it is given
    again = type(model(name)).from_pretrained(tmp_path)
    assert same(again.state_dict(), state)
    assert same(run(3, loaded, model(name), "Zero2", again.state_dict())[2], state)


@pytest.mark.parametrize("name", ["GPT-2", "BERT", "T5"])
def test_a_file_in_which_a_tied_weight_stands_once(name, tmp_path):
    state = dict(model(name).state_dict())
    model(name).save_pretrained(tmp_path)
    file = load_file(tmp_path / "model.safetensors")
    assert file.keys() < state.keys()
    assert same(run(2, loaded, model(name), "Zero3", file)[0], state)


def targets(micro_batch):
    """A causal model moves its labels: the first of a row is no target."""
    return (micro_batch["labels"][:, 1:] != -100).sum()


@functools.cache
def windows(name):
    """For each of 2 ranks three micro-batches, whose rows end at different places."""
    result = [[dict(batch) for batch in of_a_rank] for of_a_rank in batches(name, 2)]
    for end, batch in enumerate(batch for of_a_rank in result for batch in of_a_rank):
        batch["labels"] = batch["labels"].clone()
        batch["labels"][0, 4 + end :] = -100
    return result


def one_window(comm, name, variant):
    engine = VARIANTS[variant](copy.deepcopy(model(name)), comm)
    optimizer = torch.optim.SGD(engine.parameters(), lr=1.0)
    loss = accumulate(engine, windows(name)[comm.rank], count=targets)
    optimizer.step()
    return engine.gather_state_dict() | {"losses": loss}


def one_batch(name, dtype):
    module = copy.deepcopy(model(name)).to(dtype)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    micro_batches = [batch for of_a_rank in windows(name) for batch in of_a_rank]
    loss = module(**{key: torch.cat([batch[key] for batch in micro_batches]) for key in micro_batches[0]}).loss
    loss.backward()
    optimizer.step()
    return module.state_dict() | {"losses": loss.detach()}


@pytest.mark.parametrize("variant", ["DDP", "Zero2", "Zero3"])
@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_a_window_of_micro_batches_is_one_batch(name, variant):
    plain, exact = (2 * [one_batch(name, dtype)] for dtype in (torch.float32, torch.float64))
    assert close(run(2, one_window, name, variant), plain, exact)
