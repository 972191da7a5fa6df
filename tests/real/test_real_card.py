"""As on a card: the bytes that a step asked the allocator of one H200 for (torch 2.11, 2026-11-27), told without it."""

import pytest
import torch
from torch import nn

from minizero.xray import Plan
from minizero.xray.case import case_of

pytestmark = pytest.mark.real
LLAMA = dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=16, num_attention_heads=16)
LLAMA |= dict(num_key_value_heads=4, vocab_size=32000, use_cache=False)
NO_CACHE = dict(use_cache=False)
NO_DROPOUT = dict(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0) | NO_CACHE
IMAGES = {"pixel_values": torch.zeros(32, 3, 224, 224), "labels": torch.zeros(32, dtype=torch.long)}


class Autocast(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **inputs):
        with torch.autocast("cuda", torch.bfloat16):
            return self.model(**inputs)


def text(batch, length):
    return {name: torch.zeros(batch, length, dtype=torch.long) for name in ("input_ids", "labels")}


def checkpointed(model):
    model.gradient_checkpointing_enable()
    return model


# The model, its configuration, what is done to it, a batch: bytes, less the batch's, which the script held twice.
MEASURED = [
    ("GPT2LMHeadModel", "GPT2", NO_CACHE, nn.Module.train, text(8, 1024), 15_171_730_440),
    ("GPT2LMHeadModel", "GPT2", NO_DROPOUT, nn.Module.train, text(8, 1024), 15_014_444_040),
    ("GPT2LMHeadModel", "GPT2", NO_DROPOUT, Autocast, text(8, 1024), 13_134_996_168),
    ("LlamaForCausalLM", "Llama", LLAMA, nn.Module.train, text(4, 2048), 34_722_066_696),
    ("LlamaForCausalLM", "Llama", LLAMA, nn.Module.bfloat16, text(4, 2048), 10_538_031_496),
    ("LlamaForCausalLM", "Llama", LLAMA, Autocast, text(4, 2048), 13_799_305_736),
    ("LlamaForCausalLM", "Llama", LLAMA, checkpointed, text(4, 2048), 8_396_665_096),
    ("BertForMaskedLM", "Bert", {}, nn.Module.train, text(16, 512), 9_504_348_864),
    ("ViTForImageClassification", "ViT", {}, nn.Module.train, IMAGES, 4_985_827_648),
]


@pytest.mark.parametrize("kind, config, options, change, inputs, measured", MEASURED)
def test_the_bytes_asked_for_are_those_of_the_card(kind, config, options, change, inputs, measured):
    import transformers

    def make():
        return change(getattr(transformers, kind)(getattr(transformers, f"{config}Config")(**options))), inputs

    assert case_of(make, card="h200").run(Plan()).peak["total"] == pytest.approx(measured, rel=1e-4)
