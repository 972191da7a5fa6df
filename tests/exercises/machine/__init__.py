"""What checks an answer: against answers that hang, crash, forge a verdict or read what they may not.

    runner.py      an answer runs in the drawn cases
    judge.py       what it did there is compared with what is right
    checker.py     two processes for it, and limits
    one_core.py    ranks of threads take turns on one core, which is quicker
    sandbox.py     shuts strangers' answers in
    gradebook.py   a folder of submissions becomes tables of marks
    oral.py        and pages of questions
    autograder.py  one submission, on Gradescope or in GitHub Actions (services/ has what runs there)

A student who reads an exercise does not need these.
"""
