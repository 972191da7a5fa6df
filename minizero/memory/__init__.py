"""Where the memory goes: bytes measured (`Ledger`), bytes predicted (`predict`, …), and what allocators say.

    ledger.py       follows every storage of a thread, from birth to death
    operators.py    which outputs of an operator are new tensors
    hooks.py        what is a parameter, a gradient, a state; when a forward or a step begins and ends
    tape.py         what the ledger writes down, and what is read off it
    tables.py       that as tables: by phase, by module, by rank
    allocators.py   what PyTorch's profiler, the operating system and a GPU's allocator count beside it
    formulas.py     model states, activations and traffic in theory

`python -m minizero.memory` measures one training step of the demo model.
"""

from minizero.memory.formulas import predict, predict_activations, predict_sent
from minizero.memory.ledger import Ledger, tag
from minizero.memory.tape import CATEGORIES, Sample

__all__ = ["CATEGORIES", "Ledger", "Sample", "predict", "predict_activations", "predict_sent", "tag"]
