"""The commands of the course: what `make exercises`, `make check E=05`, … call. Output fits 80 columns."""

import argparse
import shutil
import sys
import textwrap
import time
from pathlib import Path

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from tests.exercises.course import COURSE, NO_TRITON, Exercise, find
from tests.exercises.machine.checker import Checker
from tests.exercises.machine.runner import Outcome
from tests.exercises.sheet import Sheet, is_right
from tests.exercises.workbook import Workbook

console = Console(width=min(80, shutil.get_terminal_size().columns), highlight=False)


def main(argv: list[str] | None = None) -> int:
    """The exit status: 0; 1 if an exercise has not passed; 2 if the command line is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.exercises", description="The exercises of the course.")
    commands = parser.add_subparsers(dest="command", required=True)
    chosen = {
        "list": (show_list, "all exercises, and where you are; writes workbook/ the first time"),
        "check": (check, "check an exercise, by default the one you are at"),
        "hint": (hint, "one more hint"),
        "watch": (watch, "check on every save, until Ctrl-C"),
        "questions": (questions, "three questions on a run of your own answer, once it has passed"),
        "solution": (solution, "the package's own function, once you have passed"),
        "reset": (reset, "begin an exercise anew; what you wrote is kept in workbook/old"),
    }
    for name, (_, help_) in chosen.items():
        command = commands.add_parser(name, help=help_, description=help_)
        if name not in ("list", "watch"):
            command.add_argument("exercise", nargs="?", help="05, or reduce_scatter")
        if name == "list":
            command.add_argument(
                "--no-plan", action="store_true", help="the files that it writes have no numbered plan"
            )
        if name == "solution":
            command.add_argument("--insist", action="store_true", help="show it although you have not passed")
    book = commands.add_parser("gradebook", help="check a folder of submissions: a CSV of exercise × student")
    book.add_argument("folder", type=Path, help="a folder for each student, with files such as 05_reduce_scatter.py")
    book.add_argument("--output", type=Path, help="default: gradebook.csv in that folder")
    grader = commands.add_parser("autograder", help="what Gradescope and GitHub Actions take, to check submissions")
    for command in (book, grader):
        command.add_argument("exercises", nargs="*", metavar="exercise", help="05, or reduce_scatter; default: all")
    grader.add_argument("--output", type=Path, default=Path("results/autograder"), help="default: %(default)s")
    arguments = parser.parse_args(argv)
    try:
        if arguments.command in ("autograder", "gradebook"):
            from tests.exercises.machine import autograder, gradebook

            exercises = [find(word) for word in arguments.exercises] or COURSE
            if arguments.command == "autograder":
                return autograder.write(arguments.output, exercises, console)
            return gradebook.write(arguments.folder, arguments.output, console, exercises)
        return chosen[arguments.command][0](arguments, Workbook())
    except (ValueError, OSError) as error:
        print(f"exercises: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def show_list(arguments: argparse.Namespace, workbook: Workbook) -> int:
    if arguments.no_plan:
        workbook.state["plan"] = False
        workbook.save()
    if not workbook.folder.exists():
        console.print("Writing a file for each exercise …")
    written = workbook.fill()
    current = workbook.current()
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for title in ("", "no", "exercise", "file"):
        table.add_column(title, no_wrap=True)
    table.add_column("min", justify="right", no_wrap=True)
    for exercise in COURSE:
        passed = workbook.has_passed(exercise)
        mark = "✓" if passed else "→" if exercise is current else "-" if not exercise.is_possible() else " "
        style = "green" if passed else "bold" if exercise is current else ""
        title = exercise.title + (" ★" if exercise.core else "")
        table.add_row(mark, exercise.id, title, exercise.name, str(exercise.minutes), style=style)
    console.print(table)
    console.print()
    done = sum(map(workbook.has_passed, COURSE))
    filled = round(40 * done / len(COURSE))
    console.print(Text("█" * filled, "green") + Text("░" * (40 - filled)) + f" {done} of {len(COURSE)} passed")
    console.print(f"★ the core, for a short course: {', '.join(e.id for e in COURSE if e.core)}")
    if not all(e.is_possible() for e in COURSE):
        console.print("- needs Triton: Linux, WSL or Colab. It blocks nothing.")
    if written:
        console.print(f"Wrote {written} files to {_short(workbook.folder)}/. They are yours: no pull will touch them.")
    if current is None:
        console.print("\nThat was all of them.")
        return 0
    console.print(f"\nOpen [bold]{_short(workbook.path(current))}[/] and follow its plan.", soft_wrap=True)
    console.print("Then: make check.   Stuck: make hint.   On every save: make watch.")
    return 0


def check(arguments: argparse.Namespace, workbook: Workbook) -> int:
    workbook.fill()
    every = arguments.exercise == "all"
    exercises = COURSE if every else [_chosen(arguments.exercise, workbook)]
    with Checker() as checker:
        outcomes = [check_one(exercise, workbook, checker, with_after=not every) for exercise in exercises]
    return int(any(outcome.status in ("failed", "todo") for outcome in outcomes))


def check_one(exercise: Exercise, workbook: Workbook, checker: Checker, *, with_after: bool = True) -> Outcome:
    """Check an exercise, print the outcome, and write down whether it passed.

    with_after: if it has passed, also print what the package does differently.
    """
    outcome = checker.check(exercise, workbook.path(exercise))
    if outcome.status != "impossible":
        workbook.note(exercise, passed=outcome.status == "passed")
    name = f"{exercise.id} {exercise.title}"
    if outcome.printed:
        console.print("Your code printed:", style="dim")
        say("\n".join(outcome.printed.splitlines()[-12:]))
    if outcome.status == "passed":
        console.print(f"[green]✓ {name}: passed.[/] The {exercise.runs} ran with your {exercise.function} inside.")
        if with_after:
            say(exercise.text().after)
        if following := workbook.following(exercise):
            console.print(f"  Next: {_short(workbook.path(following))} (make check E={following.id})")
        return outcome
    mark = {"failed": "[red]✗[/]", "todo": "[yellow]·[/]", "impossible": "-"}[outcome.status]
    console.print(f"{mark} {name}")
    say(outcome.words)
    if outcome.status == "todo":
        say(f"Open {_short(workbook.path(exercise))} and follow its plan.")
    if outcome.status == "failed":
        left = len(exercise.text().hints) - workbook.hints_given(exercise)
        if left > 0:
            say(f"({left} hint{'s' if left > 1 else ''} left: make hint E={exercise.id})")
    return outcome


def hint(arguments: argparse.Namespace, workbook: Workbook) -> int:
    """The hints that were given, and one more."""
    exercise = _chosen(arguments.exercise, workbook)
    hints = exercise.text().hints
    if workbook.hints_given(exercise) < len(hints):
        workbook.note_hint(exercise)
    given = workbook.hints_given(exercise)
    console.print(f"{exercise.id} {exercise.title}")
    for number, text in enumerate(hints[:given], 1):
        style = "bold" if number == given else "dim"
        say(f"Hint {number} of {len(hints)}: {' '.join(text.split())}", style)
    if given == len(hints):
        insist = "" if workbook.has_passed(exercise) else " INSIST=1"
        console.print(f"That was the last one. The reference: make solution E={exercise.id}{insist}")
    return 0


def watch(_: argparse.Namespace, workbook: Workbook) -> int:
    """Look at the files twice a second, and check those that were saved."""
    workbook.fill()
    seen = {exercise: _saved(workbook.path(exercise)) for exercise in COURSE}
    console.print(f"Watching {_short(workbook.folder)}/: save a file, and it is checked. Ctrl-C ends this.")
    current = workbook.current()
    if current is not None:
        console.print(f"You are at {_short(workbook.path(current))}")
    with Checker() as checker:  # one for all, so that torch is imported once
        while True:
            for exercise in COURSE:
                saved = _saved(workbook.path(exercise))
                if saved != seen[exercise]:
                    seen[exercise] = saved
                    if saved is not None:
                        console.rule(time.strftime("%H:%M:%S"))
                        check_one(exercise, workbook, checker)
            time.sleep(0.5)


def questions(arguments: argparse.Namespace, workbook: Workbook) -> int:
    """Check the answer, ask, and show what happened in the run."""
    exercise = _chosen(arguments.exercise, workbook)
    if not exercise.core:
        raise ValueError(f"there are questions on the core only: {', '.join(e.id for e in COURSE if e.core)}")
    with Checker() as checker:
        outcome = checker.check(exercise, workbook.path(exercise))
        workbook.note(exercise, passed=outcome.status == "passed")
        if outcome.status == "passed":
            outcome = checker.check(exercise, workbook.path(exercise), "ask")
    name = f"{exercise.id} {exercise.title}"
    if outcome.status != "passed":
        console.print(f"{name} must pass before there are questions: make check E={exercise.id}")
        say(outcome.words)
        return 1
    sheet = Sheet.read(outcome.words)
    console.print(f"{name}: a run of {_short(workbook.path(exercise))}")
    say(sheet.case)
    say("Answer without running it. Several numbers are typed with spaces between them.", "dim")
    right = 0
    for number, (text, answer) in enumerate(sheet.questions, 1):
        console.print()
        say(f"{number}. {text}")
        try:
            good = is_right(input("  > "), answer)
        except EOFError:
            good = False
        right += good
        say("✓" if good else f"✗ The run says {answer}", "green" if good else "red")
    console.print(f"\n{right} of {len(sheet.questions)} right. What happened:")
    say("\n".join(sheet.trace))
    return 0


def solution(arguments: argparse.Namespace, workbook: Workbook) -> int:
    exercise = _chosen(arguments.exercise, workbook)
    if not workbook.has_passed(exercise) and not arguments.insist:
        left = len(exercise.text().hints) - workbook.hints_given(exercise)
        console.print(f"{exercise.id} {exercise.title} has not passed yet.")
        if left > 0:
            console.print(f"{left} hint{'s are' if left > 1 else ' is'} left: make hint E={exercise.id}")
        console.print(f"If you insist: make solution E={exercise.id} INSIST=1")
        return 1
    from tests.exercises.definition import definition
    from tests.exercises.stubs import reference

    console.print(f"{definition(exercise).full_name}, the reference:\n")
    console.print(Syntax(reference(exercise), "python", word_wrap=True, background_color="default"))
    console.print()
    say(exercise.text().after)
    return 0


def reset(arguments: argparse.Namespace, workbook: Workbook) -> int:
    if arguments.exercise is None:
        raise ValueError("name the exercise that begins anew, such as make reset E=05")
    exercise = find(arguments.exercise)
    kept = workbook.reset(exercise)
    console.print(f"{exercise.id} {exercise.title} begins anew: {_short(workbook.path(exercise))}")
    if kept is not None:
        console.print(f"What you had is in {_short(kept)}")
    return 0


def _chosen(word: str | None, workbook: Workbook) -> Exercise:
    """The exercise named, or the current one."""
    exercise = find(word) if word else workbook.current()
    if exercise is None:
        raise ValueError("all exercises have passed: name one, such as make check E=05")
    if not exercise.is_possible():
        console.print(NO_TRITON)
    return exercise


def _saved(path: Path) -> tuple[int, int] | None:
    """When a file was saved, and its size. None if there is no file, as for a moment while an editor saves."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def say(text: str, style: str = "") -> None:
    """Print `text` indented, and wrapped at the console's width."""
    for line in text.splitlines():
        for part in textwrap.wrap(line, console.width - 2, break_on_hyphens=False) or [""]:
            console.print(Text("  " + part, style))


def _short(path: Path) -> str:
    try:
        return path.resolve().relative_to(Path.cwd()).as_posix()
    except ValueError:
        return str(path)
