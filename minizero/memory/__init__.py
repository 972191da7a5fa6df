"""Where the memory goes: bytes measured (`Ledger`), bytes predicted (`predict`, …).

    ledger_on_a_page.py  the whole idea: to be read first
    ledger.py            Ledger: opens, closes, and reads its figures off a tape
    tape.py              the tape: what happened to storages, and what can be read off it
    recorder.py          follows each storage of a thread from birth to death, and writes the tape
    operators.py         which outputs of an operator are new tensors
    position.py          which phase of a step is running, and which module's forward
    hooks.py             what is a parameter, a gradient, a state; when a forward or a step begins and ends
    snapshot.py          the tape as a file for PyTorch's own viewer
    formulas.py          model states, activations and traffic in theory
    estimate.py          what a run will need before it starts, and what the machine has

`python -m minizero.xray` shows who holds the peak of a step, also of a model of your own.
"""

from minizero.memory.formulas import predict, predict_activations, predict_sent
from minizero.memory.ledger import Ledger
from minizero.memory.recorder import tag
from minizero.memory.tape import CATEGORIES, Sample

__all__ = ["CATEGORIES", "Ledger", "Sample", "predict", "predict_activations", "predict_sent", "tag"]
