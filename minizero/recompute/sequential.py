"""Running a schedule on real layers: a chain that keeps only those inputs that its schedule keeps.

The first sweep takes the schedule's steps up to its first backward. It leaves a graph whose stages hold nothing: each
is a `Frame`. When backward comes to a stage, the chain takes its next steps, up to that stage's own backward step:
forwards without a tape, from the nearest input that was kept, then the forward whose tape this backward uses. Layer i
is stage i of the schedule (none of ZeRO's stages).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from minizero import torch_private
from minizero.recompute.frame import Frame
from minizero.recompute.full import is_enabled
from minizero.recompute.guards.mismatch import RecomputeMismatch, name_of
from minizero.recompute.inputs import Inputs
from minizero.recompute.replay import Replay

Layer = Callable[[torch.Tensor], torch.Tensor]


@torch_private.never_compiled
def checkpoint_sequential(layers: Iterable[Layer], x: torch.Tensor, schedule: Any) -> torch.Tensor:
    """`layers` applied to x one after the other, holding in between what the `Schedule` says.

    layers: an nn.Sequential or a list, one layer for each stage of the schedule, each of one tensor to one tensor.
    The last stage's tape is built at once, the others when backward comes. A second backward through the same graph
    starts again from x. Raises `ValueError` if the numbers of layers and stages differ, `TypeError` if a layer
    returns no tensor, `RecomputeMismatch` as `checkpoint` does.
    """
    layers = list(layers)
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"checkpoint_sequential: x must be one tensor, not {type(x).__name__}")
    if len(layers) != len(schedule.stages):
        raise ValueError(
            f"checkpoint_sequential: the schedule is for {len(schedule.stages)} stages, there are {len(layers)} "
            "layers: make a schedule for so many, or group layers with nn.Sequential"
        )
    if torch.is_grad_enabled() and is_enabled():
        return Chain(layers, schedule.steps).first_sweep(x)
    for layer in layers:
        x = layer(x)
    return x


class Chain:
    """Layers, how far they have come in the steps of their schedule, and which inputs are kept at this point."""

    def __init__(self, layers: list[Layer], steps: list[Any]) -> None:
        self.layers, self.steps = layers, steps
        self.replays: list[Replay] = []
        self.trains: list[bool] = []  # does a stage's input require a gradient?
        self.is_swept = False  # is the first sweep over?
        self.position = 0  # the next step's place in `steps`
        self.stage = len(layers) - 1  # the stage whose tape was built last
        self.kept: dict[int, torch.Tensor] = {}  # by stage; the chain's own input is in `inputs`
        self.running: Any = None  # a stage and its input, used straight away

    def first_sweep(self, x: torch.Tensor) -> torch.Tensor:
        """The chain's output, on a graph that comes back here when it needs what a stage would have saved."""
        self.inputs, self.running = Inputs("the chain", x), (0, x)
        self._take_steps(self.stage, self._first_forward)
        (_, x), self.running = self.running, None
        x = self._call(self.stage, x)  # the last stage, on a plain tape: backward begins with it
        self.position += 1
        self.inputs.first_run_is_over()
        self.is_swept = True
        return x

    def _take_steps(self, stage: int, forward: Callable[[int], torch.Tensor]) -> None:
        """Takes steps until the next is the stage's backward. forward: runs a stage, and returns its output."""
        while self.steps[self.position] != ("backward", stage):
            action, i = self.steps[self.position]
            if action == "keep" and i > 0:
                # The running input. Detached: it may lead to the graph, and the graph leads here.
                self.kept[i] = self.running[1].detach()
            elif action == "drop":
                self.kept.pop(i, None)
            elif action == "forward":
                self.running = i + 1, forward(i)
            elif action == "backward":  # of a stage that this backward does not need, or whose tape was plain
                self.running = None
            self.position += 1

    def _first_forward(self, i: int) -> torch.Tensor:
        if i != len(self.replays):
            raise ValueError(
                f"checkpoint_sequential: the steps come to forward {i} where forward {len(self.replays)} is due: "
                "before the first backward each stage must run once"
            )
        x = self.running[1]
        self.trains.append(x.requires_grad)
        self.replays.append(Replay(self.layers[i], [x]))
        with self.replays[i].first_run():
            return Frame(f"layer {i}", lambda: self._second_forward(i)).first_run(self._call, i, x)

    def _second_forward(self, i: int) -> None:
        """Runs stage i for its frame, which keeps the tape."""
        if not self.is_swept:
            raise NotImplementedError(
                "checkpoint_sequential: a layer calls backward or torch.autograd.grad inside itself, which no schedule "
                "foresees: call checkpoint on an nn.Sequential of these layers"
            )
        # Backward goes from the last stage to the first. A stage that is not before the last one asked for belongs
        # to a second backward through this graph: begin again from the chain's own input.
        if i >= self.stage:
            self.position, self.kept, self.running = 0, {}, None
        self._take_steps(i, self._advance)
        x = self._input_of(i)
        # The step "backward, i" is done with this; the input that ran is used up.
        self.position += 1
        self.stage = i
        self.running = None
        with self.replays[i].again():
            self.layers[i](x)

    def _advance(self, i: int) -> torch.Tensor:
        x = self._input_of(i)
        # With grad mode on: under no_grad some operators take another way, with other roundings.
        frame = Frame(f"layer {i}", lambda: self.layers[i](x))
        with self.replays[i].again(), torch.enable_grad():
            return frame.first_run(self._call, i, x).detach()

    def _input_of(self, i: int) -> torch.Tensor:
        if i == 0:
            return self.inputs.again()[0]
        x = self.running[1] if self.running and self.running[0] == i else self.kept[i]
        return x.detach().requires_grad_(self.trains[i])

    def _call(self, i: int, x: torch.Tensor) -> torch.Tensor:
        version = x._version
        output = self.layers[i](x)
        if isinstance(output, torch.Tensor) and x._version == version:
            return output
        name = f"checkpoint_sequential: layer {i} ({name_of(self.layers[i])})"
        if not isinstance(output, torch.Tensor):
            raise TypeError(f"{name} gave {type(output).__name__}: each must take and give one tensor")
        raise RecomputeMismatch(
            f"{name} changes its input in place, so that a second forward would start from other values: use the "
            "out-of-place operation (inplace=False), or change a clone"
        )
