"""One training step on a cluster, as a timeline of two streams.

Compute and communication each do one thing at a time, in a fixed order. An operation starts when its stream is free
and what it needs is there:

    compute         F0   F1   F2  …   B2    B1    B0   optimizer      F, B: forward and backward of a unit
    communication   G1   G2   …   G1  R2    G0  R1   R0               G: gather its parameters, R: reduce its gradient

G may start when the use `prefetch` + 1 places before its own is over and its unit is released. Every rank does the
same, so one stands for all, and a simulation takes as long for 8 GPUs as for 8,000. Two constants make a step longer
than its parts:

    interference    a collective uses cores of the GPU: it lengthens what computes beside it by this share of its
                    own time
    jitter          ranks wait for the slowest of N: compute takes 1 + jitter (√N - 1) times as long. The largest
                    of N delays grows so if long ones are rare (a tail of index 2). Beyond its fit's N it is a guess

Zhao et al., 2023, "PyTorch FSDP", section 3.3 (overlap, prefetch, at most two gathers at a time).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

from minizero.engines.ddp import BUCKET_BYTES
from minizero.pictures.timeline import Event
from minizero.simulate.clusters import Cluster
from minizero.simulate.peak import peak_memory
from minizero.simulate.shapes import Layer, Model
from minizero.simulate.strategy import Constants, Strategy

ADAM_BYTES = 28  # for each parameter, in FP32: reads it, its gradient and two moments; writes all but the gradient
Span = tuple[str, str, float, float]  # lane, name, start, end


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What one step takes, for each GPU. sent: bytes. sent_between: the part of them from host to host, on average."""

    model: Model
    cluster: Cluster
    plan: Strategy
    seconds: float
    compute_seconds: float
    sent: float
    sent_between: float
    spans: Sequence[Span]

    @functools.cached_property
    def memory(self) -> dict[str, float]:
        """Bytes by category at the moment of the peak, and `total`."""
        return peak_memory(self.model, self.plan)

    @property
    def fits(self) -> bool:
        """Have the GPU and the host room for it?"""
        return self.cluster.holds(self.memory)

    @property
    def exposed_seconds(self) -> float:
        """Seconds in which the GPU computes nothing: communication and copies that nothing hides."""
        return self.seconds - self.compute_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens of one GPU's part of the batch, per second."""
        return self.plan.batch_size * self.plan.micro_batches * self.model.tokens / self.seconds

    @property
    def tflops(self) -> float:
        """10¹² floating-point operations per second. What is computed twice counts twice."""
        flops = self.plan.batch_size * self.plan.micro_batches * self.model.flops(self.plan.recompute)
        return flops / self.seconds / 1e12

    def events(self) -> list[Event]:
        """The spans as `minizero.pictures.timeline` draws them, and measured steps too."""
        return [Event(0, *span) for span in self.spans if span[3] > span[2]]


def simulate(model: Model, cluster: Cluster, plan: Strategy, constants: Constants | None = None) -> Prediction:
    """One training step. Raises `ValueError` if a host would not be full, or the GPU does not know the dtype."""
    return _Simulation(model, cluster, plan, constants or Constants()).step()


class _Simulation:
    """One step while it is built up. A method that adds operations to the streams returns when the last one ends."""

    def __init__(self, model: Model, cluster: Cluster, plan: Strategy, constants: Constants) -> None:
        if plan.dtype not in cluster.gpu.peak:
            raise ValueError(f"{cluster.gpu.name} does not compute in {plan.dtype}: use {', '.join(cluster.gpu.peak)}")
        cluster.hosts(plan.ranks)  # raises if the last one would not be full
        self.model, self.cluster, self.plan, self.constants = model, cluster, plan, constants
        self.crowding = cluster.crowding(plan.ranks)
        self.jitter = 1 + constants.jitter * (math.sqrt(plan.ranks) - 1)
        self.flops_per_second = cluster.gpu.peak[plan.dtype] * constants.efficiency
        self.free: dict[str, float] = {}  # by stream: when it is free
        self.spans: list[Span] = []
        self.ring, self.hosts = functools.cache(cluster.ring), functools.cache(cluster.hosts)
        self.sent = 0.0
        self.sent_between = 0.0
        self.beside = 0.0  # seconds of the collectives that run beside the next computation
        self.bucket = 0.0  # bytes that wait for DDP's next all-reduce

    def step(self) -> Prediction:
        done = 0.0
        for micro in range(self.plan.micro_batches):
            done = self.forward_and_backward(micro, done)
        self.optimizer(done)
        spans = self.spans
        on_gpu = ("compute",) if self.plan.offload else ("compute", "optimizer")
        computing = sum(end - start for lane, _, start, end in spans if lane in on_gpu)
        whole = max(end for _, _, _, end in spans)
        return Prediction(self.model, self.cluster, self.plan, whole, computing, self.sent, self.sent_between, spans)

    def forward_and_backward(self, micro: int, start: float) -> float:
        """One micro-batch. The last one reduces the gradients."""
        plan, root, units = self.plan, self.model.root, self.model.units
        # Forward through the units, the head forward and backward at once, backward through the units.
        uses = [(unit, "forward", unit.flops) for unit in units] + [(root, "head", 3 * root.flops)]
        uses += [(u, "backward", 2 * u.flops + u.recomputed(plan.recompute)) for u in reversed(units)]
        last = micro == plan.micro_batches - 1
        # The kinds of use that begin with a gather: every use in stage 3, a unit's first in stages 1 and 2.
        kinds: tuple[str, ...] = ()
        if plan.stage == 3:
            kinds = ("forward", "backward") if plan.reshard_after_forward else ("forward",)
        elif plan.stage > 0 and micro == 0:
            kinds = ("forward",)
        done: list[float] = []  # by use: when it is over
        there: list[float] = []  # by use: when its parameters are there
        end = root_there = self.gather(root, start) if kinds else start
        for i, (unit, kind, flops) in enumerate(uses):
            # Gather for this use, and for those that prefetch brings forward.
            for ahead, what, _ in uses[len(there) : i + plan.prefetch + 1]:
                if what not in kinds:
                    there.append(root_there)
                    continue
                released = len(there) - plan.prefetch - 1
                there.append(self.gather(ahead, done[released] if released >= 0 and plan.stage == 3 else start))
                if len(there) == i + 1:  # this use waits for it, so it does not run beside this use
                    self.beside = 0.0
            done.append(self.compute(f"{kind} {unit.name}", flops, max(there[i], root_there)))
            if kind == "backward" and last:
                end = self.reduce(unit, done[-1], False)
        return self.reduce(root, done[-1], True) if last else max(end, done[-1])

    def gather(self, unit: Layer, after: float) -> float:
        """All-gathers the unit's parameters."""
        return self.collective("all-gather", unit, self.padded(unit), self.plan.shards, 1, after)

    def reduce(self, unit: Layer, after: float, last: bool) -> float:
        """Reduce-scatter inside the group, then all-reduce of the shard across groups. DDP's groups are of one rank."""
        shards, size = self.plan.shards, float(self.padded(unit))
        end = self.collective("reduce-scatter", unit, size, shards, 1, after)
        if self.plan.stage == 0:  # the gradients of several units travel together
            self.bucket += size
            if self.bucket < BUCKET_BYTES and not last:
                return end
            size, self.bucket = self.bucket, 0.0
        end = self.collective("all-reduce", unit, size / shards, self.plan.ranks // shards, shards, end)
        return self.copy("gradient to host", size / shards, end) if self.plan.offload else end

    def run(self, lane: str, name: str, seconds: float, after: float) -> float:
        """An operation that may not start before `after`. Each stream runs its own one by one, in this order."""
        stream = {"compute": "compute", "optimizer": "compute", "copy": "copy"}.get(lane, "communication")
        stream = stream if self.plan.overlap else "all"
        start = max(self.free.get(stream, 0.0), after)
        self.free[stream] = start + seconds
        self.spans.append((lane, name, start, start + seconds))
        return start + seconds

    def collective(self, lane: str, unit: Layer, size: float, members: int, stride: int, after: float) -> float:
        """A ring over a group of ranks, `stride` apart; two for an all-reduce. size: bytes of the whole tensor."""
        passes = 2 if lane == "all-reduce" else 1
        seconds = passes * self.ring(size, members, stride) * self.crowding
        sent = passes * (members - 1) / members * size
        hosts = self.hosts(members, stride)
        self.sent += sent
        self.sent_between += sent * hosts / members if hosts > 1 else 0  # a ring leaves each host at one rank
        self.beside += seconds
        return self.run(lane, unit.name, seconds, after) if members > 1 else after

    def compute(self, name: str, flops: float, after: float) -> float:
        """One use of a unit."""
        seconds = self.plan.batch_size * flops / self.flops_per_second * self.jitter * self.crowding
        if self.plan.overlap:
            seconds += self.constants.interference * self.beside
        self.beside = 0.0
        return self.run("compute", name, seconds, after)

    def copy(self, name: str, size: float, after: float) -> float:
        """A copy between this GPU and its host's memory."""
        link = self.cluster.to_host
        return self.run("copy", name, link.latency + size / link.bandwidth, after)

    def optimizer(self, after: float) -> None:
        """Adam on this rank's shard, as fast as memory is. Under offload the new parameters then come back."""
        plan, cluster = self.plan, self.cluster
        count = sum(map(self.padded, (self.model.root, *self.model.units))) / plan.itemsize / plan.shards
        moved = count * (ADAM_BYTES + (2 if plan.itemsize == 2 else 0))  # in 16 bits it writes the copy too
        speed = cluster.host_memory_bandwidth if plan.offload else cluster.gpu.memory_bandwidth
        after = self.run("optimizer", "Adam", moved / speed * self.crowding, after)
        if plan.offload:
            self.copy("parameters to GPU", count * plan.itemsize, after)

    def padded(self, unit: Layer) -> int:
        """Bytes of a unit's flat buffer, padded so that the number of GPUs divides it."""
        return -(-unit.parameters // self.plan.ranks) * self.plan.ranks * self.plan.itemsize
