"""A step of a real model on fake tensors holds, category by category and byte for byte, what its real step does."""

import json
import re

import pytest
import torch

from minizero.models.networks import NETWORKS
from minizero.xray.__main__ import main
from minizero.xray.case import Case, NotPossible
from minizero.xray.hugging_face import RANK, Quantized, quantize
from minizero.xray.plan import Plan
from minizero.xray.techniques import name_of, plans
from tests.real.real_models import MODELS, built
from tests.support.xray_cases import BATCH, OWN, WIDTH, WORDS, WithLoss, allocated, fake, real, tokens

pytestmark = pytest.mark.real
SIZES = {"hidden_size": WIDTH, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {"vocab_size": WORDS, "max_position_embeddings": 64, **SIZES}
GROUPED = {"num_key_value_heads": 2, "pad_token_id": 0, **TEXT}
BART = dict(encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, d_model=WIDTH)
BART |= dict(encoder_ffn_dim=128, decoder_ffn_dim=128, max_position_embeddings=64, decoder_start_token_id=2)
BART |= dict(vocab_size=WORDS)
DISTILBERT = dict(dim=WIDTH, hidden_dim=128, n_layers=2, n_heads=4, max_position_embeddings=64, vocab_size=WORDS)
SWIN = dict(image_size=32, patch_size=2, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4, num_labels=5)
CLIP = {"vision_config": dict(SIZES, image_size=32, patch_size=8, projection_dim=WIDTH)}
CLIP |= {"text_config": dict(TEXT, projection_dim=WIDTH, eos_token_id=2)}
EIGHT = {"n_layer": 2, "n_head": 4, "vocab_size": WORDS}


def text():
    ids = tokens()
    return {"input_ids": ids, "labels": ids}


def images(side=32):
    return {"pixel_values": torch.randn(BATCH, 3, side, side), "labels": torch.randint(5, (BATCH,))}


def classes():
    return {"input_ids": tokens(), "labels": torch.zeros(BATCH, dtype=torch.long)}


def pairs():
    return {"input_ids": tokens(), "pixel_values": images()["pixel_values"], "return_loss": True}


def language_model(name, config="Config", **options):
    return built(f"{name}ForCausalLM", f"{name}{config}", **options), text


def of_tests_real(name):
    return MODELS[name].make, lambda: MODELS[name].batch(MODELS[name].samples)


OTHERS = {
    "Gemma 2": language_model("Gemma2", head_dim=16, sliding_window=16, **GROUPED),
    "Gemma 3": language_model("Gemma3", "TextConfig", head_dim=16, sliding_window=16, **GROUPED),
    "Mistral": language_model("Mistral", sliding_window=16, **GROUPED),
    "Qwen 2": language_model("Qwen2", **GROUPED),
    "Qwen 3": language_model("Qwen3", head_dim=16, **GROUPED),
    "Qwen 3, experts": language_model(
        "Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16, **GROUPED
    ),
    "OLMo 2": language_model("Olmo2", **GROUPED),
    "Phi": language_model("Phi", **TEXT),
    "GPT-NeoX": language_model("GPTNeoX", **TEXT),
    "OPT": language_model("OPT", ffn_dim=128, word_embed_proj_dim=WIDTH, pad_token_id=1, **TEXT),
    "BLOOM": language_model("Bloom", hidden_size=WIDTH, **EIGHT),
    "Falcon": language_model("Falcon", **TEXT),
    "Mamba": language_model(
        "Mamba", vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=2, state_size=8, pad_token_id=0
    ),
    "RoBERTa": (built("RobertaForSequenceClassification", "RobertaConfig", pad_token_id=0, **TEXT), classes),
    "DistilBERT": (built("DistilBertForMaskedLM", "DistilBertConfig", **DISTILBERT), text),
    "ELECTRA": (built("ElectraForMaskedLM", "ElectraConfig", embedding_size=32, **TEXT), text),
    "BART": (built("BartForConditionalGeneration", "BartConfig", **BART), text),
    "Swin": (built("SwinForImageClassification", "SwinConfig", **SWIN), images),
    "CLIP": (built("CLIPModel", "CLIPConfig", projection_dim=WIDTH, **CLIP), pairs),
}
MAKES = {name: of_tests_real(name) for name in MODELS} | OTHERS
ALL = [*MAKES, *(f"ours: {name}" for name in OWN)]
ENGINES = [Plan(stage=0, ranks=4), Plan(stage=1, ranks=4), Plan(stage=2, ranks=4), Plan(stage=3, ranks=4)]
IN_EVERY_STAGE = ["GPT-2", "Llama", "T5", "ViT", "Whisper", "Llama with LoRA", "Qwen 3, experts", "Mamba", "ConvNeXt"]


def maker(name):
    if name.startswith("ours: "):
        return OWN[name.removeprefix("ours: ")]
    make, inputs = MAKES[name]
    return lambda: (make(), inputs())


def same(name, plan):
    """None if a step is the same with numbers and without; else what differs, or why it cannot be run."""
    try:
        expected = fake(maker(name), plan)
    except NotPossible as error:
        return str(error)
    found = real(maker(name), plan)
    different = {key: (held, expected.peak[key]) for key, held in found.peak.items() if held != expected.peak[key]}
    return different or (None if found.sent == expected.sent else "sent")


# Each has a reason, and is one small tensor in two categories at most.
DIFFERENT = {
    "BART": "it makes a mask of ones; transformers drops one when it sees the numbers, and keeps it of a fake tensor",
    "Swin": "the fake of an operator has its dimensions in another order in memory, and one result more is copied",
}


@pytest.mark.parametrize("name", ALL)
def test_fake_is_real(name):
    different = same(name, Plan())
    if name in DIFFERENT:
        assert different["total"][1] - different["total"][0] == 32_768
    else:
        assert different is None


# Convolutions and the layers of an LSTM take scratch, which the profiler sees, and no ledger does. Mamba's peak is
# 6.8 % too high: three gradients meet there, which autograd adds in place, but not while a mode watches.
SCRATCH = ["Mamba", "Whisper", "ResNet-50", "ConvNeXt", "LSTM"]
SCRATCH += [f"ours: {name}" for name in ("LSTM", *NETWORKS)]


@pytest.mark.parametrize("name", [name for name in ALL if name not in (*SCRATCH, *DIFFERENT)])
def test_the_allocator_hands_out_as_many_bytes(name):
    assert 0 <= allocated(maker(name)) - fake(maker(name), Plan()).peak["total"] < 1024  # scratch of sums


@pytest.mark.parametrize("plan", ENGINES, ids=name_of)
@pytest.mark.parametrize("name", IN_EVERY_STAGE)
def test_fake_is_real_in_every_stage(name, plan):
    different = same(name, plan)
    if plan.stage == 3 and isinstance(different, dict):  # prefetch: a message may have arrived early
        found, expected = different.pop("total")
        assert found <= expected and different.keys() <= {"gradients", "communication", "temporary"}
    else:
        assert different is None


# Why a row of these models is not there, by the words it begins with.
REFUSED = {
    "loss in chunks": ("no linear layer leads straight", "its logits go through"),
    "attention without scores": ("its attention stores no scores",),
    "recompute of each block": ("it has no repeated blocks",),
    "frozen matrices in 4 bits": ("it trains all its matrices",),
}
ON_ONE = list(plans(1, 2))  # the batches of tests/real have two samples


@pytest.mark.parametrize("plan", ON_ONE, ids=name_of)
@pytest.mark.parametrize("name", ["GPT-2", "Llama", "T5", "Whisper", "Gemma 2", "ViT", "Mamba", "CLIP", "BLOOM"])
def test_a_row_is_a_real_run(name, plan):
    different = same(name, plan)
    if isinstance(different, str):
        assert different.startswith(REFUSED.get(name_of(plan), ()))
    else:
        assert different is None


SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SMALL}
VISION = {"model_type": "clip_vision_model", **SMALL, "image_size": 32, "patch_size": 8}
FILES = [
    (LLAMA, 0, "LlamaForCausalLM: "),
    (LLAMA | {"quantization_config": {"load_in_4bit": True}}, 0, "frozen, quantized to 4 bits as by bitsandbytes"),
    (LLAMA | {"quantization_config": {"quant_method": "mxfp4"}}, 2, "its weights are quantized .mxfp4., and only"),
    (
        LLAMA | {"architectures": ["LlamaForQuestionAnswering"]},
        2,
        "nobody here knows a batch for LlamaFor",
    ),
    (
        {"peft_type": "LORA", "base_model_name_or_path": "a/b"},
        2,
        "is an adapter.s, of a/b: give that model.s config",
    ),
    ({"_class_name": "UNet2DConditionModel"}, 2, "describes no model of transformers .UNet2DConditionModel."),
    ({"model_type": "chatglm", "auto_map": {}}, 2, "chatglm, its code is its own .auto_map."),
    ({"model_type": "vit", **SMALL}, 2, 'add "architectures": .the class of vit that is trained.'),
    (
        {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "text_config": LLAMA}
        | {"vision_config": VISION, "image_token_index": 98},
        0,
        "Its batch has no images: what reads them is there, and does not run",
    ),
]


@pytest.mark.parametrize("entries, status, words", FILES)
def test_a_configuration_is_counted_or_refused_in_a_short_sentence(entries, status, words, tmp_path, capfd):
    (file := tmp_path / "config.json").write_text(json.dumps(entries))
    assert main(["--hf", str(file), "--batch", "2", "--length", "16", "--no-table"]) == status
    out, error = capfd.readouterr()
    assert re.search(words, " ".join((out if status == 0 else error).split()))
    assert status == 0 or len(error) <= 600


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_matrix_is_counted_in_its_bits_and_made_whole_while_it_is_used(bits):
    layer = torch.nn.Linear(512, 512, bias=False)
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Sequential(layer)).requires_grad_(False)
    model[1] = Quantized(layer, bits, RANK)
    peak = Case(WithLoss(model), (torch.ones(4, 512), torch.zeros(4, dtype=torch.long))).run(Plan()).peak
    n, adapters = 512 * 512, 4 * 2 * 16 * 512
    assert peak["buffers"] == (n // 2 + n // 64 + n // 2**12 if bits == 4 else n + 4 * 512)
    assert peak["gradients"] == adapters and 4 * n <= peak["temporary"] < 4 * n + 2**17
    layers = torch.nn.Embedding(512, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 512)
    assert quantize(torch.nn.Sequential(*layers).requires_grad_(False), bits) == 1  # but the head
