"""The simulator against this machine: constants from runs at 2 ranks, steps at more ranks predicted.

    measured     α and β of the collectives, seconds = α (N - 1) + (N - 1)/N · S/β; Adam's rate
    fitted       the compute rate, so that the steps at 2 ranks are right on average
    predicted    the steps at other numbers of ranks

Ranks are threads that share the cores: N of them take N / cores times as long for everything.
"""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from minizero.engines import STAGES, Zero3
from minizero.models.gpt import GPT, GPTConfig
from minizero.ranks.collectives import all_gather, all_reduce, barrier, reduce_scatter
from minizero.ranks.comm import Comm
from minizero.ranks.timing import alpha_and_beta
from minizero.ranks.world import World
from minizero.simulate.clusters import GPU, Cluster, Link
from minizero.simulate.shapes import Model, gpt
from minizero.simulate.step import ADAM_BYTES, simulate
from minizero.simulate.strategy import Constants, Strategy

CONFIG, BATCH = GPTConfig(), 4
SIZES = (2**12, 2**21, 2**23)  # bytes: the smallest shows α, the others β
CORES = os.cpu_count() or 1


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of one training step. The simulated time is fitted at 2 ranks, and predicted at more."""

    stage: int
    ranks: int
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        return self.simulated / self.measured - 1


@dataclasses.dataclass(frozen=True)
class Machine:
    """This machine as a cluster, and the model that it was measured with. rate: FLOP/s of a rank."""

    model: Model
    cluster: Cluster
    rate: float

    def step_seconds(self, ranks: int, stage: int) -> float:
        """The seconds of a simulated training step."""
        plan = Strategy(ranks, stage=stage, batch_size=BATCH, dtype="float32", overlap=False, prefetch=0)
        # The rate stands as the efficiency: this cluster's peak is 1 FLOP/s.
        return simulate(self.model, self.cluster, plan, Constants(self.rate)).seconds


def timed(comm: Comm, call: Callable[[], object]) -> float:
    """Seconds of a call: what all ranks together use of the cores, which other work on the machine cannot lengthen."""
    barrier(comm)
    start = time.process_time()
    call()
    seconds = all_reduce(torch.tensor(time.process_time() - start, dtype=torch.float64), comm, "max").item()
    return seconds / min(comm.size, CORES)


def measure_rings(comm: Comm) -> dict[int, float]:
    """Seconds of an all-gather and a reduce-scatter, their mean, for each of SIZES: the best of 8."""
    best = dict.fromkeys(SIZES, float("inf"))
    for size in [*SIZES] * 8:
        full = torch.zeros(size // 4)
        shard = full.chunk(comm.size)[comm.rank]
        both = timed(comm, lambda: all_gather(shard, comm, out=full))  # noqa: B023
        both += timed(comm, lambda: reduce_scatter(full, comm))  # noqa: B023
        best[size] = min(best[size], both / 2)
    return best


def measure_steps(comm: Comm) -> dict[int, list[float]]:
    """Seconds of a whole step, and of Adam's part of it, by stage of ZeRO: the best of 3."""
    models = [*(stage(GPT(CONFIG), comm) for stage in STAGES[:3]), Zero3(GPT(CONFIG), comm, prefetch=0)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-4) for model in models]
    x = torch.zeros(BATCH, CONFIG.sequence_length, dtype=torch.long)
    best = {stage: [float("inf")] * 2 for stage in range(4)}
    for _ in range(3):
        for stage, (model, optimizer) in enumerate(zip(models, optimizers)):
            whole = timed(comm, lambda: (model(x, x).backward(), optimizer.step()))  # noqa: B023
            found = (whole, timed(comm, optimizer.step))
            optimizer.zero_grad()
            best[stage] = [min(pair) for pair in zip(best[stage], found)]
    return best


def calibrate(rings: dict[int, float], steps: dict[int, list[float]]) -> Machine:
    """This machine, from the rings and the steps at 2 ranks."""
    alpha, beta = alpha_and_beta({size // 2: seconds for size, seconds in rings.items()})  # (N - 1)/N of the bytes
    model = gpt(CONFIG.layers, CONFIG.width, CONFIG.heads, CONFIG.sequence_length, CONFIG.vocabulary)
    link = Link(alpha, beta, "measured at 2 ranks")
    gpu = GPU("this CPU", {"float32": 1.0}, float("inf"), ADAM_BYTES * model.parameters / steps[0][1], link.source)
    cluster = Cluster(gpu, 2**20, link, link, link, float("inf"), 1.0, base_latency=0.0, cores=CORES)
    # What the steps take beyond an infinitely fast computation is computing.
    known = sum(Machine(model, cluster, float("inf")).step_seconds(2, stage) for stage in steps)
    computing = sum(whole for whole, _ in steps.values()) - known
    return Machine(model, cluster, len(steps) * BATCH * model.flops() / computing)


def with_measured(cluster: Cluster, file: Path) -> Cluster:
    """The cluster with the link that `python -m minizero.lab` measured. Our ring's, since `minizero.train` sends by it.

    Ranks of one host measured the link inside, those of several the network: each rank of a host has a part of its β.
    `ValueError` for a file that the lab did not write.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        ranks, on_a_host, its = found["ranks"], found["ranks_per_host"], found["operations"]["all-gather"]["our ring"]
        link = Link(
            float(its["alpha"]), float(its["beta"]), f"measured with {int(ranks)} ranks, {int(on_a_host)} a host"
        )
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"--measured {file}: {error}: give the lab.json that python -m minizero.lab wrote") from error
    if ranks == on_a_host:
        return dataclasses.replace(cluster, inside=link, base_latency=0.0)
    network = dataclasses.replace(link, bandwidth=link.bandwidth / on_a_host)
    return dataclasses.replace(cluster, between=network, base_latency=0.0)


def compare(sizes: Iterable[int] = (4, 8), rounds: int = 2) -> tuple[list[StepTime], Machine]:
    """Measures steps at 2 ranks and at each of `sizes`, and simulates them. Each rank is one thread.

    The sizes take turns, so that what disturbs one disturbs all.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rings = dict.fromkeys(SIZES, float("inf"))
        steps: dict[int, dict[int, list[float]]] = {size: {} for size in (2, *sizes)}
        for _ in range(rounds):
            found = World(2, "cpu").run(measure_rings)[0]
            rings = {size: min(rings[size], found[size]) for size in SIZES}
            for size, best in steps.items():
                for stage, pair in World(size, "cpu").run(measure_steps)[0].items():
                    best[stage] = [min(both) for both in zip(best.get(stage, pair), pair)]
    finally:
        torch.set_num_threads(threads)
    machine = calibrate(rings, steps[2])
    rows = [
        StepTime(stage, size, whole, machine.step_seconds(size, stage))
        for size, best in steps.items()
        for stage, (whole, _) in best.items()
    ]
    return rows, machine
