"""Where the program is: in which phase of a training step, and in which module's forward.

forward         the model's forward has begun                       hooks.py tells
backward        an operator runs inside a backward of autograd      recorder.py tells
optimizer       the optimizer's step runs                           hooks.py tells
between         everything else
"""

from minizero.memory.tape import Tape
from minizero.torch_private import current_backward


class Position:
    """The phase and the modules that are running now. Each change of phase is written on the tape."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.running = [""]  # the modules whose forward is running, the innermost last; "" is outside of all
        self.in_backward = False  # whether the operator before ran inside a backward
        self.outside = 1  # how many modules ran where that backward began
        self.in_step = False
        self.enter_phase("between")

    def enter_phase(self, phase: str) -> None:
        """A phase begins: whatever is born from now on is born in it."""
        self.phase = phase
        self.tape.append(phase)

    def enter_forward(self) -> None:
        """The model's forward begins. If a backward runs, that is a recomputation, and still part of the backward."""
        if current_backward() == -1:
            self.in_backward = False
            self.enter_phase("forward")

    def leave_module(self, name: str) -> None:
        """A module's forward has ended, or has failed, perhaps before its name was added."""
        if self.running[-1] == name:
            self.running.pop()

    def enter_backward(self) -> None:
        """The first operator of a backward has run: autograd has no hook that tells of the beginning."""
        self.in_backward, self.outside = True, len(self.running)
        self.enter_phase("backward")

    def leave_backward(self) -> None:
        """The first operator after a backward has run. Forward and step go on if the backward ran inside them."""
        self.in_backward = False
        del self.running[self.outside :]  # forwards that ran again, and were left halfway
        self.enter_phase("forward" if len(self.running) > 1 else "optimizer" if self.in_step else "between")

    def turn_step(self, on: bool) -> None:
        """The optimizer's step begins, or has ended."""
        self.in_step = on
        self.enter_phase("optimizer" if on else "between")
