"""Questions on a run: what they say is right agrees with a count by hand, and comes from the answer itself."""

import ast
import re
from random import Random

import pytest
from rich.console import Console

from tests.exercises import commands, questions, scenes, stubs
from tests.exercises.course import COURSE, find
from tests.exercises.machine import gradebook, oral
from tests.exercises.machine.checker import Checker
from tests.exercises.machine.runner import Outcome
from tests.exercises.sheet import NUMBER, Sheet, is_right
from tests.exercises.workbook import Workbook

CORE = [exercise for exercise in COURSE if exercise.core]
RING, SCALER, ZERO2 = find("reduce_scatter"), find("dynamic_scaler"), find("zero2_free")


def examiner(exercise, folder, seed=0, edits=()):
    """One that asks about the package's own function, with edits."""
    text = stubs.answer(exercise)
    for old, new in edits:
        assert text.count(old) == 1
        text = text.replace(old, new)
    path = folder / exercise.file
    path.write_text(text)
    random = Random(seed)
    return questions.Examiner(exercise, path, ast.parse(text), getattr(scenes, exercise.name)(random), random)


@pytest.mark.slow
@pytest.mark.parametrize("exercise", CORE, ids=lambda exercise: exercise.name)
def test_each_exercise_of_the_core_has_three_questions(exercise, tmp_path, monkeypatch):
    path = tmp_path / exercise.file
    path.write_text(stubs.answer(exercise))
    sheets = []
    for seed in ("1", "1", "2"):
        monkeypatch.setenv("SEED", seed)
        sheets.append(Sheet.read(questions.ask(exercise, path).words))
    assert sheets[0] == sheets[1] and sheets[0].case != sheets[2].case
    for sheet in sheets[1:]:
        assert len({text for text, _ in sheet.questions}) == 3
        assert all(answer and is_right(answer, answer) for _, answer in sheet.questions)
        assert "is left out" in sheet.questions[-1][0]
        shown = {*re.findall(NUMBER, sheet.case), "0", "1", "-1"}
        assert any(set(re.findall(NUMBER, answer)) - shown for _, answer in sheet.questions), "all can be read off"


@pytest.mark.accuracy
def test_when_rank_0_stops_the_others_come_as_far_as_the_ring_lets_them(tmp_path):
    """Who is d steps from rank 0, on the nearer side, ends d - 1 calls more than rank 0, and at most all of them."""
    for seed in range(2):
        asks = examiner(RING, tmp_path, seed)
        text, answer = asks.rank_0_stops()
        n, length = map(int, re.match(r"(\d) ranks. Chunk c of rank k is (\d)", asks.scene.words).groups())
        ended = int(re.search(r"it has sent (\d)", text)[1])
        calls = [min(n - 1, ended + min(rank, n - rank) - 1) for rank in range(1, n)]
        assert answer == " ".join(str(4 * length * each) for each in calls)


def test_a_trace_has_the_messages_of_every_rank(tmp_path):
    """Rank r sends chunk r-1 first, and in step s the sum of chunk r-1-s on s+1 ranks, as combine adds them."""
    asks = examiner(RING, tmp_path)
    n = int(asks.scene.words[0])
    factor = int(re.search(r"is (-?\d) a \+ b", asks.scene.words)[1])
    for rank in range(n):
        sent = [event.value for event in asks.seen.events if event.rank == rank and not event.line]
        for step, value in enumerate(sent):
            chunk = (rank - 1 - step) % n
            want = 0
            for each in range(rank - step, rank + 1):
                want = factor * want + (each % n + 2 * chunk) % 3
            assert value == want
        assert len(sent) == n - 1


def test_the_answers_are_those_of_the_code_that_was_handed_in(tmp_path):
    """The same ring with a buffer for each step, which the check would not let pass, holds more."""
    text = "How many bytes of new tensors are alive at most on a rank, at one moment?"
    lean = examiner(RING, tmp_path).end
    more = [
        ("count = min(comm.transport.ring_buffers(partial), comm.size - 1)", "count = comm.size - 1"),
        ("buffers[step % len(buffers)]", "buffers[step]"),
    ]
    fat = examiner(RING, tmp_path, edits=more)
    n = int(fat.scene.words[0])
    assert fat.end[text] * 2 == lean[text] * (n - 1)


def test_a_statement_that_is_left_out_shows_in_the_bytes(tmp_path):
    """Without `del full` the padded gradient of the unit before is alive while the next one is computed."""
    asks = examiner(ZERO2, tmp_path)
    n, dtype = int(asks.scene.words[0]), re.search(r"elements of (\w+)", asks.scene.words)[1]
    elements = [int(x) for x in re.search(r"with ([\d, ]+) elements", asks.scene.words)[1].split(", ")]
    padded = [-(-x // n) * n for x in elements]
    held = asks.end[next(text for text in asks.end if "first micro-batch" in text)]
    assert held == [sum(4 * x // n for x in padded[:unit]) for unit in range(4)]
    line = next(i for i, text in enumerate(asks.code, 1) if text.strip().startswith("del full"))
    tree = questions._without(asks.tree, line)
    end = asks.run(tree, questions.Trace(asks.path, tree))
    size = {"float32": 4, "bfloat16": 2}[dtype]
    assert [more - less for more, less in zip(end[next(iter(end))], held)] == [0, *(size * x for x in padded[:3])]


def test_a_statement_that_is_left_out_once_changes_one_step(tmp_path):
    """Without its third run the sum of the weighted losses lacks the third micro-batch that has targets."""
    asks = examiner(find("accumulation"), tmp_path)
    line = next(i for i, text in enumerate(asks.code, 1) if text.strip().startswith("loss += "))
    tree = questions._without(asks.tree, line, 3)
    less = asks.run(tree, questions.Trace(asks.path, tree))["What is returned?"]
    weight = int(re.search(r"w = (\d)", asks.scene.words)[1])
    batches = [tuple(map(int, two)) for two in re.findall(r"(\d+) targets, all (-?\d+)", asks.scene.words)]
    count, value = [batch for batch in batches if batch[0]][2]
    lost = count * (weight - value) ** 2 / sum(count for count, _ in batches)
    assert lost and asks.end["What is returned?"] - less == pytest.approx(lost)
    assert "targets" not in {event.name for event in asks.seen.events}, "a loop's variable is no question"


def test_a_loop_without_an_end_is_an_answer(tmp_path):
    endless = "    step = 0\n    while step < 3:\n        step += 1\n    self._growth_tracker ="
    asks = examiner(SCALER, tmp_path, edits=[("    self._growth_tracker = 0 if", f"{endless} 0 if")])
    line = next(i for i, text in enumerate(asks.code, 1) if text.strip() == "step += 1")
    tree = questions._without(asks.tree, line)
    assert asks.run(tree, questions.Trace(asks.path, tree)) == questions.NEVER
    assert {"step"} < {event.name for event in asks.seen.events}


@pytest.mark.parametrize(
    ("said", "answer", "right"),
    [
        ("1,024 bytes", "1024", True),
        ("1024", "1025", True),
        ("1024", "1026", False),
        ("[0, 1, 2]", "0 1 2", True),
        ("0 1", "0 1 2", False),
        ("0.3333", "0.333333", True),
        ("-2", "2", False),
        ("Error", "error", False),
        ("never ", "never", True),
        ("", "nothing", False),
        ("1e3", "1000", True),
    ],
)
def test_what_was_typed(said, answer, right):
    assert is_right(said, answer) is right


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"case": "", "questions": [1], "trace": []}'])
def test_what_is_no_sheet_is_refused(text):
    with pytest.raises(ValueError, match="no sheet"):
        Sheet.read(text)


def test_the_command_takes_answers_and_shows_the_trace(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MINIZERO_WORKBOOK", str(tmp_path))
    sheet = Sheet("Two ranks.", [("How many?", "12"), ("And now?", "error")], ["rank 0  line 9  x = 3"])
    said = {"examine": Outcome("passed", "passed", "Passed."), "ask": Outcome("passed", "questions", sheet.write())}
    monkeypatch.setattr(Checker, "check", lambda self, exercise, path, what="examine": said[what])
    typed = iter(["12", "13"])
    monkeypatch.setattr("builtins.input", lambda _: next(typed))
    assert commands.main(["questions", "05"]) == 0
    printed = capsys.readouterr().out
    assert "1 of 2 right" in printed and "The run says error" in printed and "x = 3" in printed
    assert Workbook(tmp_path).has_passed(RING)
    said["examine"] = Outcome("failed", "off-by-one", "No.")
    assert commands.main(["questions", "05"]) == 1
    assert "must pass before" in capsys.readouterr().out and not Workbook(tmp_path).has_passed(RING)
    assert commands.main(["questions", "01"]) == 2


SPOILS = """
import sys
if "tests.exercises.questions" in sys.modules:
    {}
"""


@pytest.mark.slow
def test_what_an_answer_does_to_its_questions_is_lost_to_its_own_page(tmp_path):
    forged = Sheet("</pre><script>", [("<b>", "&")], []).write()
    spoils = {
        "exits": "import os; os._exit(0)",
        "forges": f"sys.modules['tests.exercises.questions'].Sheet.write = lambda _: {forged!r}",
        "ada": "# </pre><script>",
    }
    pages = {}
    with Checker() as checker:
        for name, line in spoils.items():
            (tmp_path / name).write_text(SPOILS.format(f"pass; {line}") + stubs.answer(SCALER))
            pages[name] = oral.page(name, [oral.ask(SCALER, tmp_path / name, checker)])
    assert pages["ada"].count("<summary>the answer</summary>") == 3
    assert "# &lt;/pre&gt;" in pages["ada"] and not [name for name in pages if "<script>" in pages[name]]
    assert "No questions: ended" in pages["exits"] and "&lt;b&gt;" in pages["forges"]


def test_the_gradebook_writes_a_page_for_who_passed(tmp_path, monkeypatch):
    exercises = [SCALER, find("pad")]
    sheet = Sheet("Here.", [("How many?", "12")], [])
    said = {"examine": Outcome("passed", "passed", "Passed."), "ask": Outcome("passed", "questions", sheet.write())}

    def check(checker, exercise, path, what="examine"):
        return said[what] if "ada" in path.read_text() else Outcome("failed", "never-grows", "No.")

    monkeypatch.setattr(Checker, "check", check)
    for name in ("ada", "bob"):
        (tmp_path / name).mkdir()
        for exercise in exercises:
            (tmp_path / name / exercise.file).write_text(f"# {name} {exercise.id}")
    for _ in range(2):  # the second time the folder of pages is no student
        assert gradebook.write(tmp_path, None, Console(quiet=True), exercises) == 0
    assert (tmp_path / "gradebook.csv").read_text().startswith("exercise,ada,bob\n")
    (page,) = (tmp_path / "oral").iterdir()
    text = page.read_text()
    assert page.name == "ada.html" and "ada 26" in text and "ada 01" not in text
    assert text.index("How many?") < text.index("<details><summary>the answer") < text.index("12</pre>")
