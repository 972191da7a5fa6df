"""The course: exercises cut from functions of the packages, or from tasks/, with checks that are checked themselves.

    course.py      the exercises in their order
    e05_….py       one exercise: its idea, plan, hints, what to see afterwards, check, and wrong answers, each with
                   the diagnosis that it provokes
    tasks/         functions that are exercises and no part of a package
    kit.py         what the checks are made of; rank_kit.py, number_kit.py and triton_kit.py: for some
    definition.py  where a package defines the function of an exercise
    stubs.py       a function of a package becomes a stub, a wrong answer, or the reference, in a file
    patch.py       an answer takes the place of the package's function, everywhere
    commands.py    what `make exercises`, `make check`, … call; workbook.py keeps what a student has done
    plugin.py      `pytest workbook/05_reduce_scatter.py`
    machine/       an answer is checked, in a process of its own; a class of answers becomes tables of marks
    breaking.py    a wrong answer inside the package, to see what it does
    selfcheck.py   what the checks say about stubs, references and wrong answers (tests/test_exercises.py)

A new exercise is a row in course.py and a module beside the others; the tests say what it still lacks.
`python -m tests.exercises --help` lists the commands.
"""
