"""What the core refuses, a file for each limit. The moments have the names that they have in core.py.

    stages.py       the public DDP, Zero1, Zero2, Zero3; the order in which a call goes
    engine.py       each moment, for any model and loop

    uses.py         units that take and return anything; weights that are used and get no gradient
    units.py        frozen parameters; repeated blocks at any depth
    buffers.py      buffers that forward writes
    unit.py         16 bits with FP32 masters; several shards (`group_by`); hooks on shards
    norms.py        batch norms, which compute in FP32
    released.py     a parameter of the module while it is away or old
    steps.py        what an optimizer's step does to the replicas
    gradient.py     parameters that get no gradient; sums under no_sync
    prefetch.py     stage 3 gathers and reduces while it computes
    hybrid.py       the sharding factor: stage 3 inside groups of ranks, replicas across them
    offload.py      shards, gradients and optimizer states in the CPU's memory
    wrapped.py      what a training loop calls: parameters, no_sync, clipping, full state
    guards/         what is refused, against what, and why

Skip guards/ at first: it has no mechanism.
"""
