"""Models of Hugging Face: built from a configuration file, with a batch of the right kind; nothing is downloaded.

They differ from other models in two ways that an X-ray must know. Their caches are on by default: each block appends
its keys and values for the next call, which a training step never makes, and a recomputed block appends them twice. And
they ask whether tensors are fake, and build a mask that a real step does not have: fake.py answers.

Weights that bitsandbytes quantizes are counted (`Quantized`).
"""

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn


def with_caches(module: nn.Module) -> list[Any]:
    """The configurations inside of which the cache is on."""
    configs = (vars(part).get("config") for part in module.modules())
    return [config for config in configs if getattr(config, "use_cache", False)]


UNSEEN = (
    ("vision_config", "pixel_values (of Qwen's models with image_grid_thw and position_ids)", "images"),
    ("audio_config", "input_features", "sound"),
)


def notes_of(model: nn.Module, inputs: Any) -> Iterator[str]:
    """What is worth a sentence: what a batch leaves out, and what a quantized model trains."""
    config = vars(model).get("config")
    for part, keys, what in UNSEEN if isinstance(inputs, Mapping) else ():
        if getattr(config, part, None) is not None and not any(name.startswith(keys.split()[0]) for name in inputs):
            yield f"Its batch has no {what}: what reads them is there, and does not run. A make() may give {keys}."
    if layer := next((part for part in model.modules() if isinstance(part, Quantized)), None):
        yield (
            f"Its matrices are frozen, quantized to {layer.bits} bits as by bitsandbytes, and each is made whole while "
            f"it is used. Adapters of rank {RANK} (LoRA) are trained, and nothing else."
        )


def from_config(file: Path, batch: int, length: int | None) -> tuple[nn.Module, dict[str, Any]]:
    """The model that a `config.json` describes, and a batch for it. `ValueError` if there is no such file or model."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError('--hf: needs transformers: pip install "minizero[real]"') from error
    try:
        described = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--hf: {file} describes no model of transformers: {error}") from error
    kind = described.get("model_type")
    if "peft_type" in described:
        base = described.get("base_model_name_or_path")
        raise ValueError(f"--hf: {file} is an adapter's, of {base}: give that model's config.json, or {MAKE}")
    if kind not in transformers.CONFIG_MAPPING:
        of = described.get("_class_name") or kind or "no model_type"
        own = ", its code is its own (auto_map)" if "auto_map" in described else ""
        raise ValueError(f"--hf: {file} describes no model of transformers ({of}{own}): {MAKE}")
    quantized = described.pop("quantization_config", None) or {}
    bits = 4 * bool(quantized.get("load_in_4bit")) or 8 * bool(quantized.get("load_in_8bit"))
    if quantized and not bits:
        method = quantized.get("quant_method", "of some kind")
        raise ValueError(f"--hf: its weights are quantized ({method}), and only bitsandbytes' 8 and 4 bits are counted")
    names = described.get("architectures") or ["AutoModelForCausalLM"]
    try:
        config = transformers.AutoConfig.for_model(**described)
        made: Any = getattr(transformers, names[0])
        # In the configuration's dtype: only so does a class that is no Auto class look at it.
        model = (made.from_config if names[0].startswith("Auto") else made._from_config)(config)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        wanted = f'"architectures": [the class of {kind} that is trained]'
        missing = f"add {wanted}" if "architectures" not in described else str(error)[:300]
        raise ValueError(f"--hf: {file} describes no model that can be built: {missing}, or {MAKE}") from error
    if bits:
        quantize(model.requires_grad_(False), bits, RANK)
    return model, batch_for(model, batch, length)


MAKE = "write a FILE.py with a make()"
# The ends of the names of models whose batch is known.
KNOWN = "ForCausalLM LMHeadModel ForConditionalGeneration ForMaskedLM ForSequenceClassification ForImageClassification"


def batch_for(model: nn.Module, batch: int, length: int | None) -> dict[str, Any]:
    """A batch as such a model takes it, with labels. length: in tokens; images have the size of the configuration.

    None: 2,048, or as many as the model has places for. `ValueError` if nobody knows such a batch.
    """
    config: Any = model.config
    name, takes, text = type(model).__name__, str(model.main_input_name), config.get_text_config()
    if not name.endswith(tuple(KNOWN.split())) or not (takes == "pixel_values" or hasattr(text, "vocab_size")):
        takes = "sound" if takes == "input_values" else takes
        raise ValueError(
            f"--hf: nobody here knows a batch for {name}, which takes {takes} and labels or images of its own: {MAKE}"
        )
    if takes == "pixel_values":
        side = getattr(config, "image_size", 224)
        sides = (side, side) if isinstance(side, int) else side
        images = torch.randn(batch, getattr(config, "num_channels", 3), *sides)
        return {"pixel_values": images, "labels": torch.randint(config.num_labels, (batch,))}
    places = getattr(text, "max_target_positions", None) or getattr(text, "max_position_embeddings", None) or 2048
    tokens = torch.randint(1, text.vocab_size, (batch, length or min(2048, places)))
    if takes == "input_features":
        sound = torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions)
        return {"input_features": sound, "labels": tokens}
    classifies = name.endswith("SequenceClassification")
    return {"input_ids": tokens, "labels": torch.randint(config.num_labels, (batch,)) if classifies else tokens}


RANK = 16  # of the adapters that are trained beside frozen matrices of 8 or 4 bits


class Quantized(nn.Module):
    """A linear layer whose matrix is counted in 4 or 8 bits, and not run; perhaps an adapter (QLoRA; Dettmers, 2023).

    In 4 bits each 64 numbers have a scale of a byte, and each 256 scales one in FP32; in 8 bits each row has one.
    """

    def __init__(self, layer: nn.Linear, bits: int, rank: int = 0) -> None:
        super().__init__()
        n, dtype = layer.weight.numel(), layer.weight.dtype
        self.bits, self.shape, self.bias = bits, layer.weight.shape, layer.bias
        size = n // 2 + n // 64 + n // 2**12 if bits == 4 else n + 4 * self.shape[0]
        self.register_buffer("packed", layer.weight.new_zeros(size, dtype=torch.uint8))
        sides = self.shape[1], rank, self.shape[0]
        pair = (nn.Linear(*each, bias=False, dtype=dtype) for each in zip(sides, sides[1:]))
        self.adapter = nn.Sequential(*pair) if rank else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer, and its adapter. The matrix is made whole for a product, forwards and backwards, and not kept."""
        whole = functools.partial(torch.empty, dtype=x.dtype, device=x.device)
        with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept.shape, whole):
            y = nn.functional.linear(x, whole(self.shape))
        if self.adapter is not None:
            y = y + self.adapter(x)
        return y if self.bias is None else y + self.bias


def quantize(model: nn.Module, bits: int, rank: int = 0) -> int:
    """Put a `Quantized` in the place of each frozen linear layer but the head; returns how many there were."""
    # The head makes a number for each word.
    words = max((table.num_embeddings for table in model.modules() if isinstance(table, nn.Embedding)), default=0)
    linear = [(path, layer) for path, layer in model.named_modules() if type(layer) is nn.Linear]
    frozen = [each for each in linear if each[1].out_features != words and not each[1].weight.requires_grad]
    for path, layer in frozen:
        model.set_submodule(path, Quantized(layer, bits, rank))
    return len(frozen)
