"""`flash_attention` as the attention function of real models."""

import pytest
import torch
from torch.nn.functional import pad

from flash import flash_attention, flash_attention_varlen
from tests.real.real_models import STEPS, batches, model
from tests.real.real_training import by_engine, by_hand, close

pytestmark = pytest.mark.real
CAUSAL = ("GPT-2", "Llama", "Llama with LoRA", "Mixtral")
NAMES = (*CAUSAL, "BERT", "ViT", "Whisper")  # whose decoder is causal, and whose encoder and cross-attention are not
calls = []


def flash(module, query, key, value, mask, scaling=None, dropout=0.0, is_causal=None, position_bias=None, **_):
    """An attention function of transformers. query, key, value: (batch, heads, length, head dim).

    mask: (batch, length), which keys are no padding, or None. Returns (batch, length, heads, head dim), and no weights.
    """
    if position_bias is not None:
        raise NotImplementedError("flash_attention adds no bias to the scores")
    calls.append(module.is_causal if is_causal is None else is_causal)
    options = {"causal": calls[-1], "scale": scaling, "dropout_p": dropout}
    if mask is None:
        return flash_attention(query, key, value, **options).transpose(1, 2), None
    rows, heads_last = mask.bool(), (x.transpose(1, 2) for x in (query, key, value))
    ends = pad(rows.sum(dim=1).cumsum(dim=0), (1, 0)).int()
    packed = flash_attention_varlen(*(x[rows] for x in heads_last), ends, ends, **options)
    out = packed.new_zeros(*rows.shape, *packed.shape[1:])
    out[rows] = packed
    return out, None


def with_flash(module):
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register("minizero", flash)
    AttentionMaskInterface.register("minizero", flash_attention_mask)  # no mask but for padding
    module.set_attn_implementation("minizero")


@pytest.mark.parametrize("variant", ["DDP", "Zero3"])
@pytest.mark.parametrize("name", NAMES)
def test_trains_as_with_the_attention_of_pytorch(name, variant):
    calls.clear()
    got = by_engine(name, 2, variant, change=with_flash)
    assert close(got, by_hand(name, 2, torch.float32), by_hand(name, 2, torch.float64))
    causal = [part.is_causal for part in model(name).modules() if hasattr(part, "is_causal")]
    assert sorted(calls) == sorted(2 * STEPS * causal)
    assert (name in CAUSAL) == all(calls) and (name == "Whisper" or len(set(calls)) == 1)


def test_a_bias_of_the_scores_is_refused():
    import copy

    module = copy.deepcopy(model("T5"))
    with_flash(module)
    with pytest.raises(NotImplementedError, match="bias"):
        module(**batches("T5", 2)[0][0])
