"""Questions on a run of one's own answer, of which the run itself says what is right: `ask`.

    a scene      a drawn case of an exercise in words, and a function that runs it (scenes.py)
    its trace    in order: a line of the answer gives a variable a value, a rank sends a message
    a question   on a value of the trace; on how far the ranks come if rank 0 stops; on what the scene ends with, as it
                 is or with one statement of the answer left out, always or in one of its runs

One question at least asks for a number that the sheet does not show: it comes of several steps in this drawn case, and
not of the code alone. No question is on a loop's own variable, or on a value that never changes. Who understands the
run answers without running it. Nothing here knows an answer: each comes from the student's code.
"""

import ast
import collections
import contextlib
import copy
import itertools
import math
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import FrameType, ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch

from minizero.ranks.transport import Transport
from tests.exercises import scenes
from tests.exercises.course import Exercise
from tests.exercises.kit import BUSY_PATIENCE, Diagnosis, ranks
from tests.exercises.machine.one_core import one_core
from tests.exercises.machine.runner import Outcome
from tests.exercises.patch import patched
from tests.exercises.sheet import NUMBER, Sheet

STEPS = 20_000  # lines of an answer, after which its loop is said to have no end
SHORT = 8  # numbers of a list or of a tensor that a trace shows
SHOWN = 60  # lines of a trace
RUNS = 8  # of a line, from the first on, that are asked about: nobody counts further
ERROR, NEVER = "error", "never"
UNKNOWN = "a name is missing"  # which is asked only if there is no other question
SKIPS = "_skips"  # a name in an answer from which a statement is left out in one run


class Event(NamedTuple):
    """A line of the answer gave `name` a value. Or, with line 0, a rank sent a message: `name` says to whom.

    rank: None where there are no ranks.
    """

    rank: int | None
    line: int
    name: str
    value: Any

    def __str__(self) -> str:
        who = "" if self.rank is None else f"rank {self.rank}  "
        if self.line:
            return f"{who}line {self.line}  {self.name} = {show(self.value)}"
        return f"{who}sends {self.name}" + (f": {show(self.value)}" if self.value is not None else "")


Question = tuple[str, str]  # in words, and its answer


class Endless(BaseException):
    """A loop of the answer does not end."""


class Stopped(BaseException):
    """Rank 0 was stopped, and the others came as far as they can. sent: bytes of each rank, of calls that returned."""

    def __init__(self, sent: list[int]) -> None:
        super().__init__()
        self.sent = sent


class Trace:
    """What happens while a scene runs: `with Trace(...) as trace`. It sees all ranks.

    with_values: note the values too. A frame that was looked into keeps its variables alive, so bytes are asked of a
    run without. stop: before which of its messages, from 1 on, rank 0 stops.
    """

    def __init__(self, path: Path, tree: ast.Module, *, with_values: bool = False, stop: int = 0) -> None:
        self.path, self.with_values, self.stop = str(path), with_values, stop
        self.named = dict(_named(tree)) if with_values else {}
        self.events: list[Event] = []
        self.lines: set[int] = set()  # that ran
        self.steps = 0
        self.leave = contextlib.ExitStack()

    def __enter__(self) -> "Trace":
        before, move = sys.gettrace(), Transport.move
        sent: dict[int, int] = {}

        def noted(transport: Transport, outgoing: Any, dst: Any, incoming: Any, src: Any) -> None:
            rank = transport.world_rank
            if outgoing is not None:
                sent[rank] = sent.get(rank, 0) + 1
                if rank == 0 and sent[rank] == self.stop:
                    raise Stopped(_as_far_as_they_come(transport))
                if self.with_values:
                    to = f"{outgoing.nbytes} bytes to rank {transport.ranks[dst]}"
                    self.events.append(Event(rank, 0, to, plain(outgoing)))
            move(transport, outgoing, dst, incoming, src)

        self.leave.enter_context(mock.patch.object(Transport, "move", noted))
        if self.stop:  # the others are to wait for rank 0
            self.leave.enter_context(mock.patch.dict(ranks.__kwdefaults__, patience=BUSY_PATIENCE))
        self.leave.callback(sys.settrace, before)
        self.leave.callback(threading.settrace, before)  # type: ignore[arg-type]
        threading.settrace(self._call)
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: Any) -> None:
        self.leave.close()

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        """A function begins. Only those of the answer are followed line by line."""
        if frame.f_code.co_filename != self.path or frame.f_code.co_name.startswith("<"):
            return None
        last = 0

        def follow(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal last
            self.steps += 1
            self.lines.add(frame.f_lineno)
            if self.steps > STEPS:
                raise Endless
            if self.with_values and event in ("line", "return"):
                statement, names = self.named.get(last, (0, ()))
                now = frame.f_lineno if event == "line" else 0
                if statement and self.named.get(now, (0,))[0] != statement:
                    self._note(statement, names, frame.f_locals)
                last = now
            return follow

        return follow

    def _note(self, line: int, names: tuple[str, ...], variables: Any) -> None:
        thread = threading.current_thread().name
        rank = int(thread.split()[1]) if thread.startswith("rank ") else None
        for name in names:
            first, *attributes = name.split(".")
            value = variables.get(first)
            for attribute in attributes:
                value = getattr(value, attribute, None)
            self.events.append(Event(rank, line, name, plain(value)))


def _named(tree: ast.Module) -> Iterator[tuple[int, tuple[int, tuple[str, ...]]]]:
    """Of each line of a statement that gives variables a value: the statement's first line, and their names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [ast.unparse(part) for target in targets for part in getattr(target, "elts", [target])]
            names = [name for name in names if name.replace(".", "").isidentifier()]
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                yield line, (node.lineno, tuple(names))


def _as_far_as_they_come(transport: Any) -> list[int]:
    """Wait until no other rank moves any more: each has returned, or waits, for half a second. Bytes each has sent."""
    seen: list[Any] = []
    while len(seen) < 10 or any(state != seen[-1] for state in seen[-10:]) or None in seen[-1]:
        time.sleep(0.05)
        others = [other for other in transport.run.transports if other.world_rank != transport.world_rank]
        waits = [other.waiting is not None or other.world_rank in transport.run.finished or None for other in others]
        seen.append([*waits, *(other.sent for other in others)])
    return [other.sent for other in transport.run.transports]


@contextlib.contextmanager
def _nothing_left_in_memory() -> Iterator[None]:
    """New memory has NaN in it, where a number of before would be left that nobody can know."""
    resize, before = torch.UntypedStorage.resize_, torch.are_deterministic_algorithms_enabled()

    def filled(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        grows = size > storage.nbytes()
        resize(storage, size)
        return storage.fill_(255) if grows else storage  # type: ignore[attr-defined, no-any-return]

    torch.use_deterministic_algorithms(True, warn_only=True)  # then PyTorch fills what `empty` makes
    try:
        with mock.patch.object(torch.UntypedStorage, "resize_", filled):
            yield
    finally:
        torch.use_deterministic_algorithms(before)


def plain(value: Any) -> Any:
    """The value if a trace can show it in a few words: a number, a word, a few numbers. Else None."""
    if isinstance(value, torch.Tensor):
        if value.numel() > SHORT or value.untyped_storage().nbytes() < value.nbytes:
            return None
        value = value.detach().reshape(-1).tolist()
        return value[0] if len(set(value)) == 1 else value
    if isinstance(value, list | tuple) and 0 < len(value) <= SHORT:
        return list(value) if all(isinstance(x, int | float) for x in value) else None
    return value if isinstance(value, int | float) or isinstance(value, str) and len(value) < 30 else None


def show(value: Any) -> str:
    """In words, as a student would type it."""
    if isinstance(value, list | tuple):
        return " ".join(map(show, value)) or "nothing"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.0f}" if value.is_integer() else f"{value:.6g}"
    return str(value)


@one_core()
def ask(exercise: Exercise, path: Path) -> Outcome:
    """Three questions on the answer in `path`, which has passed: an `Outcome` whose words are a `Sheet`.

    The case is drawn from the path and the text of the answer, and from the environment variable SEED, or else anew.
    """
    source = path.read_text(encoding="utf-8-sig")
    random = Random(f"{os.environ.get('SEED') or secrets.token_hex()} {path} {source}")
    examiner = Examiner(exercise, path, ast.parse(source), getattr(scenes, exercise.name)(random), random)
    if isinstance(examiner.end, str):
        return Outcome("failed", "no-end", f"The run on which there are questions does not end well: {examiner.end}.")
    sheet = Sheet(examiner.scene.words, examiner.questions(), examiner.trace())
    return Outcome("passed", "questions", sheet.write())


class Examiner:
    """The questions on one answer, in one scene."""

    def __init__(self, exercise: Exercise, path: Path, tree: ast.Module, scene: scenes.Scene, random: Random) -> None:
        self.exercise, self.path, self.tree, self.scene, self.random = exercise, path, tree, scene, random
        self.code = path.read_text(encoding="utf-8-sig").splitlines()
        self.end = self.run(tree, Trace(path, tree))
        self.seen = Trace(path, tree, with_values=True)
        self.run(tree, self.seen)
        last = max((event.rank for event in self.seen.events if event.rank is not None), default=None)
        self.rank = last and random.randint(1, last)

    def run(self, tree: ast.Module, trace: Trace) -> Any:
        """What the scene ends with, with this code of the answer inside: a dict, or ERROR, NEVER, UNKNOWN."""
        module = ModuleType(f"answer_{self.path.stem}")
        setattr(module, SKIPS, _skips())
        try:
            with trace, _nothing_left_in_memory():
                exec(compile(tree, str(self.path), "exec"), module.__dict__)
                with patched(self.exercise, getattr(module, self.exercise.function)):
                    return self.scene.run()
        except Stopped:
            raise
        except Endless:
            return NEVER
        except NameError:
            return UNKNOWN
        except Diagnosis as diagnosis:
            return NEVER if diagnosis.name == "deadlock" else ERROR
        except (Exception, SystemExit):
            return ERROR

    def questions(self) -> list[Question]:
        """Three, of different kinds if there are."""
        ends = [(text, show(value)) for text, value in self.end.items()]
        ends = self.random.sample(ends, len(ends))
        first = next((end for end in ends if self.is_computed(end[1])), ends[0])
        two = self.random.sample([first, self.random.choice([self.a_value, self.rank_0_stops])()], 2)
        asked = list(dict.fromkeys(question for question in [*two, self.a_value(), *ends] if question))
        return [*asked[:2], self.left_out(asked[:2]) or asked[2]]

    def is_computed(self, answer: str) -> bool:
        """Whether it has a number that the sheet does not show."""
        return bool(set(re.findall(NUMBER, answer)) - set(re.findall(NUMBER, f"{self.scene.words} -1 0 1")))

    def rank_0_stops(self) -> Question | None:
        """How many bytes a rank has sent when nothing moves any more."""
        mine = [event for event in self.seen.events if event.rank == 0 and not event.line]
        if self.rank is None or len(mine) < 3:
            return None
        stop = self.random.randint(2, len(mine) - 1)
        try:
            self.run(self.tree, Trace(self.path, self.tree, stop=stop))
        except Stopped as stopped:
            words = f"Rank 0 stops before it sends its message number {stop} (it has sent {stop - 1}). The others go "
            words += "on until nothing moves. What is comm.bytes_sent then on each of them, from rank 1 on? (A call "
            words += "that has not returned does not count.)"
            return words, show(stopped.sent[1:])
        return None

    def a_value(self) -> Question | None:
        """What a variable is, or what a message has, at some moment on the rank; rather one that changes."""
        values = {text: value for text, value in self.values(self.seen).items() if value is not None}
        if not values:
            return None
        text = self.random.choice(list(values))
        return text, values[text]

    def values(self, trace: Trace) -> dict[str, str | None]:
        """Of each question on a value of the trace the answer. None: nobody can know it, or it never changes."""
        found: dict[str, str | None] = {}
        times: dict[tuple[int, str], list[str]] = {}
        where = "" if self.rank is None else f" on rank {self.rank}"
        for event in trace.events:
            if event.rank != self.rank:
                continue
            runs = times.setdefault((event.line, event.name if event.line else ""), [])
            value, number = show(event.value), len(runs) + 1
            if event.line:
                text = f"What is `{event.name}`{where} after run {number} of line {event.line}?\n"
                text += self.quote(event.line)
            else:
                text = f"What does message {number}{where} have in it? (If all its numbers are equal, that one.)"
            known = isinstance(event.value, int | float | list) and not isinstance(event.value, bool)
            new = runs and len(runs) < RUNS and value != runs[0] and self.is_computed(value)
            found[text] = value if known and "nan" not in value and new else None
            runs.append(value)
        return found

    def left_out(self, asked: list[Question]) -> Question | None:
        """What changes if a statement of the answer is left out; now and then nothing does. asked: not so again."""
        ends, values, others, missing = (list[Question]() for _ in range(4))
        lines = [line for line in _statements(self.tree, self.exercise.function) if line in self.seen.lines]
        ways = [*itertools.product(lines, (0, 2, 3))]
        before = self.values(self.seen)
        for line, run in self.random.sample(ways, min(len(ways), 16)):
            tree = _without(self.tree, line, run)
            when = f" in its run {run}{'' if self.rank is None else ' on each rank'}" if run else ""
            words = f"Line {line} is left out{when}:\n{self.quote(line)}\n"
            end = self.run(tree, Trace(self.path, tree))
            for text, value in self.end.items():
                now = end if isinstance(end, str) else show(end[text])
                if now in (ERROR, NEVER, show(value)):
                    others += [(words + text, now)] if (text, now) not in asked else []
                elif now == UNKNOWN:
                    missing.append((words + text, ERROR))
                elif "nan" not in now and self.is_computed(now):
                    ends.append((words + text, now))
            if isinstance(end, dict):
                seen = Trace(self.path, tree, with_values=True)
                self.run(tree, seen)
                changed = {text: value for text, value in self.values(seen).items() if before.get(text) != value}
                values += [(words + text, v) for text, v in changed.items() if v and self.quote(line) not in text]
        found = [kind for kind in (ends, values) if kind] or [others or missing]
        if others and self.random.random() < 0.2:
            found = [others]
        if not found[0]:
            return None
        words, now = self.random.choice(self.random.choice(found))
        return f"{words}\nAnswer `{ERROR}` if the run then ends with an error, `{NEVER}` if it does not end.", now

    def quote(self, line: int) -> str:
        return f"    {line}: {self.code[line - 1].strip()}"

    def trace(self) -> list[str]:
        """What happened, on the rank that was asked about."""
        mine = [event for event in self.seen.events if event.rank == self.rank]
        lines = [str(event) for event in mine if event.value is not None or not event.line]
        return lines[:SHOWN] + ([f"… and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else [])


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            if isinstance(block := getattr(node, field, None), list):
                yield block


def _statements(tree: ast.Module, function: str) -> list[int]:
    """First lines of the simple statements of the function."""
    own = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == function][-1]
    simple = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Delete, ast.Continue, ast.Break)
    found = [s for block in _blocks(own) for s in block if isinstance(s, simple)]
    return [s.lineno for s in found if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]


def _without(tree: ast.Module, line: int, run: int = 0) -> ast.Module:
    """The tree with `pass` in place of the statements that begin in this line; of a thread only in that run, if any."""
    tree = copy.deepcopy(tree)
    for block in _blocks(tree):
        for place, statement in enumerate(block):
            if statement.lineno == line and not hasattr(statement, "body"):
                test = ast.parse(f"{SKIPS}({run})", mode="eval").body
                skip = ast.copy_location(ast.Pass(), statement)
                block[place] = ast.copy_location(ast.If(test, [skip], [statement]), statement) if run else skip
    return ast.fix_missing_locations(tree)


def _skips() -> Callable[[int], bool]:
    """A function that says of its calls in a thread which one has this number."""
    calls = collections.Counter[int]()

    def skips(run: int) -> bool:
        calls[threading.get_ident()] += 1
        return calls[threading.get_ident()] == run

    return skips
