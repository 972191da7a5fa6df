"""Memory X-ray: why did I run out, and what would help? For a model of your own, before you rent the card.

    python -m minizero.xray train.py:make --card 4090 --fit      as on one card: what makes it fit?
    python -m minizero.xray train.py:make --ranks 8              8 cards, with ZeRO's rows
    python -m minizero.xray --hf config.json --batch 1 --length 2048 --largest
    python -m minizero.xray --snapshot oom.pickle                what a GPU has recorded, by category

make() returns (model, inputs), or (model, step): step() is a step of the user's own loop. __main__.py says more.

What a reader must hold, before the files:

1. A step runs on fake tensors: sizes, no numbers. So it takes seconds, in any size, and the ledger counts it.
2. The script and make() are run without numbers if that goes. What make() returns is copied; copies are trained.
3. To PyTorch all is the CPU's. A mark on each storage says host or card; no mark: all is in one place.
4. A name of PyTorch that has another function for a while has it for one thread; answers are for the user's code.
5. On a card other tensors are kept than on a CPU: attention, dropout, autocast, scratch.
6. The first step makes the optimizer's states, the second is shown; a step ends when the optimizers have stepped.
7. A technique is a field of a Plan. Each row of the table is a run of the same step under another plan.
8. An engine knows one device: a row with one is run without marks, or refused.
9. What cannot be run ends as `NotPossible`, in a sentence with the user's line.

The step:

plan.py          techniques, each a field; what each does to a step (8 and 4 bits are counted, not run)
step.py          the step that is run, with numbers or without
fake.py          tensors without numbers, for any model
places.py        host and card, for code that says "cuda"; names that are lent
answers.py       what a script asks of a GPU, answered
card.py          as on a card: what a step makes and keeps there
case.py          a model, a batch and an optimizer: runs a step under any plan
head.py          a technique: the loss in chunks, in a model that makes all logits
scores.py        a technique: attention that stores no scores, in a model that does
hugging_face.py  models from a configuration, and what is special to them

The report:

lines.py         the user's line in which a tensor is born
holders.py       who holds the peak, in rows that can be read
techniques.py    what would help: each technique in words, and as a run
budget.py        the cheapest stack that fits a card, and the largest batch
script.py        the lines that write it down
recorded.py      a snapshot that a GPU has recorded, by category
report.py        all that is found: as data, in the terminal, as PNG, HTML and JSON
"""

from minizero.xray.case import NotPossible
from minizero.xray.plan import Plan
from minizero.xray.report import Report, xray

__all__ = ["NotPossible", "Plan", "Report", "xray"]
