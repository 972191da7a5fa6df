"""The best plan for a model on a cluster: every plan that fits into memory is simulated, and the fastest wins.

Speed costs memory, so the whole frontier is worth a look: the plans that no other beats in both. The batch of a GPU
is given. How it is cut into micro-batches is part of the search.
"""

import itertools
from collections.abc import Iterable, Iterator

from minizero.models.gpt import RECOMPUTE
from minizero.simulate.clusters import GIB, Cluster
from minizero.simulate.peak import peak_memory
from minizero.simulate.shapes import Model
from minizero.simulate.step import Prediction, simulate
from minizero.simulate.strategy import Constants, Strategy, divisors

MOST_MICRO_BATCHES = 64  # the search tries no more: each takes time to simulate


def factors(cluster: Cluster, gpus: int) -> list[int]:
    """The sharding factors whose groups lie evenly on the hosts."""
    found = []
    for factor in divisors(gpus):
        try:
            cluster.hosts(factor), cluster.hosts(gpus // factor, factor)
        except ValueError:
            continue
        found.append(factor)
    return found


def plans(cluster: Cluster, gpus: int, batch: int, **fixed: object) -> Iterator[Strategy]:
    """All plans for `batch` sequences a GPU. fixed: the fields of `Strategy` that the search may not choose."""
    kinds: list[dict[str, object]] = [{"stage": stage} for stage in (0, 1, 2)]
    kinds += [
        {"stage": 3, "sharding_factor": f, "offload": off} for f in factors(cluster, gpus) for off in (False, True)
    ]
    sizes = [size for size in divisors(batch) if batch // size <= MOST_MICRO_BATCHES]
    for kind, micro, recompute in itertools.product(kinds, sizes, RECOMPUTE):
        free = {"batch_size": micro, "micro_batches": batch // micro, "recompute": recompute} | kind
        if all(free[name] == value for name, value in fixed.items() if name in free):
            yield Strategy(gpus, **(free | fixed))  # type: ignore[arg-type]


def search(
    model: Model, cluster: Cluster, gpus: int, batch: int, constants: Constants | None = None, **fixed: object
) -> list[Prediction]:
    """Steps of the plans that fit: the fastest first, and of equally fast ones the smallest.

    Raises `ValueError` if no plan fits, and names the least memory that one takes.
    """
    every = [(plan, peak_memory(model, plan)) for plan in plans(cluster, gpus, batch, **fixed)]
    if not every:
        raise ValueError("no plan is left to search")
    fitting = [plan for plan, held in every if cluster.holds(held)]
    if not fitting:
        on_host = (held["total"] for _, held in every if held.get("host", 0.0) <= cluster.host_memory)
        least = min(on_host, default=float("inf"))
        raise ValueError(
            f"no plan fits: the least that {model.name} takes on {gpus:,} GPUs is {least / GIB:,.1f} GiB of "
            f"{cluster.gpu.memory / GIB:,.1f}: use more GPUs or a smaller batch"
        )
    steps = [simulate(model, cluster, plan, constants) for plan in fitting]
    return sorted(steps, key=lambda step: (step.seconds, step.memory["total"]))


def frontier(steps: Iterable[Prediction]) -> list[Prediction]:
    """The steps that no other beats in both speed and memory, fastest first."""
    kept: list[Prediction] = []
    for step in sorted(steps, key=lambda step: (step.seconds, step.memory["total"])):
        if not kept or step.memory["total"] < kept[-1].memory["total"]:
            kept.append(step)
    return kept


def describe(plan: Strategy) -> str:
    """A plan in a few words."""
    words = ["DDP", "stage 1", "stage 2", "stage 3"][plan.stage]
    if plan.sharding_factor not in (None, plan.ranks):
        words += f", F = {plan.sharding_factor}"
    words += f", {plan.micro_batches} x {plan.batch_size}"
    if plan.recompute != "none":
        words += f", {plan.recompute} recompute"
    return words + (", offload" if plan.offload else "")
