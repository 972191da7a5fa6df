"""What a program can check of a lesson: its bytes, its lines for a user's own script, its problems on paper.

`test_lesson_numbers` looks at its numbers, and `test_publish` at its links. Whether it teaches, a reader must say.
"""

import json
import math
import re
from collections.abc import Iterator

import pytest
import torch

from minizero.memory import predict
from notebooks.tools.run import FOLDER

LESSONS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
Cell = dict
PER_PARAMETER = re.compile(r"(?<![\d.,])(\d+) bytes (?:a|per|for a|for each|each) parameter")
BOTH_WAYS = re.compile(r"(\d+) bytes as the ZeRO paper counts, (\d+) with")
FORMULA = re.compile(r"^\$\$[^$]+\$\$$", re.M)
FOLD = re.compile(r"^<details>\n<summary>[^<\n]+</summary>\n\n(?:(?!<details>).)+?\n\n</details>$", re.M | re.S)


def read(name: str) -> list[Cell]:
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    return [cell | {"source": "".join(cell["source"])} for cell in cells]


def markdown(cells: list[Cell]) -> Iterator[str]:
    return (cell["source"] for cell in cells if cell["cell_type"] == "markdown")


def wrong_bytes(text: str) -> list[str]:
    """Bytes a parameter that are not those of `predict`: in FP32, in 16 bits, or as the paper counts."""
    ways = [{}, {"dtype": torch.float16}, {"convention": "paper"}]
    full, ours, paper = (predict(1, 1, 0, **way) for way in ways)
    allowed = {int(n_bytes) for counted in (full, ours, paper) for n_bytes in counted.values()}
    both = (str(int(paper["total"])), str(int(ours["total"])))
    wrong = [number for number in PER_PARAMETER.findall(text) if int(number) not in allowed]
    return wrong + [" and ".join(numbers) for numbers in BOTH_WAYS.findall(text) if numbers != both]


@pytest.mark.parametrize("page", [*LESSONS, "README.md", "../README.md"])
def test_bytes_a_parameter_agree(page):
    texts = [(FOLDER / page).read_text(encoding="utf-8")] if page.endswith(".md") else markdown(read(page))
    assert [wrong for text in texts for wrong in wrong_bytes(text)] == []


def test_wrong_bytes_are_found():
    right = "16 bytes a parameter, 0.25 bytes a parameter, 16 bytes as the ZeRO paper counts, 20 with the FP32 gradient"
    assert wrong_bytes(right) == []
    assert wrong_bytes(right.replace("16 bytes", "18 bytes")) == ["18", "18 and 20"]


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_page_shows_its_markdown(lesson):
    """Between two dollar signs text becomes a formula; without blank lines a fold's body is not read as Markdown."""
    for text in markdown(read(lesson)):
        assert "$" not in FORMULA.sub("", text), text[:60]
        assert len(FOLD.findall(text)) == text.count("<details") == text.count("</details>"), text[:60]


def test_each_number_on_paper_is_what_its_way_gives():
    text = (FOLDER / "on_paper.md").read_text(encoding="utf-8")
    problems = re.split(r"^## .*\((\w+)\.ipynb\)$", text, flags=re.M)[1:]
    assert problems[::2] == LESSONS
    for lesson, asked in zip(problems[::2], problems[1::2]):
        answers = re.findall(r"^`([^`]+) = ([\d.]+)`", asked, re.M)
        assert len(answers) == 3 == asked.count("<details>"), lesson
        for way, number in answers:
            assert round(eval(way, {"math": math}), len(number.partition(".")[2])) == float(number), way


SCRIPT = re.compile(r"^## In your own script\n\n```python\n((?:.+\n){1,8})```", re.M)
NAMES = """import os, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from minizero import GPT, GPTConfig
model, device, layers, h = GPT(GPTConfig(width=32, layers=2, heads=2)), "cpu", [nn.Linear(8, 8)] * 8, torch.ones(2, 8)
block, half, (gradient, whole, shard) = layers[0], torch.ones(4).half(), torch.ones(3, 4)
x, q = torch.zeros(1, 16, dtype=torch.long), torch.randn(1, 2, 128, 16, requires_grad=True)
y, k, v, optimizer = x, q, q, torch.optim.AdamW(model.parameters())
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
"""
LLAMA = """from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
llama = LlamaForCausalLM(LlamaConfig(**sizes))
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lesson", LESSONS)
def test_the_lines_for_your_own_script_run(lesson, tmp_path):
    (lines,) = SCRIPT.findall("\n".join(markdown(read(lesson))))
    source = NAMES + (LLAMA if "llama." in lines else "") + lines
    for library in re.findall(r"from (accelerate|transformers)", source):
        pytest.importorskip(library)
    try:
        exec(source, {"folder": str(tmp_path)})
    finally:
        torch.distributed.destroy_process_group()
