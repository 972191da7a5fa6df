"""What a program can check of a lesson. Whether it teaches, a reader must say.

Each rule is a function of a notebook's cells, and returns what is wrong, in words. `LESSONS` keep all rules. Below them
each rule is shown a small notebook that keeps it, and small ones that do not.
"""

import ast
import json
import math
import re
from collections.abc import Iterator

import pytest
import torch

from minizero.memory import predict
from notebooks.tools.book import PREPARES
from notebooks.tools.run import FOLDER

LESSONS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
MOST_LINES = 15  # of a code cell that stands open
MOST_WORDS, MOST_CELLS = 2600, 10  # of a lesson up to its homework: words, and cells of code that the book shows open
BET, SEEN = "**Your bet.**", "**What you see.**"

# Terms of the glossary that a student knows who has trained a small network with torch.optim.Adam.
KNOWN = {"parameter", "gradient", "attention"}
# Everyday words, which a program cannot tell from the term.
ORDINARY = {"block", "checkpoint", "gather", "kernel", "key", "on disk", "overlap", "query", "release", "schedule"}
ORDINARY |= {"value"}

ONE_BURST = {"perf_counter", "process_time", "monotonic", "time_messages"}  # what reads a clock, or looks at one burst

Cell = dict
IMAGE = re.compile(r"!\[([^\]]*)\]\([^)]*\)|<img(?![^>]*alt=)[^>]*>|<img[^>]*alt=\"([^\"]*)\"[^>]*>")
FORMULA = re.compile(r"^\$\$[^$]+\$\$$", re.M)
PER_PARAMETER = re.compile(r"(?<![\d.,])(\d+) bytes (?:a|per|for a|for each|each) parameter")
HOMEWORK = re.compile(r"^## (?:Homework: .+|On a card|Exercises)$", re.M)
FOLD = re.compile(r"^<details>\n<summary>[^<\n]+</summary>\n\n(?:(?!<details>).)+?\n\n</details>$", re.M | re.S)
BOTH_WAYS = re.compile(r"(\d+) bytes as the ZeRO paper counts, (\d+) with")


def read(name: str) -> list[Cell]:
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    return [cell | {"source": "".join(cell["source"])} for cell in cells]


def markdown(cells: list[Cell]) -> Iterator[str]:
    return (cell["source"] for cell in cells if cell["cell_type"] == "markdown")


def images(cell: Cell) -> int:
    return sum(kind.startswith("image/") for out in cell.get("outputs", []) for kind in out.get("data", {}))


# The rules of one notebook.


def code_is_short(cells: list[Cell]) -> list[str]:
    """Folded cells are free."""
    return [
        f"{len(cell['source'].splitlines())} lines of code stand open: {cell['source'][:50]!r}"
        for cell in cells
        if cell["cell_type"] == "code"
        and not cell["metadata"].get("jupyter", {}).get("source_hidden")
        and len(cell["source"].splitlines()) > MOST_LINES
    ]


def one_sitting(cells: list[Cell]) -> list[str]:
    """Up to the first homework: so many words, and so many cells of code without a picture."""
    n_words = shown = 0
    for cell in cells:
        if cell["cell_type"] == "markdown":
            before, *homework = HOMEWORK.split(cell["source"], maxsplit=1)
            n_words += len(before.split())
            if homework:
                break
        elif not (cell["metadata"].get("jupyter") or PREPARES.match(cell["source"])):
            shown += not images(cell) and "'text/html'" not in repr(cell["outputs"])
    most = ((n_words, MOST_WORDS, "words"), (shown, MOST_CELLS, "cells of code stand open"))
    return [f"{n} {what} up to the homework, not {limit}" for n, limit, what in most if n > limit]


def bets_are_settled(cells: list[Cell]) -> list[str]:
    """Two to six bets; each has its answer, behind a click, after it. Any such body has blank lines around it.

    Other questions ("Try it here") may have answers of the same form.
    """
    wrong, open_bets, bets = [], 0, 0
    for text in markdown(cells):
        for mark in re.findall(rf"{re.escape(BET)}|<summary>The answer", text):
            bets += mark == BET
            open_bets = open_bets + 1 if mark == BET else max(0, open_bets - 1)
        if not len(FOLD.findall(text)) == text.count("<details") == text.count("</details>"):
            wrong.append(f"no blank lines around the body of <details>: {text[:50]!r}")
    if open_bets:
        wrong.append(f"{open_bets} bets without an answer")
    if not 2 <= bets <= 6:
        wrong.append(f"{bets} bets, not 2 to 6")
    return wrong


def figures_are_read(cells: list[Cell]) -> list[str]:
    """A sentence says what is seen, before the next figure comes."""
    wrong, unread = [], ""
    for cell in cells:
        if cell["cell_type"] == "markdown" and SEEN in cell["source"]:
            unread = ""
        if cell["cell_type"] == "code" and images(cell):
            wrong += [unread] if unread else []
            unread = f"no '{SEEN}' after the figure of {cell['source'][:50]!r}"
    return wrong + ([unread] if unread else [])


def no_dollars(cells: list[Cell]) -> list[str]:
    """Between two of them any text becomes a formula. A formula stands by itself, between two times two."""
    return [f"a dollar sign: {text[:50]!r}" for text in markdown(cells) if "$" in FORMULA.sub("", text)]


def pictures_have_words(cells: list[Cell]) -> list[str]:
    """At least five, for who cannot see the picture."""
    return [
        f"alt text of fewer than five words: {match[0][:60]!r}"
        for text in markdown(cells)
        for match in IMAGE.finditer(text)
        if len((match[1] or match[2] or "").split()) < 5
    ]


def bytes_agree(cells: list[Cell]) -> list[str]:
    """Bytes a parameter are those of `predict`, in FP32, in 16 bits, and as the paper counts."""
    ways = [{}, {"dtype": torch.float16}, {"convention": "paper"}]
    full, ours, paper = (predict(1, 1, 0, **way) for way in ways)
    allowed = {int(n_bytes) for counted in (full, ours, paper) for n_bytes in counted.values()}
    wrong = []
    for text in markdown(cells):
        for number in PER_PARAMETER.findall(text):
            if int(number) not in allowed:
                wrong.append(f"{number} bytes a parameter: minizero.memory.predict gives {sorted(allowed)}")
        for numbers in BOTH_WAYS.findall(text):
            if [int(number) for number in numbers] != [paper["total"], ours["total"]]:
                wrong.append(f"{numbers}: the paper's count is {paper['total']:.0f}, ours {ours['total']:.0f}")
    return wrong


def no_burst_is_judged(cells: list[Cell]) -> list[str]:
    """No assertion depends on one reading of a clock: a busy machine makes any call late, and any burst of calls.

    What a function measures in several turns, of which it returns the best, may be compared.
    """
    wrong, timed = [], set(ONE_BURST)

    def follow(statement: ast.AST) -> None:
        if isinstance(statement, ast.FunctionDef):  # its variables are others
            return
        if isinstance(statement, ast.Assert) and timed & names(statement.test):
            wrong.append(f"the clock is judged: {ast.unparse(statement)}")
        if isinstance(statement, ast.Assign):
            change = timed.update if timed & names(statement.value) else timed.difference_update
            change(set().union(*map(names, statement.targets)))
        if isinstance(statement, ast.For):
            change = timed.update if timed & names(statement.iter) else timed.difference_update
            change(names(statement.target.elts[-1] if isinstance(statement.target, ast.Tuple) else statement.target))
        for inner in ast.iter_child_nodes(statement):
            follow(inner)

    for cell in cells:
        if cell["cell_type"] == "code":
            follow(ast.parse(cell["source"]))
    return wrong


def names(tree: ast.AST) -> set[str]:
    """The variables of an expression, but not those of its comprehensions; and what it calls to read a clock."""
    nodes = [*ast.walk(tree)]
    found = {node.id for node in nodes if isinstance(node, ast.Name)}
    found -= {name for node in nodes if isinstance(node, ast.comprehension) for name in names(node.target)}
    return found | {node.attr for node in nodes if isinstance(node, ast.Attribute)} & ONE_BURST


RULES = [code_is_short, one_sitting, bets_are_settled, figures_are_read, no_dollars]
RULES += [pictures_have_words, bytes_agree, no_burst_is_judged]


# The rule of the whole course: no term before its gloss.


def glossary(text: str) -> list[list[str]]:
    """Of the table whose first column is English: each concept, as the list of its names."""
    table = re.search(r"^\| English \|.*\n\|.*\n((?:\|.*\n?)+)", text, re.M)[1]
    concepts = []
    for row in table.splitlines():
        for concept in re.split(r", (?![^(]*\))", row.split("|")[1].strip()):
            names = [name.strip() for name in re.split(r"[(),]", concept) if name.strip()]
            concepts.append(names)
    return concepts


def sentences(text: str) -> list[str]:
    """Without blocks of code, headings, pictures, links to lessons, and without what comes after a lesson's end."""
    text = re.split(r"^#+ (?:\d+\. )?(?:Sources|Next|Exercises)\b", text, maxsplit=1, flags=re.M)[0]
    text = re.sub(r"```.*?```|<[^>]*>", " ", text, flags=re.S)
    text = re.sub(r"!?\[[^\]]*\]\([^)]*\.(?:ipynb|png|svg)[^)]*\)", " ", text)  # a lesson's name is no use of it
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = "\n".join("" if line.startswith("#") else line for line in text.splitlines())
    return [
        " ".join(sentence.split())
        for paragraph in re.split(r"\n\s*\n|\n(?=\s*[-*|\d]\S* )", text)
        for sentence in re.split(r"(?<=[.!?])\s+", paragraph)
        if sentence.strip()
    ]


def uses(name: str, sentence: str) -> bool:
    """Outside of code, and not as an everyday word."""
    term = rf"(?<![\w-]){re.escape(name)}(?:s|es|d|ed|ing)?(?![\w-])"
    return name not in ORDINARY | KNOWN and re.search(term, re.sub(r"`[^`]*`", " ", sentence), re.I) is not None


def explains(name: str, sentence: str) -> bool:
    """Whether the sentence has the form of an explanation: words beside the term, and a sign that they belong to it.

    The term is emphasised or in quotation marks, or called so; it is followed by what it is, or it stands in
    parentheses behind that. A reader must judge whether the explanation is a good one.
    """
    term = rf"(?<![\w-]){re.escape(name)}(?:s|es|d|ed|ing)?(?![\w-])"
    forms = [
        rf"(?<![\w*])\*{{1,2}}(?=\S)[^*]{{0,30}}{term}[^*]{{0,30}}\*",  # *rank*
        rf"(?<!\w)[\"“](?=\S)[^\"”]{{0,30}}{term}[^\"”]{{0,30}}[\"”]",  # "rank"
        rf"\bcalled (?:an? |the )?{term}",
        rf"{term}[*\"”]* \(\S+ \S",  # rank (a worker)
        rf"\| \**{term}\** \|(?: [^\s|]+){{4,}}",  # a cell of a table, and its explanation in the next
        rf"\w \((?:an? |the )?{term}\)",  # a worker (rank)
        rf"{term}[*\"”]*(?:: | means? | = |,? that is|,? which is)",
        rf"{term}[*\"”]*(?: is| are|,) (?:an? |the |one |what |how |where |when )",  # a rank is one of N workers
    ]
    sentence = sentence.replace("`", "")
    return len(sentence.split()) >= 4 and any(re.search(form, sentence, re.I) for form in forms)


def terms_are_explained(course: dict[str, list[Cell]], concepts: list[list[str]]) -> list[str]:
    """Each concept, at or before the first use of one of its names."""
    told = []
    for lesson, cells in course.items():
        headings = re.findall(r"^#+ (?:\d+\. )?(.+)$", "\n".join(markdown(cells)), re.M)  # and a list of contents
        told += [(lesson, s) for text in markdown(cells) for s in sentences(text) if s not in headings]
    wrong = []
    for names in concepts:
        first = next((i for i, (_, s) in enumerate(told) if any(uses(name, s) for name in names)), None)
        if first is None:
            continue
        lesson, sentence = told[first]
        so_far = [s for _, s in told[: first + 1]]
        if any(explains(name, s) for name in names for s in so_far):
            continue
        wrong.append(f"{lesson} uses '{names[0]}' without explaining it: {sentence[:100]!r}")
    return wrong


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson(lesson, rule):
    wrong = rule(read(lesson))
    assert not wrong, "\n".join(wrong)


def test_the_readmes_bytes_are_the_same():
    for path in (FOLDER.parent / "README.md", FOLDER / "README.md"):
        assert bytes_agree([words(path.read_text(encoding="utf-8"))]) == []


def test_each_number_on_paper_is_what_its_way_gives():
    text = (FOLDER / "on_paper.md").read_text(encoding="utf-8")
    problems = re.split(r"^## .*\((\w+)\.ipynb\)$", text, flags=re.M)[1:]
    assert problems[::2] == LESSONS
    for lesson, asked in zip(problems[::2], problems[1::2]):
        answers = re.findall(r"^`([^`]+) = ([\d.]+)`", asked, re.M)
        assert len(answers) == 3 == asked.count("<details>"), lesson
        for way, number in answers:
            assert round(eval(way, {"math": math}), len(number.partition(".")[2])) == float(number), way


SCRIPT = re.compile(r"^## In your own script\n\n```python\n((?:.+\n){1,6})```", re.M)
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


@pytest.mark.slow
def test_no_term_comes_before_its_gloss():
    words = glossary((FOLDER / "README.md").read_text(encoding="utf-8"))
    assert len(words) > 40 and ["shard"] in words
    course = {name: read(name) for name in LESSONS}
    wrong = terms_are_explained(course, words)
    assert not wrong, "\n".join(wrong)


# Each rule sees what it is for.


def words(source: str) -> Cell:
    return {"cell_type": "markdown", "metadata": {}, "source": source}


def code(source: str = "1", figure: bool = False, **metadata) -> Cell:
    outputs = [{"output_type": "display_data", "data": {"image/png": "…", "text/plain": "…"}}] if figure else []
    return {"cell_type": "code", "metadata": metadata, "source": source, "outputs": outputs}


ASKED = words(f"Some words.\n\n{BET} How many?")
ANSWERED = words("<details>\n<summary>The answer</summary>\n\n112.\n\n*Because* so.\n\n</details>")
LONG = "\n".join("a = 1" for _ in range(MOST_LINES + 1))
READ = words(f"{SEEN} It falls.")

GOOD = {
    no_burst_is_judged: [
        [code("t = World(2).run(best_of_turns)[0]\nassert t['a'] < t['b']")],
        [code("start = time.perf_counter()\nprint(time.perf_counter() - start)\nstart = 1\nassert start < 2")],
        [code("start = time.monotonic()\nrows = [2 * start for start in range(9)]\nassert rows[1] > rows[0]")],
    ],
    code_is_short: [
        [code(LONG[6:]), code(LONG, jupyter={"source_hidden": True})],
    ],
    one_sitting: [
        [words("a " * 2600), words("## Homework: more\n\n" + "a " * 99), *[code()] * 11],
        [*[code()] * 10, code(figure=True), code("import torch"), code(jupyter={"source_hidden": True})],
    ],
    bets_are_settled: [
        [ASKED, code(), ANSWERED, ASKED, ASKED, ANSWERED, ANSWERED],
        [ASKED, ANSWERED, words("**Try it here.**"), ANSWERED, ASKED, ANSWERED],
        [ASKED, ASKED, ANSWERED, ANSWERED, words("<details>\n<summary>More</summary>\n\nAside.\n\n</details>")],
    ],
    figures_are_read: [
        [code(figure=True), READ, code(figure=True), code(), READ, code()],
    ],
    no_dollars: [
        [words("2 dollars"), code("price = '$2'")],
        [words("So\n\n$$ t = \\alpha $$\n\nit is.")],
    ],
    pictures_have_words: [
        [words("![a bar for each rank](a.png) and <img src='b.png' alt=\"four bars, one for each\">")],
    ],
    bytes_agree: [
        [words("16 bytes a parameter, 20 bytes per parameter, 0.25 bytes a parameter")],
        [words("16 bytes as the ZeRO paper counts, 20 with the FP32 copy of the gradient")],
    ],
}
BAD = {
    no_burst_is_judged: [
        [code("start = time.process_time()"), code("seconds = time.process_time() - start\nassert seconds < 1")],
        [code("measured = run(timing.time_messages)"), code("for a, b in measured.items():\n    assert a < b")],
        [code("assert time.monotonic() - start < 1")],
    ],
    code_is_short: [
        [code(LONG)],
        [code(LONG, jupyter={"outputs_hidden": True})],
    ],
    one_sitting: [
        [words("a " * 2601)],
        [words("a " * 2600 + "\n\n### Homework: more"), words("a")],
        [code()] * 11,
    ],
    bets_are_settled: [
        [],
        [ASKED, ANSWERED],
        [ASKED, ASKED, ANSWERED],
        [ANSWERED, ASKED, ANSWERED, ASKED],
        [ANSWERED, ASKED, ASKED, ANSWERED],
        [ASKED, ASKED, ANSWERED, words("<details>\n<summary>The answer</summary>\n*raw*\n</details>")],
        [ASKED, ASKED, ANSWERED, words("<details><summary>The answer</summary>\n\n112.\n\n</details>")],
        [*[ASKED] * 7, *[ANSWERED] * 7],
    ],
    figures_are_read: [
        [code(figure=True)],
        [READ, code(figure=True), words("Some words.")],
        [code(figure=True), code(figure=True), READ],
    ],
    no_dollars: [
        [words("it costs $2")],
        [words("$$ t = \\alpha $$\n\nit costs $2 and $3")],
    ],
    pictures_have_words: [
        [words("![](a.png)")],
        [words("![four bars](a.png)")],
        [words("<img src='a.png'>")],
        [words('<img src="a.png" alt="four bars">')],
    ],
    bytes_agree: [
        [words("10 bytes a parameter")],
        [words("so 18 bytes for a parameter")],
        [words("16 bytes as the ZeRO paper counts, 18 with the FP32 copy of the gradient")],
    ],
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_sees_what_it_is_for(rule):
    assert [rule(cells) for cells in GOOD[rule]] == [[] for _ in GOOD[rule]]
    for cells in BAD[rule]:
        assert rule(cells), [cell["source"] for cell in cells]


WORDS = """
| English | 中文 | in one line |
|---|---|---|
| rank | 秩 | a worker |
| latency, bandwidth | 延迟，带宽 | … |
| mantissa (significand) | 尾数 | … |
| parameter, gradient, optimizer state | … | … |
"""


def test_the_glossary_is_read():
    assert glossary(WORDS)[:4] == [["rank"], ["latency"], ["bandwidth"], ["mantissa", "significand"]]
    assert glossary(WORDS)[4:] == [["parameter"], ["gradient"], ["optimizer state"]]
    assert terms_are_explained({"00": [words("A gradient for each parameter.")]}, glossary(WORDS)) == []


@pytest.mark.parametrize(
    "first",
    [
        "Each worker has a number, its *rank*.",
        "Here **ranks** are threads of one process.",
        'Four workers ("ranks") train one model.',
        "Four workers (ranks) train one model.",
        "A rank is one of N workers.",
        "Such a worker is called a rank.",
        "Every rank (one of N workers) sends.",
        "# Ranks\n\nA rank is one of N workers.",
        "[Ranks](01_collectives.ipynb) come next; see `rank`.\n\nA rank is one of N workers.",
        "Some words.\n\n## Sources\n\nRanks and rings, 2009.",
        "1. How a rank sends\n2. The end\n\n# 1. How a rank sends\n\nA rank is one of N workers.",
        "| part | **rank** | one of N workers that send |",
        "`rank` (one of N workers) is a number. Every rank has one.",
        "A cranky crank outranks them all.",
    ],
)
def test_an_explanation_is_seen(first):
    assert terms_are_explained({"00": [words(first)]}, [["rank"]]) == []


@pytest.mark.parametrize(
    "first",
    [
        "Every rank sends to its neighbour.",
        "The ranks wait. A rank is one of N workers.",
        "| part | who |\n|---|---|\n| all | every rank of the world |",
        "**Why** every rank has *a part* of the batch.",
        "| rank | 2Ψ | 4Ψ |",
        "*Rank.*",
    ],
)
def test_a_missing_explanation_is_seen(first):
    later = words("A rank is one of N workers.")
    assert len(terms_are_explained({"00": [words(first)], "01": [later]}, [["rank"]])) == 1


def test_the_second_lesson_need_not_explain_again_and_may_not_be_first():
    gloss, use = words("A rank is one of N workers."), words("Every rank sends to its neighbour.")
    assert terms_are_explained({"00": [gloss], "01": [use]}, [["rank"]]) == []
    assert "00 uses 'rank'" in terms_are_explained({"00": [use], "01": [gloss]}, [["rank"]])[0]
