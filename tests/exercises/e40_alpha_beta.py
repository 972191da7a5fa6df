"""How long does a collective take on a cluster that nobody here owns? A hop costs α seconds, whatever it
carries, and then β bytes go over a link each second. A ring over all g ranks enters each of h hosts once:

    seconds = base + (g - h) α_inside + (h - 1) α_between + (g - 1)/g · S / bandwidth

so of its hops h - 1 go from host to host and g - h stay inside. The slowest link sets the pace: inside a host
one GPU's link; between hosts the network cards of all g/h ranks of a host work side by side.

    self.base_latency    self.inside, self.between: links with .latency and .bandwidth    self.hosts(members, stride)
"""

import itertools
from random import Random
from typing import Any, NamedTuple

from minizero.simulate.clusters import GPU, Cluster, Link
from tests.exercises.draws import deal
from tests.exercises.kit import value_or_error, wrong

PLAN = [
    "One rank, or nothing to send: no time.",
    "hosts: on how many does the group lie?",
    "The latency: base, and the hops inside and between.",
    "The bandwidth: that of the slowest link of the ring. Inside counts if a host has more than one of the "
    "ranks; between, if there is more than one host, as many cards as ranks in a host.",
    "Latency, and (g-1)/g of the bytes over the bandwidth.",
]
HINTS = [
    "members // hosts is the number of ranks in a host.",
    "Begin with the inside bandwidth (infinite where no two ranks share a host), and take the minimum with the other.",
]
AFTER = (
    "The slowest link sets the pace, so the package takes a minimum, and leaves out links that the ring does not use: "
    "the inner one if every host has one rank of the ring. The ranks of a host use their network cards side by side, "
    "so few ranks in each host are slow. The formula knows no other traffic and no waiting for slow ranks. Such "
    "constants are fitted to published runs. Read next: minizero/simulate/fits.py."
)
HOPS = "(members - hosts) * self.inside.latency + (hosts - 1) * self.between.latency"
WRONG = [
    wrong("forgets-the-fraction", "8 ranks, inside a host: each sends 7/8 of the tensor, not all of it.",
          ("(members - 1) / members * size", "size")),
    wrong("twice", "Twice the time: that is an all-reduce. A reduce-scatter or all-gather sends (g-1)/g of the "
          "tensor.", ("(members - 1) / members * size", "2 * (members - 1) / members * size")),
    wrong("all-hops-inside", "Of the 31 hops of 32 ranks on 4 hosts, 3 go from host to host: count those apart.",
          (HOPS, "(members - 1) * self.inside.latency")),
    wrong("all-hops-between", "Of the 31 hops of 32 ranks on 4 hosts, only 3 go from host to host, 28 stay inside.",
          (HOPS, "(members - 1) * self.between.latency")),
    wrong("one-card", "Between hosts all 8 ranks of a host send at once, each over its own card: 8 times the "
          "bandwidth.", ("members // hosts * self.between.bandwidth", "self.between.bandwidth")),
    wrong("fastest-link", "The ring is as slow as its slowest link, not as fast as its fastest.",
          ("bandwidth = min(bandwidth,", "bandwidth = max(bandwidth,")),
    wrong("forgets-the-base", "Every collective costs base_latency, however little it moves.",
          ("self.base_latency + ", "")),
    wrong("alone-takes-time", "One rank has nobody to send to, and still took time.",
          ("if members == 1 or size == 0:", "if size == 0:")),
]  # fmt: skip
A_GPU = GPU("any", {"float32": 1e12}, 1e9, 1e11, "made up")


class Case(NamedTuple):
    gpus_per_host: int
    members: int
    stride: int
    size: float
    latency_inside: float
    latency_between: float
    bandwidth_inside: float
    bandwidth_between: float
    base: float
    seed: int


def draw(random: Random) -> list[Case]:
    """Groups that do not lie evenly on hosts are an error."""
    ways = itertools.product((1, 2, 4, 8, 16), (1, 2, 3, 4, 8, 16, 32, 64), (1, 2, 4, 8, 16))
    latencies, bandwidths = [0.0, 1e-6, 5e-6, 1e-5], [1e9, 4e9, 25e9, 400e9]
    columns = ([0, 0.5, 1000.5, 1e6, 8e9], latencies, latencies, bandwidths, bandwidths, [0.0, 1e-5])
    plain = [Case(8, members, 1, 1e6, 1e-6, 5e-6, 400e9, 25e9, 0.0, 1) for members in (8, 32)]
    return plain + [Case(*row) for row in deal(random, ways, *columns)]


def result(case: Case) -> Any:
    inside = Link(case.latency_inside, case.bandwidth_inside, "made up")
    between = Link(case.latency_between, case.bandwidth_between, "made up")
    links = inside, between, Link(0.0, 1e9, "made up")
    cluster = Cluster(A_GPU, case.gpus_per_host, *links, 1e12, 1e11, base_latency=case.base)
    seconds = value_or_error(cluster.ring, case.size, case.members, case.stride)
    return seconds if isinstance(seconds, str) else float(seconds)


def tolerance(_: Case) -> float:
    return 1e-9
