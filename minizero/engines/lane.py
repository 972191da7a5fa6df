"""A lane says when stage 3 gathers and reduces: at once (`Now`), or while other units compute (`Ahead`, prefetch.py).

The engine says where a pass is: `begin_forward`, `before_put`, `after_put`, `finish`. Stage 3 asks for what it needs:
`gather`, `wait_for`, `reduce`. The lane calls `make_room`, `fill` and `average` of stage 3.
"""

from typing import Any

import torch

from minizero.engines.unit import Unit


class Now:
    """One thing at a time. engine: of any stage; only a Zero3 asks for anything."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def begin_forward(self) -> None:
        """A forward of the whole model begins."""

    def gather(self, unit: Unit) -> None:
        """The unit is used now: its replica is full when this returns."""
        if unit.replica_is_stale():
            self.engine.make_room(unit)
            self.engine.fill(unit)

    def wait_for(self, unit: Unit) -> None:
        """No gather writes to the unit's replica any more when this returns."""

    def before_put(self, unit: Unit) -> None:
        """A gradient of the unit goes to its flat buffer next."""

    def after_put(self, unit: Unit, owed: set[int]) -> None:
        """It is there. owed: the numbers of the parameters whose gradient has not come."""

    def reduce(self, unit: Unit, gradient: torch.Tensor) -> None:
        """The unit's gradient is complete: average it, and give the shards their part."""
        unit.set_gradient(self.engine.average(unit, gradient))

    def finish(self) -> None:
        """The reduction that is under way, if any, has ended when this returns."""
