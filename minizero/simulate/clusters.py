"""GPUs, links and clusters, each constant with its source; and what one collective costs on them.

NCCL runs a reduce-scatter or an all-gather of S bytes as one ring over all g ranks, which enters each host once:

    seconds = base + (g - h) α_inside + (h - 1) α_between + (g - 1)/g · S / min(β_inside, r β_between)

h: hosts. r = g/h: the ring's ranks in each host, which use r network cards at once. α: seconds for a hop. β: bytes per
second. An all-reduce is a reduce-scatter and then an all-gather.
Hockney, 1994 (α and β); NCCL's src/graph/tuning.cc (the hops of a ring).
"""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import TypeVar

from flash import gpus

Known = TypeVar("Known")
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class GPU:
    """peak: FLOP/s of dense matrix products, by dtype. memory: bytes. memory_bandwidth: bytes per second."""

    name: str
    peak: Mapping[str, float]
    memory: float
    memory_bandwidth: float
    source: str


@dataclasses.dataclass(frozen=True)
class Link:
    """latency: seconds for a hop. bandwidth: bytes per second that one GPU sends, while it receives as many."""

    latency: float
    bandwidth: float
    source: str


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Equal hosts, as many as a plan needs.

    inside, between: the links in a host, and from host to host. to_host: a GPU's copies to and from CPU memory.
    host_memory, host_memory_bandwidth: bytes, and bytes per second, of a host's memory for each of its GPUs.
    cores: how many ranks run at a time if ranks are threads or processes on one machine; else None.
    """

    gpu: GPU
    gpus_per_host: int
    inside: Link
    between: Link
    to_host: Link
    host_memory: float
    host_memory_bandwidth: float
    base_latency: float = 8.4e-6  # of a ring: NCCL's src/graph/tuning.cc, protocol for large messages
    cores: int | None = None

    def holds(self, memory: Mapping[str, float]) -> bool:
        """Have a GPU and its part of the host room for these bytes, by category, with `total` and perhaps `host`?"""
        return memory["total"] <= self.gpu.memory and memory.get("host", 0.0) <= self.host_memory

    def crowding(self, ranks: int) -> float:
        """How many times longer everything takes, because `ranks` ranks share the cores."""
        return max(1.0, ranks / self.cores) if self.cores else 1.0

    def hosts(self, members: int, stride: int = 1) -> int:
        """How many hosts a group of `members` ranks, `stride` apart, lies on. `ValueError` if they lie unevenly."""
        span = members * stride
        if span <= self.gpus_per_host:
            return 1
        per_host = max(1, self.gpus_per_host // stride)
        if members % per_host or max(stride, self.gpus_per_host) % min(stride, self.gpus_per_host):
            raise ValueError(
                f"{members:,} ranks{f', {stride:,} apart,' if stride > 1 else ''} do not lie evenly on hosts of "
                f"{self.gpus_per_host}: use multiples of {self.gpus_per_host}, or divisors"
            )
        return members // per_host

    def with_network(self, share: float) -> "Cluster":
        """The same hosts on a network of this share of the bandwidth."""
        between = dataclasses.replace(self.between, bandwidth=self.between.bandwidth * share)
        return dataclasses.replace(self, between=between)

    def ring(self, size: float, members: int, stride: int = 1) -> float:
        """Seconds of one reduce-scatter or all-gather in a group. size: bytes of the whole tensor."""
        if members == 1 or size == 0:
            return 0.0
        hosts = self.hosts(members, stride)
        latency = self.base_latency + (members - hosts) * self.inside.latency + (hosts - 1) * self.between.latency
        bandwidth = self.inside.bandwidth if hosts < members else float("inf")
        if hosts > 1:
            bandwidth = min(bandwidth, members // hosts * self.between.bandwidth)
        return latency + (members - 1) / members * size / bandwidth


def choose(table: Mapping[str, Known], name: str, what: str) -> Known:
    """The entry of a table by its name. Raises `ValueError` for an unknown name, and suggests the nearest ones."""
    if name in table:
        return table[name]
    begins = [known for known in table if name and known.startswith(name.lower())]
    near = begins or difflib.get_close_matches(name.lower(), table, n=3, cutoff=0.4)
    advice = f"did you mean {' or '.join(near)}?" if near else f"use one of {', '.join(table)}"
    raise ValueError(f"{what} {name!r} is unknown: {advice}")


def product(name: str, sold_as: str, float32: float, source: str, bfloat16: bool = True) -> GPU:
    """A GPU of flash/gpus.py, where its memory, its bandwidth and its rate in 16 bits stand."""
    made = gpus.GPUS[sold_as]
    peak = {"float32": float32} | dict.fromkeys(("float16", "bfloat16")[: 1 + bfloat16], made.matmul_flops)
    return GPU(name, peak, made.memory, made.hbm_bytes_per_second, f"NVIDIA {source}")


# Dense rates, as measured without sparsity. "float32" is the rate of TF32 where the GPU has it.
GPUS = {
    "V100": product("V100", "V100 SXM2", 15.7e12, "V100 datasheet, SXM2 32 GB", bfloat16=False),
    "A100-40": product("A100-40", "A100 SXM 40GB", 156e12, "A100 datasheet, SXM4 40 GB"),
    "A100-80": product("A100-80", "A100 SXM 80GB", 156e12, "A100 datasheet, SXM4 80 GB"),
    "H100": product("H100", "H100 SXM", 494.5e12, "H100 datasheet, SXM5"),
    "H200": product("H200", "H200 SXM", 494.5e12, "H200 datasheet, SXM"),
}

# The share of the datasheet's bandwidth that a ring reaches. Isaev et al., 2023, "Calculon", use 0.65 for NVLink and
# 0.9 for networks.
NVLINK_SHARE, NETWORK_SHARE = 0.65, 0.9
NCCL = "hop: NCCL's src/graph/tuning.cc, ring, protocol for large messages"
NVLINK2 = Link(3.4e-6, 150e9 * NVLINK_SHARE, f"NVIDIA: 6 links of 25 GB/s; share: Calculon; {NCCL}")
NVLINK3 = Link(3.4e-6, 300e9 * NVLINK_SHARE, f"NVIDIA: 12 links of 25 GB/s; share: Calculon; {NCCL}")
NVLINK4 = Link(3.4e-6, 450e9 * NVLINK_SHARE, f"NVIDIA: 18 links of 25 GB/s; share: Calculon; {NCCL}")
NET100 = Link(9.6e-6, 12.5e9 / 2 * NETWORK_SHARE, f"NVIDIA DGX-1: 4 x 100 Gb/s for 8 GPUs; share: Calculon; {NCCL}")
NET200 = Link(9.6e-6, 25e9 * NETWORK_SHARE, f"NVIDIA DGX A100: 200 Gb/s a GPU; share: Calculon; {NCCL}")
NET400 = Link(9.6e-6, 50e9 * NETWORK_SHARE, f"NVIDIA DGX H100: 400 Gb/s a GPU; share: Calculon; {NCCL}")
ROCE250 = Link(9.6e-6, 2e12 / 8 / 8 * NETWORK_SHARE, f"Zhao et al., 2023: 2 Tb/s a host of 8; share: Calculon; {NCCL}")
PCIE3 = Link(1e-5, 16e9, "PCI-SIG: 16 lanes of generation 3, 16 GB/s each way")
PCIE4 = Link(1e-5, 32e9, "PCI-SIG: 16 lanes of generation 4, 32 GB/s each way")
PCIE5 = Link(1e-5, 64e9, "PCI-SIG: 16 lanes of generation 5, 64 GB/s each way")

# Of a host's memory each GPU gets an eighth. NVIDIA DGX-1: 512 GB, 2 x 4 channels of DDR4-2400; DGX A100: 1 or 2 TB,
# 2 x 8 of DDR4-3200; DGX H100: 2 TB, 2 x 8 of DDR5-4800. Each channel is 8 bytes wide.
CLUSTERS = {
    "v100": Cluster(GPUS["V100"], 8, NVLINK2, NET100, PCIE3, 64e9, 19e9),
    "a100-40": Cluster(GPUS["A100-40"], 8, NVLINK3, NET200, PCIE4, 128e9, 51e9),
    "a100-80": Cluster(GPUS["A100-80"], 8, NVLINK3, NET200, PCIE4, 256e9, 51e9),
    "a100-80-roce": Cluster(GPUS["A100-80"], 8, NVLINK3, ROCE250, PCIE4, 256e9, 51e9),
    "h100": Cluster(GPUS["H100"], 8, NVLINK4, NET400, PCIE5, 256e9, 77e9),
    "h200": Cluster(GPUS["H200"], 8, NVLINK4, NET400, PCIE5, 256e9, 77e9),
}
