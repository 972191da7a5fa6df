"""A chain of stages, and what a schedule of it costs: every forward, every kept input, the peak.

    x₀ → stage 0 → x₁ → stage 1 → x₂ … → stage n-1 → xₙ,     backward needs xₙ₋₁ first and x₀ last

A stage is a piece of the chain: one layer, or several (none of ZeRO's stages). Its backward needs what its forward
saved on the way, its *tape*. A schedule builds one tape at a time and goes through it at once. In between it holds
only stage *inputs*. Forwards without a tape (*advances*) lead from an input that it kept to one that it did not:

    time = Σ forward of the advances + Σ (forward + backward) of all n stages

Griewank & Walther, 2000, "Algorithm 799: Revolve"; Chen et al., 2016, "Training Deep Nets with Sublinear
Memory Cost"; Beaumont et al., 2019, "Optimal checkpointing for heterogeneous chains".
"""

import dataclasses
import itertools
import math
import numbers
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from minizero.pictures.schedule import plot_schedule


@dataclasses.dataclass(frozen=True)
class Stage:
    """What one piece of a chain costs (not a stage of ZeRO): time in any unit, sizes in any unit.

    forward, backward: the times of one run. boundary: the size of the stage's input. tape: the size of what its
    taped forward keeps beyond that input. output: the size of its output; None stands for the next stage's
    boundary, and for the last stage's own. Raises `ValueError` if one is negative.
    """

    forward: float
    backward: float
    boundary: float
    tape: float
    output: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is None and name == "output":
                continue
            if not isinstance(value, numbers.Real):
                raise TypeError(f"Stage: {name} must be a number, not {value!r}")
            if not 0 <= float(value) < math.inf:
                raise ValueError(f"Stage: {name} must be a cost of at least 0, not {value!r}")


def outputs(stages: Sequence[Stage]) -> list[float]:
    """The size of each stage's output. Raises `ValueError` if there is no stage."""
    if not stages:
        raise ValueError("a chain needs at least one stage, this one has none")
    following = [stage.boundary for stage in stages[1:]] + [stages[-1].boundary]
    return [size if stage.output is None else stage.output for stage, size in zip(stages, following)]


def group(stages: Sequence[Stage], k: int) -> list[Stage]:
    """The same chain in regions of k stages (the last may have fewer), each of which counts as one stage.

    A region's tape is its stages' tapes and the inputs between them. So a long chain needs only one more forward,
    and pays with a longer tape. Raises `ValueError` if k is less than 1.
    """
    sizes = outputs(stages)
    if k < 1:
        raise ValueError(f"group: a region needs at least 1 stage, not {k!r}")
    regions = []
    for start in range(0, len(stages), k):
        region = stages[start : start + k]
        forward = sum(stage.forward for stage in region)
        backward = sum(stage.backward for stage in region)
        tape = sum(stage.tape for stage in region) + sum(stage.boundary for stage in region[1:])
        regions.append(Stage(forward, backward, region[0].boundary, tape, sizes[start + len(region) - 1]))
    return regions


class Step(NamedTuple):
    """One step of a schedule. `stage` counts from 0; `action` is one of four.

    "keep": puts the running input, which must be this stage's, among the kept ones.
    "forward": runs the stage without a tape, from the running input if it is this stage's, else from the kept one.
    The result becomes the running input.
    "backward": the stage's taped forward, followed at once by its backward. The running input is used up.
    "drop": lets go of the kept input.
    """

    action: str
    stage: int


@dataclasses.dataclass(frozen=True, repr=False)
class Schedule:
    """Steps that take a chain through its backward, and what they cost on its `stages`.

    The first running input is the chain's own. Backwards go from the last stage to the first, each once. Raises
    `ValueError`, naming the step, if a step lacks its input or a backward is out of turn.
    """

    steps: list[Step]
    stages: list[Stage]

    def __post_init__(self) -> None:
        _ = self.curve  # replays the steps, so that a wrong one is found here

    def __repr__(self) -> str:
        costs = f"{self.slots} slots, {self.advances} advances, time {self.time:g}, peak {self.peak:,}"
        return f"<Schedule of {len(self.stages)} stages: {costs}>"

    def on(self, stages: Sequence[Stage]) -> "Schedule":
        """The same steps on other stages, as many: what would √n cost on this chain?"""
        if len(stages) != len(self.stages):
            raise ValueError(f"Schedule.on: these steps are for {len(self.stages)} stages, not {len(stages)}")
        return Schedule(self.steps, list(stages))

    @cached_property
    def advances(self) -> int:
        """How many forwards run without a tape. The n forwards that build one come on top."""
        return sum(step.action == "forward" for step in self.steps)

    @cached_property
    def slots(self) -> int:
        """The most inputs kept at once, the chain's own counted. An input used straight away takes no slot."""
        changes = {"keep": 1, "drop": -1}
        return max(itertools.accumulate(changes.get(step.action, 0) for step in self.steps))

    @cached_property
    def time(self) -> float:
        """All forwards and all backwards."""
        taped = sum(stage.forward + stage.backward for stage in self.stages)
        return taped + sum(self.stages[i].forward for action, i in self.steps if action == "forward")

    @property
    def peak(self) -> float:
        """The size of all that is alive in the worst step."""
        return max(self.curve)

    @cached_property
    def curve(self) -> list[float]:
        """The size of what is alive in each "forward" and each "backward", in order.

        both        the kept inputs, the running input unless it is kept, the output being made
        forward     + the gradient that waits at the end of what is left of the chain
        backward    + the stage's tape, and the gradients of its input and of its output
        """
        size = outputs(self.stages)
        kept: dict[int, float] = {}  # the sizes of the kept inputs, by stage
        end = len(self.stages)  # stages end, end+1, … have gone backward
        running = 0  # the stage whose input is the running one; -1: none
        curve = []
        for number, (action, i) in enumerate(self.steps):
            at_hand = i < end and (i == running or i in kept)
            legal = {"keep": i == running < end and i not in kept, "drop": i in kept, "forward": at_hand}
            if not (legal | {"backward": at_hand and i == end - 1}).get(action):
                raise ValueError(
                    f"Schedule: step {number}, {action} {i}, cannot be done: before it, it keeps the inputs of stages "
                    f"{list(kept)}, runs at {running if running >= 0 else 'none'}, and {end} of {len(self.stages)} "
                    "stages are left, whose last must be the next to go backward"
                )
            if action == "keep":
                kept[i] = self.stages[i].boundary
            elif action == "drop":
                del kept[i]
            else:
                inputs = sum(kept.values()) + (0 if i in kept else self.stages[i].boundary)
                if action == "forward":
                    curve.append(inputs + size[i] + size[end - 1])
                    running = i + 1
                else:
                    curve.append(inputs + size[i] + self.stages[i].tape + self.stages[i].boundary + size[i])
                    end, running = i, -1
        if end:
            raise ValueError(f"Schedule: the steps end before stage {end - 1}'s backward: add what is missing")
        return curve

    def plot(self, ax: Any = None) -> Any:
        """Draws the steps, stage against step; returns the matplotlib Axes."""
        costs = f"{self.slots} kept at most, {self.advances} forwards without a tape"
        sizes = [stage.boundary for stage in self.stages]
        differ = len(set(sizes)) > 1
        return plot_schedule(self.steps, f"{len(self.stages)} stages: {costs}", ax, sizes if differ else None)


def unfold(stages: Sequence[Stage], split: Callable[[int, int, list[int]], int]) -> Schedule:
    """The schedule that, on its way from x_i towards stage `end`, keeps the input of stage split(i, end, kept) next.

    i < split ≤ end-1. kept: the stages whose inputs are kept; the last one is i. If split is end-1, that input is
    used straight away and not kept.
    """
    steps, kept, end = [Step("keep", 0)], [0], len(stages)
    while kept:
        i = kept[-1]
        # Only stage i is left before `end`: its input has done its service.
        if i == end - 1:
            steps += [Step("backward", i), Step("drop", kept.pop())]
            end = i
            continue
        # Advance to the next input that matters.
        k = split(i, end, kept)
        steps += [Step("forward", stage) for stage in range(i, k)]
        if k == end - 1:
            steps.append(Step("backward", k))
            end = k
        else:
            steps.append(Step("keep", k))
            kept.append(k)
    return Schedule(steps, list(stages))
