"""Engines: a module is wrapped, and every rank trains it on its own part of the data.

zero3_on_a_page.py  the whole idea, without hooks: to be read first
zero3_by_hooks.py   four hooks, for any model: to be read second; it lists what the files below add

core.py             what the stages share: when parameters are gathered and gradients reduced; a gradient's path
use.py              how autograd tells that a unit is needed, and that a gradient is there
layout.py           where each parameter lies in a flat buffer
zero1.py            stage 1: shard the optimizer states
zero2.py            stage 2: shard the gradients as well
zero3.py            stage 3: shard the parameters as well
ddp.py              stage 0: replicate everything, average the gradients; several units in one message

any_model/          what the core refuses, a file for each limit; the public classes. Their moments are the core's
timeline.py         records what each rank does when
"""

from minizero.engines.any_model.stages import DDP, Zero1, Zero2, Zero3

STAGES = (DDP, Zero1, Zero2, Zero3)

__all__ = ["DDP", "STAGES", "Zero1", "Zero2", "Zero3"]
