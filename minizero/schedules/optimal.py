"""The best persistent schedule of a chain under a budget, by dynamic programming.

x_i is kept, the gradient of x_j waits, and the budget leaves m beside the kept inputs. T(i, j, m) is the least time
in which stages i … j-1 can go backward, beyond the n taped forwards and backwards that every schedule has:

    T(i, i+1, m) = 0                                               if stage i's backward fits m, else ∞
    T(i, j, m)   = min over k:  Σ forward of stages i … k-1        advance to x_k, i < k < j
                                + T(k, j, m - boundary of k)       the part behind it, while x_k is kept or used
                                + T(i, k, m)                       the part before it, when x_k is gone

Only backwards are asked whether they fit. An advance of stage t holds its input, its output and the gradient of x_j.
Stage t's backward holds the first two twice, and stage j-1's backward holds the third twice. One of these backwards
is at least as large as the advance, and both come later, when no less is kept.

The same recursion with the largest size in place of the sum of times gives the least budget that any schedule meets.
Both take time cubic in the number of stages; m is one of a table's levels.

Beaumont, Eyraud-Dubois, Herrmann, Joly & Shilova, 2019, "Optimal checkpointing for heterogeneous chains".
"""

from collections.abc import Sequence

import numpy as np

from minizero.schedules.chain import Schedule, Stage, outputs, unfold

# How many levels of m: as many as fill tables of n² · levels entries, about 0.2 GB in all, within these bounds.
ENTRIES = 10**7
LEAST_LEVELS, MOST_LEVELS = 500, 5000


def backward_sizes(stages: Sequence[Stage]) -> np.ndarray:
    """What each stage's backward needs beside its kept input: output, tape, and the gradients of input and output."""
    sizes = outputs(stages)
    return np.array([2 * size + stage.tape + stage.boundary for stage, size in zip(stages, sizes)], dtype=float)


def least_budget(stages: Sequence[Stage]) -> tuple[float, Schedule]:
    """The least budget that a persistent schedule meets, and a schedule that meets it, in whatever time."""
    n = len(stages)
    boundary = np.array([stage.boundary for stage in stages], dtype=float)
    least = np.zeros((n, n + 1))  # [i, j]: what stages i … j-1 need beside x_i, which is kept
    choice = np.zeros((n, n + 1), dtype=np.int64)  # [i, j]: the k that needs so little
    # One stage needs its backward.
    least[np.arange(n), np.arange(n) + 1] = backward_sizes(stages)
    for length in range(2, n + 1):
        for i in range(n - length + 1):
            j = i + length
            # For every k at once the larger of two: the part behind x_k, which lives meanwhile, and the part before it.
            largest = np.maximum(boundary[i + 1 : j] + least[i + 1 : j, j], least[i, i + 1 : j])
            choice[i, j] = i + 1 + largest.argmin()
            least[i, j] = largest.min()
    total = float(boundary[0] + least[0, n])
    # Sums of numbers that are not whole are rounded, and the budget must not be missed by that.
    total = int(total) if total.is_integer() else total * (1 + 1e-12)
    return total, unfold(stages, lambda i, end, kept: int(choice[i, end]))


def fastest_within(stages: Sequence[Stage], budget: float, thriftiest: Schedule) -> Schedule:
    """The fastest schedule within the budget. `thriftiest` must be within it."""
    n = len(stages)
    boundary = np.array([stage.boundary for stage in stages], dtype=float)
    need = backward_sizes(stages)
    # The values of m, and for every l and k the level that is left of levels[l] once x_k is kept too. That one is
    # rounded down: less is left than in truth, so the budget holds. -1: x_k does not fit.
    levels = remainders(boundary, need, budget, thriftiest)
    below = levels.searchsorted(levels - boundary[:, None], side="right") - 1  # [k, l]
    # Advancing from x_i to x_k takes advanced[k] - advanced[i].
    advanced = np.concatenate([[0.0], np.cumsum([stage.forward for stage in stages])])

    time = np.full((n, n + 1, len(levels)), np.inf)  # [i, j, l]: T(i, j, levels[l])
    behind = np.full((n + 1, n, len(levels)), np.inf)  # [j, k, l]: T(k, j, levels[l] - boundary of k)
    choice = np.zeros((n, n + 1, len(levels)), dtype=np.int16)  # [i, j, l]: the best k
    for length in range(1, n + 1):
        for i in range(n - length + 1):
            j = i + length
            if length == 1:
                time[i, j] = np.where(levels >= need[i], 0.0, np.inf)
            else:
                # For every k and every level at once.
                total = behind[j, i + 1 : j] + time[i, i + 1 : j]
                total += (advanced[i + 1 : j] - advanced[i])[:, None]
                best = total.argmin(axis=0)
                choice[i, j] = best + i + 1
                time[i, j] = np.take_along_axis(total, best[None], axis=0)[0]
            # Longer stretches ask for this one with x_i as their x_k.
            behind[j, i] = np.where(below[i] >= 0, time[i, j][below[i]], np.inf)
    if not np.isfinite(time[0, n, -1]):
        return thriftiest  # sums of numbers that are not whole were rounded, and a tight budget missed

    def split(i: int, end: int, kept: list[int]) -> int:
        # From the whole budget down through all inputs that are kept beside the chain's own.
        level = len(levels) - 1
        for k in kept[1:]:
            level = below[k, level]
        return int(choice[i, end, level])

    return unfold(stages, split)


def remainders(boundary: np.ndarray, need: np.ndarray, budget: float, thriftiest: Schedule) -> np.ndarray:
    """What the budget can leave beside the kept inputs, ascending: every remainder if they are few, else a grid."""
    many = min(max(LEAST_LEVELS, ENTRIES // len(boundary) ** 2), MOST_LEVELS)
    most = budget - boundary[0]  # only the chain's own input is kept
    # Each further input may be kept or not. A remainder that no backward fits is of no use.
    found = np.array([most])
    for size in boundary[1:]:
        less = found - size
        found = np.union1d(found, less[less >= need.min()])
        if len(found) > many:
            break
    else:
        return found
    # The grid rounds, so it also gets the exact remainders of two schedules: of the one that keeps everything, for a
    # budget that has room for it, and of the thriftiest, for a budget that has room for nothing else.
    met = list(np.subtract.accumulate([budget, *boundary])[1:])
    left = [float(budget)]  # with each of the inputs that the thriftiest keeps, what it left
    for action, i in thriftiest.steps:
        if action == "drop":
            left.pop()
        elif action in ("keep", "backward"):  # an input used straight away fills as much
            met.append(left[-1] - boundary[i])
            if action == "keep":
                left.append(met[-1])
    return np.union1d(np.linspace(0, most, many + 1), [level for level in met if level >= 0])
