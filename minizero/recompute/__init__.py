"""Recompute (gradient checkpointing): keep a block's input, and run the block again in backward.

full.py        two short ways, then `checkpoint`, with all that a user expects
replay.py      the second run sees what the first saw: random numbers, autocast, buffers
frame.py       what the first run saves is dropped, and made again when backward asks for it
selective.py   results that are kept, since they would take long to make again
sequential.py  a schedule of recomputation on real layers
"""

from minizero.recompute.full import Checkpointed, checkpoint, checkpoint_selective
from minizero.recompute.replay import RecomputeMismatch, is_recomputing, set_enabled
from minizero.recompute.selective import keep_matmuls
from minizero.recompute.sequential import checkpoint_sequential
from minizero.recompute.two_ways import by_function, by_hooks

__all__ = [
    "Checkpointed",
    "RecomputeMismatch",
    "by_function",
    "by_hooks",
    "checkpoint",
    "checkpoint_selective",
    "checkpoint_sequential",
    "is_recomputing",
    "keep_matmuls",
    "set_enabled",
]
