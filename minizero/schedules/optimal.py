"""The best persistent schedule of a chain under a budget, by dynamic programming.

Let x_i be kept, the gradient of x_j wait, and m be what the budget leaves beside the kept inputs. The least
time in which stages i … j-1 can go backward, beyond the n taped forwards and backwards that every schedule has:

    T(i, i+1, m) = 0                                               if stage i's backward fits m
    T(i, j, m)   = min over k:  Σ forward of stages i … k-1
                                + T(k, j, m - boundary of k)       with x_k kept too, or used straight away
                                + T(i, k, m)                       after that, when x_k is gone

That the advances fit need not be asked. Stage t's takes its input, its output and the gradient of x_j; its
backward takes the first two twice, stage j-1's backward takes the third twice, and both come later, when no
less is kept. One of the two is the larger.

The same with the largest size for the sum of times gives the least budget that any schedule meets. Cubic in the
number of stages; for m there is a table of levels.

Beaumont, Eyraud-Dubois, Herrmann, Joly & Shilova, 2019, "Optimal checkpointing for heterogeneous chains".
"""

from collections.abc import Sequence

import numpy as np

from minizero.schedules.chain import Schedule, Stage, outputs, unfold

ENTRIES = 10**7  # so many does a table of n² · levels have, about 0.2 GB in all, as long as …
LEAST, MOST = 500, 5000  # … that is so many levels


def backward_sizes(stages: Sequence[Stage]) -> np.ndarray:
    """What each stage's backward needs beside its kept input: output, tape, and the gradients of input and output."""
    return np.array([2 * size + s.tape + s.boundary for s, size in zip(stages, outputs(stages))], dtype=float)


def least_budget(stages: Sequence[Stage]) -> tuple[float, Schedule]:
    """The least budget that a persistent schedule meets, and a schedule that meets it, in whatever time."""
    n, boundary = len(stages), np.array([stage.boundary for stage in stages], dtype=float)
    least = np.zeros((n, n + 1))  # [i, j]: to do stages i … j-1, with x_i kept
    choice = np.zeros((n, n + 1), dtype=np.int64)
    least[np.arange(n), np.arange(n) + 1] = backward_sizes(stages)
    for length in range(2, n + 1):
        for i in range(n - length + 1):
            j = i + length
            largest = np.maximum(boundary[i + 1 : j] + least[i + 1 : j, j], least[i, i + 1 : j])
            choice[i, j] = i + 1 + largest.argmin()
            least[i, j] = largest.min()
    total = float(boundary[0] + least[0, n])
    # Where sums were rounded, the budget must not miss by a rounding.
    total = int(total) if total.is_integer() else total * (1 + 1e-12)
    return total, unfold(stages, lambda i, end, kept: int(choice[i, end]))


def fastest_within(stages: Sequence[Stage], budget: float, thriftiest: Schedule) -> Schedule:
    """The fastest schedule within the budget, of which `thriftiest` must be one."""
    n, boundary = len(stages), np.array([stage.boundary for stage in stages], dtype=float)
    need = backward_sizes(stages)
    levels = remainders(boundary, need, budget, thriftiest)
    # With x_k kept too, level l becomes below[k, l]; rounded down, so that a size is never rounded down.
    below = levels.searchsorted(levels - boundary[:, None], side="right") - 1
    run = np.concatenate([[0.0], np.cumsum([stage.forward for stage in stages])])  # of stages 0 … i-1

    time = np.full((n, n + 1, len(levels)), np.inf)  # [i, j, l]
    behind = np.full((n + 1, n, len(levels)), np.inf)  # [j, k, l]: time[k, j] once x_k is kept too
    choice = np.zeros((n, n + 1, len(levels)), dtype=np.int16)
    for length in range(1, n + 1):
        for i in range(n - length + 1):
            j = i + length
            if length == 1:
                time[i, j] = np.where(levels >= need[i], 0.0, np.inf)
            else:
                total = behind[j, i + 1 : j] + time[i, i + 1 : j]
                total += (run[i + 1 : j] - run[i])[:, None]
                best = total.argmin(axis=0)
                choice[i, j] = best + i + 1
                time[i, j] = np.take_along_axis(total, best[None], axis=0)[0]
            behind[j, i] = np.where(below[i] >= 0, time[i, j][below[i]], np.inf)
    if not np.isfinite(time[0, n, -1]):
        return thriftiest  # by a rounding in sums that are not whole numbers

    def split(i: int, end: int, kept: list[int]) -> int:
        level = len(levels) - 1
        for k in kept[1:]:
            level = below[k, level]
        return int(choice[i, end, level])

    return unfold(stages, split)


def remainders(boundary: np.ndarray, need: np.ndarray, budget: float, thriftiest: Schedule) -> np.ndarray:
    """What the budget can leave beside the kept inputs, ascending: all the sums where they are few, else a grid."""
    many = min(max(LEAST, ENTRIES // len(boundary) ** 2), MOST)
    most = budget - boundary[0]
    found = np.array([most])
    for size in boundary[1:]:
        less = found - size
        found = np.union1d(found, less[less >= need.min()])
        if len(found) > many:
            break
    else:
        return found
    # The grid, and what two schedules meet on their way: the one that keeps everything, so that a budget for all is
    # used up; and the thriftiest, without which a tight budget would leave nothing.
    met = list(np.subtract.accumulate([budget, *boundary])[1:])
    left = [float(budget)]
    for action, i in thriftiest.steps:
        if action == "drop":
            left.pop()
        elif action in ("keep", "backward"):  # an input used straight away fills as much
            met.append(left[-1] - boundary[i])
            if action == "keep":
                left.append(met[-1])
    return np.union1d(np.linspace(0, most, many + 1), [level for level in met if level >= 0])
