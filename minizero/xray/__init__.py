"""Memory X-ray: why did I run out, and what would help? For a model of your own, before you rent the card.

    python -m minizero.xray train.py:make --ranks 8        make() returns your model and its inputs
    python -m minizero.xray --hf config.json --batch 1 --length 2048

A step of training is run on fake tensors, which have sizes and no numbers. So it takes seconds, in any size. Then it is
run again with each technique of this course.

fake.py          tensors without numbers, for any model
step.py          the step that is run, with numbers or without
lines.py         the user's line in which a tensor is born
holders.py       who holds the peak, in rows that can be read
plan.py          techniques, each a field, and all that stack
scores.py        attention that stores no scores, in a model that does
case.py          a model, a batch and an optimizer: runs a step under any plan
hugging_face.py  models from a configuration, and what is special to them
report.py        the picture, the tables, the page
"""

from minizero.xray.case import NotPossible
from minizero.xray.plan import Plan
from minizero.xray.report import Report, xray

__all__ = ["NotPossible", "Plan", "Report", "xray"]
