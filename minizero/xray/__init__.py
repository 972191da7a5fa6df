"""Memory X-ray: why did I run out, and what would help? For a model of your own, before you rent the card.

    python -m minizero.xray train.py:make --ranks 8        make() returns your model and its inputs
    python -m minizero.xray --hf config.json --batch 1 --length 2048

A step of training is run on fake tensors, which have sizes and no numbers. So it takes seconds, in any size. Then it is
run again with each technique of this course.

The step:

fake.py          tensors without numbers, for any model
step.py          the step that is run, with numbers or without
plan.py          techniques, each a field, so a stack of them is a plan, too
head.py          the loss in chunks, in a model that makes all logits
scores.py        attention that stores no scores, in a model that does
case.py          a model, a batch and an optimizer: runs a step under any plan
hugging_face.py  models from a configuration, and what is special to them

The report:

lines.py         the user's line in which a tensor is born
holders.py       who holds the peak, in rows that can be read
techniques.py    what would help: a row for each technique
fit.py           the cheapest stack that fits a card
script.py        the lines that write it down
report.py        the tables, the picture, the page
"""

from minizero.xray.case import NotPossible
from minizero.xray.plan import Plan
from minizero.xray.report import Report, xray

__all__ = ["NotPossible", "Plan", "Report", "xray"]
