"""Memory X-ray: why did I run out, and what would help? For a model of your own, before you rent the card.

    python -m minizero.xray train.py:make --card 4090 --fit      as on one card: what makes it fit?
    python -m minizero.xray train.py:make --ranks 8              8 cards, with ZeRO's rows
    python -m minizero.xray --hf config.json --batch 1 --length 2048 --largest

make() returns (model, inputs): model(*inputs) gives the loss, or an object with .loss. The batch is one rank's. Or it
returns (model, step): step() is a step of the user's own loop.

A step of training is run on fake tensors, which have sizes and no numbers. So a step takes seconds, in any size. Then
it is run again with each technique of this course: the table takes as long as some twenty to forty steps.

The step:

plan.py          techniques, each a field, so a stack of them is a plan, too; what each does to a step
step.py          the step that is run, with numbers or without
fake.py          tensors without numbers, for any model
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
report.py        all that is found: as data, in the terminal, as PNG, HTML and JSON
"""

from minizero.xray.case import NotPossible
from minizero.xray.plan import Plan
from minizero.xray.report import Report, xray

__all__ = ["NotPossible", "Plan", "Report", "xray"]
