"""minizero: how large models are trained in little memory, from scratch and to be read.

Reading order: comm, world, processes, collectives, partition, wrapped, engine, checks, ddp, zero1, zero2, zero3,
hybrid, resharding, checkpoint, memory, recompute, replay, frame, selective, chain, schedules, optimal, sequential,
profile_chain, depth, accumulate, gpt, options, train, report. `networks` and `table1` belong to `precision`.
"""

from minizero.engines.ddp import DDP
from minizero.engines.zero1 import Zero1
from minizero.engines.zero2 import Zero2
from minizero.engines.zero3 import Zero3
from minizero.models.gpt import GPT, GPTConfig
from minizero.ranks.collectives import all_gather, all_reduce, barrier, broadcast, reduce_scatter
from minizero.ranks.comm import CollectiveMismatch, Comm, CommTimeout, RankFailed
from minizero.ranks.world import World

__all__ = [
    "DDP",
    "GPT",
    "CollectiveMismatch",
    "Comm",
    "CommTimeout",
    "GPTConfig",
    "RankFailed",
    "World",
    "Zero1",
    "Zero2",
    "Zero3",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "reduce_scatter",
]
