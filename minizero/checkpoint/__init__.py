"""State on disk: every rank writes its part, and any other number of ranks reads it again.

saved.py        save and load: one rename makes a checkpoint count
index.py        the index, and what is checked as it is read
resharding.py   what is in the files, and how another world size finds its part
"""

from minizero.checkpoint.saved import CheckpointError, NoCheckpoint, load, save

__all__ = ["CheckpointError", "NoCheckpoint", "load", "save"]
