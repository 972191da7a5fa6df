"""The ledger: the bytes of the live tensors, by category, while a block of code runs.

    with Ledger(model, optimizer) as ledger:
        model(x, y).backward()
    ledger.peak["activations"]

A ledger opens and closes a recorder (recorder.py), which writes a tape of what happens to every storage. The ledger
reads each of its figures off that tape (tape.py), inside the block or after it.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from minizero.memory.hooks import Hooks
from minizero.memory.recorder import Recorder, current_recorder
from minizero.memory.snapshot import snapshot
from minizero.memory.tape import CATEGORIES, Sample, Tape, at_peak, holders, moments


class Ledger:
    """Measures the live tensor bytes of this thread, by category, while the block runs.

    model: a plain module or an engine. Its parameters, gradients and buffers count as such.
    optimizer: its states count as such.

    Every tensor that is born inside counts. Of older ones the model's and the optimizer's count. An activation is
    born in forward, and alive when backward begins. The rest is temporary. Fake tensors, and tensors on `meta`, count
    as if they were real: under PyTorch's FakeTensorMode, a model that does not fit can be measured too.

    Not counted is what is no tensor: scratch inside operators, and the workspaces that libraries keep. On a GPU cuBLAS
    takes one in each thread that multiplies, at its first product: 32 MiB on Hopper.

    `RuntimeError` if another ledger watches this thread, or if this one was open before. `TypeError` if `model` is no
    module, or `optimizer` no optimizer.
    """

    recorder_type = Recorder  # xray/lines.py has one that notes more

    def __init__(self, model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None) -> None:
        for name, given, kind in (("model", model, nn.Module), ("optimizer", optimizer, torch.optim.Optimizer)):
            if not isinstance(given, kind | None):
                raise TypeError(f"Ledger: {name} must be a {kind.__name__}, or None, not {type(given).__name__}")
        self.model = model
        self.optimizer = optimizer
        self.tape: Tape = []  # everything that happened
        self.start = 0  # the tape before this index lists what existed already
        self.recorder: Recorder | None = None  # while the ledger is open
        self.hooks: Hooks | None = None  # while the ledger is open

    def __enter__(self) -> "Ledger":
        if current_recorder() is not None:
            raise RuntimeError("Ledger: another ledger watches this thread already: close it first")
        if self.tape:
            raise RuntimeError("Ledger: this one was open before: make a new Ledger for each block")
        self.recorder = self.recorder_type(self.tape)
        self.hooks = Hooks(self.recorder, self.model, self.optimizer)  # writes down what exists already
        self.start = len(self.tape)
        self.recorder.__enter__()
        return self

    def __exit__(self, kind: Any, *exception: Any) -> None:
        recorder, hooks = self.recorder, self.hooks
        assert recorder is not None and hooks is not None
        if kind is None:  # otherwise the block's own exception is the one to see
            hooks.look_again()
        recorder.__exit__(kind, *exception)
        hooks.remove()
        self.tape = recorder.close()
        self.recorder = self.hooks = None

    def reset(self) -> None:
        """Forget the curve and the peaks so far. What is alive stays counted."""
        if self.recorder is not None:
            self.recorder.forget()
        self.start = len(self.tape)

    @property
    def current(self) -> dict[str, int]:
        """Live bytes by category, and `total`."""
        *_, last = moments(self.tape, len(self.tape))
        return last.totals

    @property
    def peak(self) -> dict[str, int]:
        """The most bytes of each category at any moment. `total` is the most of all categories together."""
        phases = self.peak_by_phase.values()
        return {category: max(most[category] for most in phases) for category in (*CATEGORIES, "total")}

    @property
    def peak_by_phase(self) -> dict[str, dict[str, int]]:
        """The peak within each phase: "forward", "backward", "optimizer" and "between"."""
        phases: dict[str, dict[str, int]] = {}
        for moment in moments(self.tape, self.start):
            most = phases.setdefault(moment.phase, dict.fromkeys(moment.totals, 0))
            for category, held in moment.totals.items():
                most[category] = max(most[category], held)
        return phases

    @property
    def holders(self) -> list[dict[str, Any]]:
        """Who holds what is alive when `total` is largest: rows of `module category operator phase bytes tensors`."""
        return holders(at_peak(self.tape, self.start))

    @property
    def curve(self) -> list[Sample]:
        """Bytes by category after every allocation, free and resize, since the block began or the last `reset`."""
        return [moment.sample() for moment in moments(self.tape, self.start)]

    def save_snapshot(self, file: str | Path) -> None:
        """Write what has happened since the block began, or the last `reset`, for pytorch.org/memory_viz."""
        Path(file).write_bytes(snapshot(self.tape, self.start))

    def plot(self, ax: Any = None, note: str = "not seen: scratch inside operators, workspaces") -> Any:
        """Draw the curve, stacked by category, and the note; returns the matplotlib Axes."""
        from minizero.pictures.memory import plot_curve  # here, because matplotlib loads slowly and most never plot

        return plot_curve(self.curve, ax, note)
