"""Models that nobody here wrote, small: built from their configurations, so that nothing is downloaded.

Each is a pair of functions: the module, and a batch of keyword arguments whose output has `.loss`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

Batch = dict[str, torch.Tensor]
VOCABULARY, WIDTH, LENGTH = 64, 32, 12
STEPS = 3
SIZES = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 16} | SIZES


class RealModel(NamedTuple):
    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]  # of so many samples
    floating: str = "inputs_embeds"  # the input that may ask for a gradient
    samples: int = 2  # a rank's


def configured(config: str, **options: Any) -> Any:
    """A configuration of transformers without dropout."""
    import transformers

    result = getattr(transformers, config)(**options)
    for name in vars(result):
        if "drop" in name and isinstance(getattr(result, name), float):
            setattr(result, name, 0.0)
    return result


def built(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        return getattr(transformers, model)(configured(config, **options))

    return make


def resnet50() -> nn.Module:
    """All 53 layers, each an eighth as wide.

    Batch norm divides by the spread of a batch, and so enlarges rounding errors from block to block: 0.1 after three
    steps. Two things keep it small. 4 images of 64 by 64 leave 16 values to each mean of the last layers; and the last
    norm of each block begins at 0 (Goyal et al., 2017, "Accurate, Large Minibatch SGD", section 5.1).
    """
    sizes = {"embedding_size": 8, "hidden_sizes": [32, 64, 128, 256], "num_labels": 5}
    module = built("ResNetForImageClassification", "ResNetConfig", **sizes)()
    for name, parameter in module.named_parameters():
        if name.endswith("layer.2.normalization.weight"):
            nn.init.zeros_(parameter)
    return module


def llama_with_lora() -> nn.Module:
    """Frozen, but for two small matrices beside each projection."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(MODELS["Llama"].make(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


class LSTM(nn.Module):
    """PyTorch's LSTM as a language model, whose embedding is its head too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embedding.weight

    def forward(
        self,
        labels: torch.Tensor,
        input_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> "Output":
        hidden, _ = self.lstm(self.embedding(input_ids) if inputs_embeds is None else inputs_embeds)
        return Output(nn.functional.cross_entropy(self.head(hidden[:, :-1]).flatten(0, 1), labels[:, 1:].flatten()))


class Output(NamedTuple):
    loss: torch.Tensor


def tokens(size: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (size, LENGTH))


def text(size: int) -> Batch:
    ids = tokens(size)
    return {"input_ids": ids, "labels": ids}


def padded_text(size: int) -> Batch:
    """Sentences of different lengths, of which a few words are to be guessed."""
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (size,))
    mask = torch.arange(LENGTH) < lengths[:, None]
    labels = torch.where(mask & (torch.rand(size, LENGTH) < 0.4), tokens(size), -100)
    labels[:, 0] = 1  # at least one in each
    return {"input_ids": tokens(size), "attention_mask": mask.long(), "labels": labels}


def two_texts(size: int) -> Batch:
    return {"input_ids": tokens(size), "labels": tokens(size)[:, :8].contiguous()}


def sound(size: int) -> Batch:
    return {"input_features": torch.randn(size, 8, 16), "labels": tokens(size)[:, :8].contiguous()}


def images(size: int, side: int) -> Batch:
    return {"pixel_values": torch.randn(size, 3, side, side), "labels": torch.randint(5, (size,))}


# Each library's words for two layers of four heads.
GPT2 = dict(vocab_size=VOCABULARY, n_positions=16, n_embd=WIDTH, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
T5 = dict(vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
HALF = dict(layers=2, attention_heads=4, ffn_dim=64)
WHISPER = {f"{half}_{name}": number for half in ("encoder", "decoder") for name, number in HALF.items()}
WHISPER |= dict(vocab_size=VOCABULARY, d_model=WIDTH, num_mel_bins=8, max_source_positions=8, max_target_positions=16)
WHISPER |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3)
EXPERTS = dict(num_key_value_heads=2, num_local_experts=4, output_router_logits=True)
VIT = dict(image_size=16, patch_size=4, num_labels=5)
CONVNEXT = dict(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1], num_labels=5)
MODELS = {
    "GPT-2": RealModel(built("GPT2LMHeadModel", "GPT2Config", **GPT2), text),
    "Llama": RealModel(built("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=2, **TEXT), text),
    "T5": RealModel(built("T5ForConditionalGeneration", "T5Config", **T5), two_texts),
    "BERT": RealModel(built("BertForMaskedLM", "BertConfig", **TEXT), padded_text),
    "Mixtral": RealModel(built("MixtralForCausalLM", "MixtralConfig", **EXPERTS, **TEXT), text),
    "ViT": RealModel(
        built("ViTForImageClassification", "ViTConfig", **VIT, **SIZES),
        functools.partial(images, side=16),
        "pixel_values",
    ),
    "Whisper": RealModel(built("WhisperForConditionalGeneration", "WhisperConfig", **WHISPER), sound, "input_features"),
    "ResNet-50": RealModel(resnet50, functools.partial(images, side=64), "pixel_values", samples=4),
    "ConvNeXt": RealModel(
        built("ConvNextForImageClassification", "ConvNextConfig", **CONVNEXT),
        functools.partial(images, side=32),
        "pixel_values",
    ),
    "Llama with LoRA": RealModel(llama_with_lora, text),
    "LSTM": RealModel(LSTM, text),
}


@functools.cache
def model(name: str) -> nn.Module:
    """Built once, in one thread, and to be copied: ranks that are threads would draw from one generator.

    Every parameter is shaken, so that none is zero: ‖p‖ is then a scale to measure errors by, and LoRA's second
    matrices, which begin as zeros, pass a gradient on to the first.
    """
    torch.manual_seed(0)
    module = MODELS[name].make().train()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return module


@functools.cache
def batches(name: str, ranks: int, leaf: bool = False) -> list[list[Batch]]:
    """For each rank a batch for each step. leaf: embeddings of their own in place of tokens."""
    kind = MODELS[name]
    torch.manual_seed(1)
    result = [[kind.batch(kind.samples) for _ in range(STEPS)] for _ in range(ranks)]
    if leaf and kind.floating == "inputs_embeds":
        for batch in (batch for of_a_rank in result for batch in of_a_rank):
            batch["inputs_embeds"] = torch.randn(*batch.pop("input_ids").shape, WIDTH)
    return result
