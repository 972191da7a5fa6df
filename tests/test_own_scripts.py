"""The lines of "In your own script" run, with names that a script has; those of other libraries if they are there."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minizero import GPT, GPTConfig
from tests.test_lessons import LESSONS, markdown, read

LINES = re.compile(r"^## In your own script\n\n```python\n(.+?)```", re.M | re.S)
IMPORTS = """import os
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
"""
TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lesson", LESSONS)
def test_the_lines_run(lesson, tmp_path):
    (lines,) = LINES.findall("\n".join(markdown(read(lesson))))
    assert lines.count("\n") <= 4
    for library in re.findall(r"from (accelerate|transformers)", lines):
        pytest.importorskip(library)
    names = {"torch": torch, "dist": dist, "nn": nn, "device": "cpu", "folder": str(tmp_path / "saved")}
    if "llama." in lines:
        library = pytest.importorskip("transformers")
        names["llama"] = library.LlamaForCausalLM(library.LlamaConfig(**TINY))
    names |= {"model": GPT(GPTConfig(width=32, layers=2, heads=2)), "half": torch.ones(4).half()}
    names |= dict.fromkeys("xy", torch.zeros(1, 16, dtype=torch.long)) | {"h": torch.ones(2, 8, requires_grad=True)}
    names |= dict.fromkeys("qkv", torch.randn(1, 2, 128, 16, requires_grad=True)) | {"block": nn.Linear(8, 8)}
    names |= {name: torch.ones(4) for name in ("gradient", "whole", "shard")} | {"layers": [nn.Linear(8, 8)] * 8}
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        exec(IMPORTS + lines, names)
    finally:
        dist.destroy_process_group()
