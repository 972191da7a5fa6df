"""Put a wrong answer in place of the package's function, to see its effect: `with broken("forgot-divide"): …`."""

import contextlib
import difflib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.exercises.course import COURSE, Exercise
from tests.exercises.definition import definition
from tests.exercises.kit import Wrong
from tests.exercises.patch import patched
from tests.exercises.runner import load
from tests.exercises.stubs import answer


def wrong_answers() -> Iterator[tuple[Exercise, Wrong]]:
    """All wrong answers of the exercises that are possible here."""
    for exercise in COURSE:
        if exercise.is_possible():
            yield from ((exercise, wrong) for wrong in exercise.load().WRONG)


@contextlib.contextmanager
def broken(name: str) -> Iterator[list[str]]:
    """Inside the block the mistake is in all functions that have a wrong answer of this name.

    name: such as "forgot-divide"; for one exercise only, "ddp_hook/forgot-divide". Yields the names of the functions
    that were replaced. `ValueError` if no wrong answer has this name.
    """
    found = [(e, wrong) for e, wrong in wrong_answers() if name in (wrong.name, f"{e.name}/{wrong.name}")]
    if not found:
        near = difflib.get_close_matches(name, {wrong.name for _, wrong in wrong_answers()}, n=3)
        raise ValueError(
            f"there is no wrong answer {name!r}" + (f": did you mean {' or '.join(near)}?" if near else "")
        )
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for exercise, wrong in found:
            path = folder / exercise.file
            path.write_text(answer(exercise, wrong), encoding="utf-8")
            function = getattr(load(path), exercise.function)
            stack.enter_context(patched(exercise, function))
        yield [definition(exercise).full_name for exercise, _ in found]
