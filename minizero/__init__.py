"""minizero: how large models are trained in little memory, from scratch and to be read.

A folder for each lesson; its `__init__` gives the order of its files.

    ranks/            N ranks, and what they send each other
    engines/          DDP and ZeRO 1 to 3: a module is wrapped, and sharded
    memory/           bytes measured, and bytes predicted
    recompute/        keep a block's input, run the block again in backward
    schedules/        which inputs to keep
    models/           what the lessons train
    pictures/         draws plain data
    checkpoint/       state on disk, read again at another world size
    train/            the main job: train under each stage, and measure
    simulate/         clusters that nobody here owns
    mixed_precision/  the claims of the mixed-precision paper as runs
    accumulate.py     micro-batches, weighted by their tokens
    chunked_loss.py   cross-entropy without the matrix of logits
    ring_attention.py a text cut across ranks: keys and values go round a ring
    lab.py            a cluster measured: how fast its ranks talk
    grid.py           who holds what, live
    xray/             a user's own model: who holds the peak, what would help
    torch_private.py  every private name of PyTorch in use
    cli.py            what command lines share
    interrupted.py    Ctrl-C while a command imports
    beside.py         says which file hides one of our packages

An import goes down this list's floors, never up: CONTRIBUTING.md draws them, and a test holds them.
"""

from minizero import beside, interrupted  # noqa: F401  before all that takes time
from minizero.chunked_loss import cross_entropy_in_chunks
from minizero.engines import DDP, Zero1, Zero2, Zero3
from minizero.models.gpt import GPT, GPTConfig
from minizero.ranks.collectives import all_gather, all_reduce, barrier, broadcast, reduce_scatter
from minizero.ranks.comm import Comm
from minizero.ranks.errors import CollectiveMismatch, CommTimeout, RankFailed
from minizero.ranks.world import World

__all__ = ["DDP", "Zero1", "Zero2", "Zero3", "GPT", "GPTConfig", "cross_entropy_in_chunks"]
__all__ += ["World", "Comm", "RankFailed", "CollectiveMismatch", "CommTimeout"]
__all__ += ["all_gather", "all_reduce", "barrier", "broadcast", "reduce_scatter"]
