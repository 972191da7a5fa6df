"""Put a wrong answer in place of the package's function, to see its effect: `with broken("forgot-divide"): …`."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.exercises.course import COURSE, Exercise
from tests.exercises.definition import definition
from tests.exercises.kit import Wrong, wrong
from tests.exercises.machine.runner import load
from tests.exercises.patch import patched
from tests.exercises.stubs import mistaken

# Mistakes in the engines' own methods, which are shorter than what the exercises on them ask for.
ZERO2 = Exercise(0, "zero2", "", "minizero.engines", "CoreZero2.reduce", 0)
ZERO3 = Exercise(0, "zero3", "", "minizero.engines", "CoreZero3.release", 0)
MEAN = 'unit.set_gradient(reduce_scatter(gradient, self.comm, "mean", label=unit.name))'
VIEW = """mine = unit.chunk(gradient)
    reduce_scatter(gradient, self.comm, "mean", out=mine, label=unit.name)
    unit.set_gradient(mine)"""
MORE = [
    (ZERO2, wrong("forgot-divide", "", ('"mean"', '"sum"'))),
    (ZERO2, wrong("does-not-free", "", (MEAN, VIEW))),
    (ZERO3, wrong("frees-nothing", "", ("unit.replica.untyped_storage().resize_(0)", "pass"))),
]


def wrong_answers() -> Iterator[tuple[Exercise, Wrong]]:
    """All wrong answers of the exercises that are possible here, and more of the engines."""
    for exercise in COURSE:
        if exercise.is_possible():
            yield from ((exercise, mistake) for mistake in exercise.load().WRONG)
    yield from MORE


@contextlib.contextmanager
def broken(name: str) -> Iterator[list[str]]:
    """Inside the block the mistake is in all functions that have a wrong answer of this name.

    name: such as "forgot-divide"; for one function only, "ddp_hook/forgot-divide" or "zero2/forgot-divide". Yields
    the names of the functions that were replaced. `ValueError` if no wrong answer has this name.
    """
    found = [(e, mistake) for e, mistake in wrong_answers() if name in (mistake.name, f"{e.name}/{mistake.name}")]
    if not found:
        raise ValueError(f"there is no wrong answer {name!r}")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for exercise, mistake in found:
            path = folder / exercise.file
            path.write_text(mistaken(exercise, mistake), encoding="utf-8")
            function = getattr(load(path), exercise.function)
            stack.enter_context(patched(exercise, function))
        yield [definition(exercise).full_name for exercise, _ in found]
