"""Which scale is right nobody knows beforehand, and it changes during training. So the scaler tries: after
`growth_interval` updates in a row without overflow it grows, and after one with overflow (whose step is
skipped) it backs off, at once.

    self._scale  self.growth_factor  self.backoff_factor  self.min_scale  self.max_scale
    self._growth_tracker      updates in a row without overflow
    self.growth_interval      so many of them, and the scale grows

The scale is kept as an FP32 number: _float32(value).
"""

import itertools
from random import Random
from typing import Any, NamedTuple

from precision.scaling import DynamicLossScaler
from tests.exercises.draws import deal
from tests.exercises.kit import wrong

PLAN = [
    "Count: an overflow sets the tracker to 0, anything else adds 1.",
    "After an overflow: the scale times backoff_factor, or min_scale if that is more.",
    "When the tracker has reached or passed growth_interval (a loaded state may have passed it): the scale times "
    "growth_factor, but not above max_scale, and the tracker begins at 0 again.",
]
HINTS = [
    "max(new, self.min_scale) is the lower bound, min(new, self.max_scale) the upper one.",
    "With growth_interval 3: three good updates, then it grows with the third.",
    "if overflow: … elif the tracker has come to the interval: …",
]
AFTER = (
    "The package has bounds for the scale. PyTorch's GradScaler has none, so its scale can fall towards 0 if "
    "overflows go on. Each product is rounded to FP32, as GradScaler keeps its scale, so either can load the other's "
    "state. The count begins again after growth, too. Otherwise the scale would grow at every update from then on. "
    'Read next: "Homework: the life of a dynamic scale" in notebooks/04_mixed_precision.ipynb.'
)
WRONG = [
    wrong("never-grows", "Six updates without overflow, growth_interval 3, and the scale has not grown.",
          ("elif self._growth_tracker >= self.growth_interval:", "elif False:")),
    wrong("grows-one-late", "With growth_interval 3 the scale must grow with the third update, not the fourth.",
          (">= self.growth_interval", "> self.growth_interval")),
    wrong("overflow-does-not-reset", "Two good updates, an overflow, one good: it grew. The count begins anew.",
          ("0 if overflow else self._growth_tracker + 1", "self._growth_tracker + 1")),
    wrong("growth-does-not-reset", "It grew with the third update and again with the fourth: begin to count anew.",
          ("self.max_scale)\n        self._growth_tracker = 0", "self.max_scale)")),
    wrong("never-backs-off", "After an overflow the scale must be halved, and it is as before.",
          ("self._scale * self.backoff_factor", "self._scale")),
    wrong("no-lower-bound", "The scale fell below min_scale.",
          ("max(_float32(self._scale * self.backoff_factor), self.min_scale)",
           "_float32(self._scale * self.backoff_factor)")),
    wrong("no-upper-bound", "The scale rose above max_scale.",
          ("min(_float32(self._scale * self.growth_factor), self.max_scale)",
           "_float32(self._scale * self.growth_factor)")),
    wrong("always-halves", "With backoff_factor 0.25 an overflow takes 1024 to 256: use self.backoff_factor.",
          ("self._scale * self.backoff_factor", "self._scale / 2")),
]  # fmt: skip


class Case(NamedTuple):
    growth_interval: int
    growth_factor: float
    backoff_factor: float
    init_scale: float
    bounds: tuple[float, float]
    tracker: int
    updates: str
    seed: int


def draw(random: Random) -> list[Case]:
    """tracker: where it begins, as when a state is loaded. updates: "." without an overflow, "x" with one."""
    ways = itertools.product((1, 2, 3, 4, 7), (2.0, 1.1, 4.0), (0.5, 0.3, 0.9))
    bounds = [(1.0, 2.0**24), (512.0, 65536.0), (900.0, 70000.0), (0.1, 65536.0)]
    sequences = ["".join(random.choices(random.choice(("..........x", "..x")), k=40)) for _ in range(45)]
    rows = deal(random, ways, [1024.0, 65536.0, 1000.1], bounds, [0, 0, 5], sequences)
    plain = Case(2, 2.0, 0.5, 1024.0, bounds[0], 0, "..x....", 1)
    return [plain] + [Case(*row) for row in rows]


def result(case: Case) -> dict[str, Any]:
    low, high = case.bounds
    scaler = DynamicLossScaler(case.init_scale, *case[1:3], case.growth_interval, low, high)
    scaler._growth_tracker = case.tracker
    seen = dict[str, Any]()
    for number, update in enumerate(case.updates, 1):
        scaler._adapt(update == "x")
        seen[f"after update {number} ({update}) the scale"] = scaler.get_scale()
        seen[f"after update {number} ({update}) the scale's type"] = type(scaler.get_scale()).__name__
        seen[f"after update {number} ({update}) the tracker"] = scaler._growth_tracker
    return seen
