"""python -m tests.bench.gpu_xray: the X-ray's peak of one step, beside what this card's allocator says of the real one.

Models of Hugging Face where transformers is there, and our GPT. The step is the second; the first makes AdamW's states.
"""

import functools
import gc
import importlib.util

import torch

from minizero import GPT, GPTConfig
from minizero.xray.case import case_of
from minizero.xray.plan import Plan
from notebooks.tools.card import CUDA, DEVICE, MIB, synchronize
from tests.bench.gpu_tools import main

QUIET = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
LLAMA = dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=16, num_attention_heads=16, vocab_size=32000)
GROUPED = LLAMA | {"num_key_value_heads": 4}
# {name: (model, configuration, its options, batch, length)}
MODELS = {
    "gpt2, fp32, dropout": ("GPT2LMHeadModel", "GPT2Config", {}, 8, 1024),
    "gpt2, fp32, no dropout": ("GPT2LMHeadModel", "GPT2Config", QUIET, 8, 1024),
    "llama 300M, fp32": ("LlamaForCausalLM", "LlamaConfig", GROUPED, 4, 2048),
    "llama 300M, fp32, no groups": ("LlamaForCausalLM", "LlamaConfig", LLAMA, 4, 2048),
    "bert mlm, fp32, dropout": ("BertForMaskedLM", "BertConfig", {}, 16, 512),
    "t5-small": ("T5ForConditionalGeneration", "T5Config", {}, 8, 512),
}


def hugging_face(model, configuration, options, batch, length):
    """A model, and a batch of tokens which are also its labels."""
    import transformers

    config = getattr(transformers, configuration)(**options)
    config.use_cache = False
    tokens = torch.zeros(batch, length, dtype=torch.long)
    return getattr(transformers, model)(config), {"input_ids": tokens, "labels": tokens}


def our_gpt(tiny):
    config = GPTConfig(width=32, layers=1) if tiny else GPTConfig(sequence_length=1024, width=1024, layers=12, heads=16)
    tokens = torch.zeros(1 if tiny else 8, config.sequence_length, dtype=torch.long)
    return GPT(config), {"x": tokens, "y": tokens}


def beside(make):
    """Bytes: of the X-ray, as it stands, and of the allocator."""
    found = {"xray": case_of(make).run(Plan(foreach=True)).peak["total"]}
    model, inputs = make()
    model = model.to(DEVICE).train()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        output = model(**{name: tensor.to(DEVICE) for name, tensor in inputs.items()})
        loss = getattr(output, "loss", output)
        del output
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize()
    if CUDA:
        found |= {"requested": torch.cuda.memory_stats()["requested_bytes.all.peak"]}
        found |= {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    return found


def run(report, tiny):
    """Measure, and return the lines of the short table."""
    makes = {"our GPT": functools.partial(our_gpt, tiny)}
    if not tiny and importlib.util.find_spec("transformers"):
        makes |= {name: functools.partial(hugging_face, *arguments) for name, arguments in MODELS.items()}
    lines = []
    for name, make in makes.items():
        found = report.measure(name, lambda: beside(make))  # noqa: B023
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()
        if found and "requested" in found:
            ratio = found["xray"] / found["requested"]
            lines.append(f"{name:28} X-ray {found['xray'] / MIB:9,.0f} MiB, {ratio:.3f} of what was asked for")
    return lines


if __name__ == "__main__":
    main("xray", __doc__, run)
