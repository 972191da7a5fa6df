"""Recompute (gradient checkpointing): keep a block's input, and run the block again in backward.

two_ways.py        in short, twice: a node of the graph, and hooks
full.py            `checkpoint`, with all that a user expects
frame.py           what the first run saves is dropped, and made again when backward asks for it
inputs.py          the arguments, kept for the second run
replay.py          the second run sees what the first saw: random numbers, buffers, autocast
selective.py       results that are kept, since they would take long to make again
sequential.py      a schedule of recomputation on real layers
guards/            what could make the second run another one, and what stands against it
"""

from minizero.recompute.full import Checkpointed, checkpoint, checkpoint_selective, set_enabled
from minizero.recompute.guards.mismatch import RecomputeMismatch
from minizero.recompute.replay import is_recomputing
from minizero.recompute.selective import keep_matmuls
from minizero.recompute.sequential import checkpoint_sequential
from minizero.recompute.two_ways import by_function, by_hooks

__all__ = ["Checkpointed", "RecomputeMismatch", "by_function", "by_hooks", "checkpoint", "checkpoint_selective"]
__all__ += ["checkpoint_sequential", "is_recomputing", "keep_matmuls", "set_enabled"]
