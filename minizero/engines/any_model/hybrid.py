"""Hybrid sharding: ZeRO stage 3 inside groups of F ranks, replicas across the groups.

    ranks 0 … 7, F = 4      inside:  0 1 2 3 | 4 5 6 7       across:  0 4 | 1 5 | 2 6 | 3 7

    per rank (FP32, Adam)   16Ψ/F bytes
    sent per step           inside a group   3Ψ (F-1)/F elements, as stage 3 with F ranks (the root unit's less)
                            across groups    2Ψ/F · (N/F-1)/(N/F): all-reduce of the gradient's shard

A group is usually one machine: what goes between machines, where links are slow, is 1/F of the gradients and no
parameters. F = N is stage 3; F = 1 is DDP's memory and traffic. In between, memory is paid with bytes.
Gradients are summed in another order than in the other stages: equal up to rounding, not bit for bit.
Zhao et al., 2023, "PyTorch FSDP", section 3.2.2 (sharding factor).
"""

from minizero.ranks.comm import Comm


def inside_and_across(comm: Comm, sharding_factor: int | None) -> tuple[Comm, Comm | None]:
    """The ranks inside this one's group, and those across the groups that hold the same chunk; one group has none.

    None: one group of all. `ValueError` if the factor does not divide the number of ranks.
    """
    if sharding_factor is None or (sharding_factor, type(sharding_factor)) == (comm.size, int):
        return comm, None
    if not isinstance(sharding_factor, int) or sharding_factor < 1 or comm.size % sharding_factor:
        factors = ", ".join(str(factor) for factor in range(1, comm.size + 1) if comm.size % factor == 0)
        raise ValueError(f"sharding_factor: {sharding_factor!r} does not divide {comm.size} ranks: use {factors}")
    factor = sharding_factor
    return comm.split(lambda rank: rank // factor), comm.split(lambda rank: rank % factor)
