"""A page a student for an oral examination: questions on the student's own code (questions.py), with folded answers."""

from html import escape
from pathlib import Path
from typing import NamedTuple

from tests.exercises.course import Exercise
from tests.exercises.machine.checker import Checker
from tests.exercises.sheet import Sheet

HEAD = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{student}</title>
<style>body {{ max-width: 60em; margin: auto; font-family: sans-serif }} pre {{ background: #f4f4f4 }}
pre, li {{ white-space: pre-wrap }} details {{ margin-bottom: 1em }}</style>
<h1>{student}</h1>
<p>Each question is on a run of the student's own code. What is folded comes from that run.
"""


class Asked(NamedTuple):
    """code: the answer that was handed in. said: the case, the questions and the trace; or why there are none."""

    exercise: Exercise
    code: str
    said: Sheet | str


def ask(exercise: Exercise, path: Path, checker: Checker) -> Asked:
    """Questions on an answer that has passed. What a strange answer makes of them is its own loss."""
    code = path.read_text(encoding="utf-8-sig", errors="replace")
    try:
        outcome = checker.check(exercise, path, "ask")
        asked = outcome.name == "questions"
        said: Sheet | str = Sheet.read(outcome.words) if asked else f"{outcome.name}: {outcome.words}"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    return Asked(exercise, code, said)


def page(student: str, asked: list[Asked]) -> str:
    """The page, in HTML. Whatever came from an answer is shown as text."""
    parts = [HEAD.format(student=escape(student))]
    for exercise, code, said in asked:
        parts.append(f"<h2>{exercise.id} {escape(exercise.title)}</h2>\n")
        lines = "\n".join(f"{number:4}  {line}" for number, line in enumerate(code.splitlines(), 1))
        parts.append(_folded("the code", lines))
        if isinstance(said, str):
            parts.append(f"<p>No questions: {_text(said)}\n")
            continue
        parts.append(f"<p>{_text(said.case)}\n<ol>\n")
        for text, answer in said.questions:
            parts.append(f"<li>{_text(text)}\n{_folded('the answer', answer)}</li>\n")
        parts.append("</ol>\n" + _folded("what happened", "\n".join(said.trace)))
    return "".join(parts)


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary><pre>{_text(text)}</pre></details>\n"


def _text(said: object) -> str:
    return escape(str(said).encode("utf-8", "backslashreplace").decode())
