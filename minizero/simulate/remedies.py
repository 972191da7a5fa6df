"""What to try if a plan does not fit: the fewest switches that make it fit.

A switch sets one field of the plan to a value that may hold less. Each is tried alone, then two together, and so on.
All of them are tried, since the memory of a plan is soon predicted.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from minizero.models.gpt import RECOMPUTE
from minizero.simulate.clusters import Cluster
from minizero.simulate.peak import peak_memory
from minizero.simulate.step import Prediction, simulate
from minizero.simulate.strategy import Constants, Strategy

Changes = Mapping[str, Any]  # the fields of a plan that get another value


def switches(plan: Strategy, cluster: Cluster) -> dict[str, Sequence[Any]]:
    """By field: the values that may hold less than the plan's own."""
    short = "bfloat16" if "bfloat16" in cluster.gpu.peak else "float16"
    recompute = list(RECOMPUTE)
    return {
        "stage": range(plan.stage + 1, 4),
        "sharding_factor": [None] if plan.sharding_factor else [],  # one copy for all GPUs
        "recompute": recompute[recompute.index(plan.recompute) + 1 :],
        "flash": [] if plan.flash else [True],
        "dtype": [short] if plan.itemsize > 2 else [],
        "offload": [] if plan.offload else [True],
    }


def remedies(step: Prediction, constants: Constants | None = None) -> list[tuple[Changes, Prediction]]:
    """The fewest changes of the step's plan that make it fit, each with the step that it gives; the fastest first.

    Empty if all switches together do not help.
    """
    free, found = switches(step.plan, step.cluster), []
    for count in range(1, len(free) + 1):
        for names in itertools.combinations(free, count):
            for values in itertools.product(*(free[name] for name in names)):
                changes = dict(zip(names, values))
                try:
                    plan = dataclasses.replace(step.plan, **changes)
                except ValueError:  # such a plan cannot be: offload without stage 3
                    continue
                if step.cluster.holds(peak_memory(step.model, plan)):
                    found.append((changes, simulate(step.model, step.cluster, plan, constants)))
        if found:
            break
    return sorted(found, key=lambda pair: pair[1].seconds)
