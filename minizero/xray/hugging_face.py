"""Models of Hugging Face: built from a configuration file, with a batch of the right kind; nothing is downloaded.

They differ from other models in two ways that an X-ray must know. Their caches are on by default: each block appends
its keys and values for the next call, which a training step never makes, and a recomputed block appends them twice. And
they ask whether tensors are fake, and build a mask that a real step does not have.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn


def with_caches(module: nn.Module) -> list[Any]:
    """The configurations inside of which the cache is on."""
    configs = (vars(part).get("config") for part in module.modules())
    return [config for config in configs if getattr(config, "use_cache", False)]


def switch_caches_off(module: nn.Module) -> None:
    """Set `use_cache` to False in each configuration inside."""
    for config in with_caches(module):
        config.use_cache = False


def masks_as_for_real() -> contextlib.AbstractContextManager:
    """Answer "no" for a batch of packed sequences: the library looks at real tensors, and assumes it of fake."""
    if (masks := sys.modules.get("transformers.masking_utils")) is None:
        return contextlib.nullcontext()
    return mock.patch.object(masks, "find_packed_sequence_indices", lambda position_ids: None)


def from_config(file: Path, batch: int, length: int) -> tuple[nn.Module, dict[str, Any]]:
    """The model that a `config.json` describes, and a batch for it. `ValueError` if there is no such file or model."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError('--hf: needs transformers: pip install "minizero[real]"') from error
    try:
        described = json.loads(file.read_text())
        config = transformers.AutoConfig.for_model(**described)
        (name, *_) = described.get("architectures") or ["AutoModelForCausalLM"]
        kind = getattr(transformers, name)
    except (OSError, json.JSONDecodeError, TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"--hf: {file} describes no model of transformers: {error}") from error
    # In the configuration's dtype: only so does a class that is no Auto class look at it.
    model = (kind.from_config if name.startswith("Auto") else kind._from_config)(config)
    return model, batch_for(model, batch, length)


def batch_for(model: nn.Module, batch: int, length: int) -> dict[str, Any]:
    """A batch as such a model takes it, with labels. length: in tokens; images have the size of the configuration."""
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    tokens = torch.randint(1, text.vocab_size, (batch, length)) if hasattr(text, "vocab_size") else None
    if model.main_input_name == "pixel_values":
        side = config.image_size if isinstance(getattr(config, "image_size", 224), int) else config.image_size[0]
        images = torch.randn(batch, getattr(config, "num_channels", 3), side, side)
        return {"pixel_values": images, "labels": torch.randint(config.num_labels, (batch,))}
    if model.main_input_name == "input_features":
        sound = torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions)
        return {"input_features": sound, "labels": tokens}
    if tokens is None:
        raise ValueError(f"--hf: nobody here knows a batch for {type(model).__name__}: write a FILE.py with a make()")
    classifies = type(model).__name__.endswith("SequenceClassification")
    return {"input_ids": tokens, "labels": torch.randint(config.num_labels, (batch,)) if classifies else tokens}
