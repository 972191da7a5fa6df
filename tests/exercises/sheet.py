"""A sheet of questions with their answers, as text, and whether an answer that was typed is right. Loads no torch."""

import json
import math
import re
from typing import NamedTuple

NUMBER = r"-?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"


class Sheet(NamedTuple):
    """case: what was drawn, in words. questions: each with its answer. trace: what happened, in order."""

    case: str
    questions: list[tuple[str, str]]
    trace: list[str]

    def write(self) -> str:
        """The sheet as JSON."""
        return json.dumps(self._asdict())

    @staticmethod
    def read(text: str) -> "Sheet":
        """The sheet that was written. `ValueError` if it is none: it comes from a process that ran an answer."""
        try:
            read = json.loads(text)
            questions = [(str(question), str(answer)) for question, answer in read["questions"]]
            return Sheet(str(read["case"]), questions, [str(line) for line in read["trace"]])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is no sheet of questions: {text[:80]}") from error


def is_right(said: str, answer: str) -> bool:
    """Whether `said` is the answer: its numbers, to a thousandth, or its words."""
    want = re.findall(NUMBER, answer)
    if not want or not all(re.fullmatch(NUMBER, word) for word in answer.split()):
        return said.split() == answer.split()
    said = re.sub(r"(?<=\d),(?=\d{3}\b)", "", said) if len(want) == 1 else said  # 1,024 is one number
    got = re.findall(NUMBER, said)
    return len(got) == len(want) and all(math.isclose(float(a), float(b), rel_tol=1e-3) for a, b in zip(got, want))
