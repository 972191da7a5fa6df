"""Engines: a module is wrapped, and every rank trains it on its own part of the data.

    zero3_on_a_page.py  the whole idea, without hooks: to be read first
    zero3_by_hooks.py   four hooks, for any model: to be read second; it lists what the files below add

    layout.py       where each parameter lies in a flat buffer
    unit.py         parameters that are gathered, reduced and freed together
    gradient.py     a unit's gradient on this rank, while backward fills it
    engine.py       what the stages share: when parameters are gathered and gradients reduced; the path of a gradient
    ddp.py          stage 0: replicate everything, average the gradients
    zero1.py        stage 1: shard the optimizer states
    zero2.py        stage 2: shard the gradients as well
    zero3.py        stage 3: shard the parameters as well
    hybrid.py       the sharding factor: stage 3 inside groups of ranks, replicas across them
    lane.py         when stage 3 gathers and reduces: at once
    prefetch.py     or ahead: the next unit is gathered, the last gradient reduced, while this unit computes
    offload.py      shards, gradients and optimizer states in the CPU's memory

what an engine needs, too:

    uses.py         hooks of autograd that say when a unit is used
    units.py        which parameters form a unit
    wrapped.py      what a training loop calls: parameters, clipping, full state
    timeline.py     records what each rank does when
    guards/         what is refused, against what, and why: skip it at first
"""

from minizero.engines.ddp import DDP
from minizero.engines.zero1 import Zero1
from minizero.engines.zero2 import Zero2
from minizero.engines.zero3 import Zero3

STAGES = (DDP, Zero1, Zero2, Zero3)

__all__ = ["DDP", "STAGES", "Zero1", "Zero2", "Zero3"]
